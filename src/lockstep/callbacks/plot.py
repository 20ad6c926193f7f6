"""Plot: a picture of the curves of a run, updated while it trains."""

from collections.abc import Callable
from os import PathLike
from pathlib import Path
from time import perf_counter
from typing import Any

from lockstep.callbacks.base import NO_LOGS, Callback, Logs
from lockstep.core.arguments import check_path
from lockstep.core.atomic_file import replace_file
from lockstep.display.curves import draw, in_notebook, load_figure_type, render_picture, show_picture
from lockstep.errors import CallbackError

SHARE = 0.1
"""The largest part of the time that drawing may take; if epochs are short, some are not drawn."""


class Plot(Callback):
    """Draws the loss and the metrics into a file after every epoch, and in a notebook also into the cell.

    The file is replaced in one move, so it can be viewed while training continues. If epochs are shorter than drawing
    takes, some are not drawn; the last one always is. Needs matplotlib.

    >>> import lockstep, numpy as np, tempfile
    >>> from lockstep.backends.numpy import SGD, Dense
    >>> x, y = np.eye(8), np.arange(8) % 2
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with lockstep.wrap(Dense([8, 2], seed=1), SGD(0.5), "cross_entropy") as trainer:
    ...         history = trainer.fit((x, y), epochs=3, callbacks=[Plot(folder + "/curves.png")], verbose=0)
    ...     [path.name for path in Path(folder).iterdir()]
    ['curves.png']
    """

    def __init__(self, path: str | PathLike[str] = "curves.png", clock: Callable[[], float] = perf_counter) -> None:
        target = Path(check_path("path", path, CallbackError, "curves.png"))
        if not target.name:
            raise CallbackError(f"path must name a file. Got {str(path)!r}. Use for example 'curves.png'.")
        self.path = target if target.suffix else target.with_suffix(".png")
        self._clock = clock
        self._is_behind = False  # whether an epoch has ended since the last drawing
        self._drawn: dict[str, float] = {}  # the newest epoch's values in the picture

    def on_train_begin(self, logs: Logs = NO_LOGS) -> None:
        load_figure_type()  # raises now, not after the first epoch, if matplotlib is missing
        self._output: Any = None
        self._is_behind = False
        self._drawn = {}
        self._due = self._clock()

    def on_epoch_end(self, epoch: int, logs: Logs = NO_LOGS) -> None:
        self._is_behind = True
        if self._clock() >= self._due:
            self._draw()

    def close(self) -> None:
        """Draw the last epoch if it is not drawn yet, also of a run that was interrupted."""
        # Callbacks may have written into the history since it was drawn.
        if self._is_behind or (self._drawn and self._drawn != self.trainer.history.last()):
            self._draw()

    def _draw(self) -> None:
        self._is_behind = False
        began = self._clock()
        self._drawn = self.trainer.history.last()
        figure = draw(self.trainer.history.epoch, self.trainer.history.history)
        replace_file(self.path, render_picture(figure, self.path.suffix[1:]))
        if in_notebook():
            self._output = show_picture(render_picture(figure), self._output)
        ended = self._clock()
        self._due = ended + (ended - began) * (1 / SHARE - 1)
