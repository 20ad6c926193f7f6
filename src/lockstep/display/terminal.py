"""The outputs on which progress is shown: a terminal, a notebook, or a file, which gets finished lines only."""

from importlib import import_module
from typing import Any, Protocol

import rich
from rich.console import Console, RenderableType
from rich.live import Live


class Screen(Protocol):
    """Protocol for an output that prints finished lines and redraws one progress line below them.

    >>> from rich.console import Console
    >>> screen: Screen = choose_screen(Console(force_terminal=False))
    >>> screen.keep("a line")
    a line
    """

    live: bool
    """Whether this output can show progress; if not, `show` does nothing."""

    def show(self, renderable: RenderableType) -> None:
        """Draws the progress line in place of the previous progress line."""

    def keep(self, renderable: RenderableType) -> None:
        """Prints a finished line in place of the progress line."""

    def close(self) -> None:
        """Releases the terminal; the progress line remains on the screen. May be called again."""


def standard_console() -> Console:
    """Returns rich's own console, so that what the script prints with rich appears above the progress line.

    If this console does not write to a terminal, returns a console that is not interactive, because rich treats a pipe
    as a terminal if FORCE_COLOR is set, as it often is for tests.

    >>> standard_console().is_jupyter
    False
    """
    console = rich.get_console()
    return console if console.is_jupyter or console.file.isatty() else Console(force_interactive=False)


def choose_screen(console: Console) -> Screen:
    """Returns a `Terminal`, `Notebook` or `PlainOutput`, depending on what `console` writes to.

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
    """The output to a file or a pipe, which gets only finished lines, without line breaks in them."""

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
    """The output to a terminal. While it shows progress, the cursor is hidden and other output appears above it."""

    live = True

    def __init__(self, console: Console) -> None:
        self._console = console
        self._line: Live | None = None

    def show(self, renderable: RenderableType) -> None:
        if self._line is None:
            # Without auto_refresh, which would start a thread that draws while training computes.
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
        # The field is cleared last, so that `close` stops the line again if Ctrl-C has interrupted `stop`.
        if self._line is not None:
            self._line.stop()
            self._line = None


class Notebook:
    """The output to a notebook, which replaces one cell output to show progress; needs IPython, but no widgets."""

    live = True

    def __init__(self, console: Console) -> None:
        self._console = console
        self._output: Any = None

    def show(self, renderable: RenderableType) -> None:
        if self._output is None:
            # Not an import statement, because IPython is not a dependency; a notebook has it.
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
