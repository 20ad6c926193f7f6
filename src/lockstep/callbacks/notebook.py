"""Notebooks: pictures in the output of a cell."""

from importlib import import_module
from typing import Any


def in_notebook() -> bool:
    """Whether a cell of a notebook can show pictures here.

    >>> in_notebook()
    False
    """
    import rich  # knows notebooks of several kinds; `import lockstep` does not wait for it

    return rich.get_console().is_jupyter


def show_picture(png: bytes, output: Any = None) -> Any:
    """Show a picture in the cell, in the place of the one in `output` if that is given; return the new output."""
    # Not an import statement: IPython is no dependency, a notebook brings it.
    display = import_module("IPython.display")
    image = display.Image(data=png)
    if output is None:
        return display.display(image, display_id=True)
    output.update(image)
    return output
