"""Where progress is shown: a terminal with one moving line, a notebook, or a file, which gets finished lines only."""

from importlib import import_module
from typing import Any, Protocol

import rich
from rich.console import Console, RenderableType
from rich.live import Live


class Screen(Protocol):
    """Where finished lines are printed, and one line below them is redrawn.

    >>> from rich.console import Console
    >>> screen: Screen = choose_screen(Console(force_terminal=False))
    >>> screen.keep("a line")
    a line
    """

    live: bool
    """Whether `show` does anything."""

    def show(self, renderable: RenderableType) -> None:
        """Draw the moving line in the place of the previous one."""

    def keep(self, renderable: RenderableType) -> None:
        """Print a finished line in the place of the moving one."""

    def close(self) -> None:
        """Release the terminal; the moving line stays on the screen. May be called twice."""


def standard_console() -> Console:
    """Return rich's own console, so that what the script prints through rich appears above the moving line.

    If it does not write to a terminal, return a console on which nothing moves: FORCE_COLOR, which is often set where
    tests run, makes rich treat a pipe as a terminal.

    >>> standard_console().is_jupyter
    False
    """
    console = rich.get_console()
    return console if console.is_jupyter or console.file.isatty() else Console(force_interactive=False)


def choose_screen(console: Console) -> Screen:
    """Return the screen for what `console` writes to: a terminal, a notebook or a file.

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
    """A file or a pipe, which gets finished lines only, without wrapping."""

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
    """A terminal. While there is a moving line, the cursor is hidden and other output appears above the line."""

    live = True

    def __init__(self, console: Console) -> None:
        self._console = console
        self._line: Live | None = None

    def show(self, renderable: RenderableType) -> None:
        if self._line is None:
            # No auto_refresh: it would start a thread that draws while training computes.
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
        # The field is cleared last: if Ctrl-C interrupts `stop`, `close` stops the line again.
        if self._line is not None:
            self._line.stop()
            self._line = None


class Notebook:
    """A notebook, in which one output per line is replaced; needs IPython, which every notebook has, and no widgets."""

    live = True

    def __init__(self, console: Console) -> None:
        self._console = console
        self._output: Any = None

    def show(self, renderable: RenderableType) -> None:
        if self._output is None:
            # Not an import statement: IPython is no dependency; a notebook has it.
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
