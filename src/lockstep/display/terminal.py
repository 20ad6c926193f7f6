"""Where progress is shown: a terminal redraws one line, a notebook updates a cell's output, and a file or pipe
only gets whole lines.
"""

from importlib import import_module
from typing import Any, Protocol

import rich
from rich.console import Console, RenderableType
from rich.live import Live


class Screen(Protocol):
    """Where lines stay, and one line below them moves.

    >>> from rich.console import Console
    >>> screen: Screen = choose_screen(Console(force_terminal=False))
    >>> screen.keep("a line")
    a line
    """

    live: bool
    """Whether `show` does anything."""

    def show(self, renderable: RenderableType) -> None:
        """Draws the moving line, over the one before."""

    def keep(self, renderable: RenderableType) -> None:
        """Writes a line that stays, in place of the moving one."""

    def close(self) -> None:
        """Lets go of the terminal; the moving line stays where it was. May be called twice."""


def standard_console() -> Console:
    """Gives rich's own console, so that what the script prints through rich appears above the moving line.

    Only when that is no terminal, a console that knows: FORCE_COLOR, often set where
    tests run, makes rich take a pipe for a terminal. Colors it may have; nothing moves.

    >>> standard_console().is_jupyter
    False
    """
    console = rich.get_console()
    return console if console.is_jupyter or console.file.isatty() else Console(force_interactive=False)


def choose_screen(console: Console) -> Screen:
    """Gives the screen that fits what `console` writes to.

    >>> from rich.console import Console
    >>> from io import StringIO
    >>> type(choose_screen(Console(file=StringIO(), force_terminal=False))).__name__
    'PlainOutput'
    """
    if console.is_jupyter:
        return Notebook(console)
    if console.is_terminal and console.is_interactive:
        return Terminal(console)
    return PlainOutput(console)


class PlainOutput:
    """A file or a pipe: whole lines, never wrapped, nothing that moves."""

    live = False

    def __init__(self, console: Console) -> None:
        self._console = console

    def show(self, renderable: RenderableType) -> None:
        pass

    def keep(self, renderable: RenderableType) -> None:
        self._console.print(renderable, soft_wrap=True, highlight=False, markup=False)

    def close(self) -> None:
        pass


class Terminal:
    """A terminal: while a line moves the cursor is hidden, and prints appear above it."""

    live = True

    def __init__(self, console: Console) -> None:
        self._console = console
        self._line: Live | None = None

    def show(self, renderable: RenderableType) -> None:
        if self._line is None:
            # No auto_refresh: no thread to draw beside the training, none to leak.
            self._line = Live(renderable, console=self._console, auto_refresh=False, transient=True)
            self._line.start(refresh=True)
        else:
            self._line.update(renderable, refresh=True)

    def keep(self, renderable: RenderableType) -> None:
        self._stop()
        self._console.print(renderable, highlight=False, markup=False)

    def close(self) -> None:
        if self._line is not None:
            self._line.transient = False
        self._stop()

    def _stop(self) -> None:
        # The field is cleared last: a Ctrl-C in the middle leaves it for `close` to stop again.
        if self._line is not None:
            self._line.stop()
            self._line = None


class Notebook:
    """A notebook: one output that is replaced; needs IPython, which is there, and no widgets."""

    live = True

    def __init__(self, console: Console) -> None:
        self._console = console
        self._output: Any = None

    def show(self, renderable: RenderableType) -> None:
        if self._output is None:
            # Not an import statement: IPython is no dependency, a notebook brings it.
            self._output = import_module("IPython.display").display(renderable, display_id=True)
        else:
            self._output.update(renderable)

    def keep(self, renderable: RenderableType) -> None:
        if self._output is None:
            self._console.print(renderable, highlight=False, markup=False)
        else:
            self._output.update(renderable)
        self.close()

    def close(self) -> None:
        self._output = None
