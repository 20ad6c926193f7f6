"""Draws the curves of a run into a picture, which is updated while the run trains."""

from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from time import perf_counter
from typing import Any

from lockstep.callbacks.base import NO_LOGS, Callback, Logs
from lockstep.core.arguments import check_path, is_number, show
from lockstep.core.atomic_file import replace_file
from lockstep.display.curve_pictures import PanelAxes, draw, in_notebook, load_figure_type, render_picture, show_picture
from lockstep.errors import CallbackError

SHARE = 0.1
"""The largest fraction of the time that drawing may take; if epochs are short, the picture is not drawn after each."""


class Plot(Callback):
    """Draws the loss and the metrics into a file after every epoch, and in a notebook also into the cell.

    The file is replaced atomically, so it can be viewed while training continues. If epochs are short, the picture is
    not drawn after each epoch, but always after the last. Raises `MissingExtra` if matplotlib is not installed.

    `names` are the values to draw, such as `["val_accuracy"]`; all are drawn if it is left out. `xlabel` and `ylabel`
    name the axes; `xlim` and `ylim`, such as `(1, 10)`, keep them at a fixed range from the first epoch on.

    >>> import lockstep, tempfile, torch
    >>> x, y = torch.eye(8), torch.arange(8) % 2
    >>> net = torch.nn.Linear(8, 2)
    >>> sgd, loss = torch.optim.SGD(net.parameters(), lr=0.5), torch.nn.CrossEntropyLoss()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with lockstep.wrap(net, sgd, loss) as trainer:
    ...         history = trainer.fit((x, y), epochs=3, callbacks=[Plot(folder + "/curves.png")], verbose=0)
    ...     [path.name for path in Path(folder).iterdir()]
    ['curves.png']
    """

    def __init__(
        self,
        path: str | PathLike[str] = "curves.png",
        clock: Callable[[], float] = perf_counter,
        *,
        names: Sequence[str] | None = None,
        xlabel: str = "epoch",
        ylabel: str | None = None,
        xlim: tuple[float, float] | None = None,
        ylim: tuple[float, float] | None = None,
    ) -> None:
        target = Path(check_path("path", path, CallbackError, "curves.png"))
        if not target.name:
            raise CallbackError(f"path must name a file. Got {str(path)!r}. Use for example 'curves.png'.")
        self.path = target if target.suffix else target.with_suffix(".png")
        if isinstance(names, str):
            raise CallbackError(f"names must be a list. Got {names!r}. Use names=[{names!r}].")
        self._names = None if names is None else tuple(names)
        self._axes = PanelAxes(xlabel, ylabel, _check_range("xlim", xlim), _check_range("ylim", ylim))
        self._clock = clock
        self._is_behind = False  # whether an epoch has ended since the last drawing
        self._drawn: dict[str, float] = {}  # the values of the last epoch in the picture

    def on_train_begin(self, logs: Logs = NO_LOGS) -> None:
        load_figure_type()  # raises before the first epoch if matplotlib is not installed
        self._output: Any = None
        self._is_behind = False
        self._drawn = {}
        self._due = self._clock()

    def on_epoch_end(self, epoch: int, logs: Logs = NO_LOGS) -> None:
        self._is_behind = True
        if self._clock() >= self._due:
            self._draw()

    def close(self) -> None:
        """Draws the last epoch if it is not in the picture yet, even if the run was interrupted."""
        # Callbacks may have written into the history since the picture was drawn.
        if self._is_behind or (self._drawn and self._drawn != self.trainer.history.last()):
            self._draw()

    def _draw(self) -> None:
        self._is_behind = False
        began = self._clock()
        self._drawn = self.trainer.history.last()
        history = self.trainer.history
        curves = {name: history.history[name] for name in self._names or history.history if name in history.history}
        figure = draw(history.epoch, curves, self._axes)
        replace_file(self.path, render_picture(figure, self.path.suffix[1:]))
        if in_notebook():
            self._output = show_picture(render_picture(figure), self._output)
        ended = self._clock()
        self._due = ended + (ended - began) * (1 / SHARE - 1)


def _check_range(name: str, given: Any) -> tuple[float, float] | None:
    if given is None:
        return None
    pair = tuple(given) if isinstance(given, Sequence) else ()
    if len(pair) != 2 or not all(is_number(each) for each in pair) or not pair[0] < pair[1]:
        raise CallbackError(
            f"{name} must be a pair: a lower and an upper bound. Got {name}={show(given)}. Use for example "
            f"{name}=(0, 1)."
        )
    return float(pair[0]), float(pair[1])
