"""Plot: the curves of a run while it runs."""

from collections.abc import Callable
from os import PathLike
from pathlib import Path
from time import perf_counter
from typing import Any

from lockstep.callbacks.base import NO_LOGS, Callback, Logs
from lockstep.callbacks.files import replace
from lockstep.core.arguments import check_path
from lockstep.display.curves import draw, figure_type, in_notebook, picture, show_picture
from lockstep.errors import CallbackError

SHARE = 0.1
"""Drawing takes a third of a second; short epochs are not all drawn, so that it takes no more than this of the time."""


class Plot(Callback):
    """Keeps a picture of loss and metrics up to date, epoch by epoch; a notebook shows it as well.

    Whoever opens the file while training goes on sees a whole picture. Where epochs are shorter
    than drawing takes, some are passed over; the last one never is. Needs matplotlib.

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
            raise CallbackError(f"A plot is a file with a name of its own. Got {str(path)!r}. Use 'curves.png'.")
        self.path = target if target.suffix else target.with_suffix(".png")
        self._clock = clock
        self._behind = False
        self._drawn: dict[str, float] = {}  # the newest epoch's values in the picture

    def on_train_begin(self, logs: Logs = NO_LOGS) -> None:
        figure_type()  # what is missing is said now, not after the first epoch
        self._output: Any = None
        self._behind = False
        self._drawn = {}
        self._due = self._clock()

    def on_epoch_end(self, epoch: int, logs: Logs = NO_LOGS) -> None:
        self._behind = True
        if self._clock() >= self._due:
            self._draw()

    def close(self) -> None:
        """Draws the last epoch where it is not drawn yet, also of a run that was interrupted."""
        if self._behind or (
            self._drawn and self._drawn != self.trainer.history.last()
        ):  # callbacks wrote into it since
            self._draw()

    def _draw(self) -> None:
        self._behind = False
        began = self._clock()
        self._drawn = self.trainer.history.last()
        figure = draw(self.trainer.history.epoch, self.trainer.history.history)
        replace(self.path, picture(figure, self.path.suffix[1:]))
        if in_notebook():
            self._output = show_picture(picture(figure), self._output)
        ended = self._clock()
        self._due = ended + (ended - began) * (1 / SHARE - 1)
