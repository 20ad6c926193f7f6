"""`lockstep.Checkpoint`: where a run saves its checkpoints, how often, and which of them are kept."""

import os
from dataclasses import dataclass

from lockstep.core.monitor import Monitor
from lockstep.errors import CheckpointError


@dataclass(frozen=True)
class Checkpoint:
    """What `fit(checkpoint=…)` takes: a folder, saved to every epoch or every so many steps.

    The `keep` newest stay, `None` for all. With `best="val_accuracy"` the best stays too, under the link `best`.

    >>> Checkpoint("ckpt/", every=500, best="val_accuracy")
    Checkpoint(path='ckpt/', every=500, keep=3, best='val_accuracy')
    """

    path: str | os.PathLike[str]
    every: str | int = "epoch"
    keep: int | None = 3
    best: str | Monitor | None = None

    def __post_init__(self) -> None:
        """Refuses values that mean nothing."""
        if not isinstance(self.path, str | os.PathLike) or not os.fspath(self.path):
            raise CheckpointError(f"A checkpoint's path is a folder's. Got {self.path!r}. Use 'ckpt/', for example.")
        if not (isinstance(self.every, str) and self.every == "epoch") and not _is_count(self.every):
            raise CheckpointError(
                f"every is 'epoch' or a number of steps, 1 or more. Got {self.every!r}. Use every='epoch'."
            )
        if self.keep is not None and not _is_count(self.keep):
            raise CheckpointError(
                f"keep is a number of checkpoints, 1 or more, or None for all. Got {self.keep!r}. Use keep=3."
            )
        if not isinstance(self.best, str | Monitor | None):
            raise CheckpointError(f"best is the name of a metric. Got {self.best!r}. Use best='val_loss', for example.")
        _ = self.monitor  # knows whether less or more is better, or says so now

    @property
    def monitor(self) -> Monitor | None:
        """Which of two checkpoints is the better one, where the best is to stay."""
        return Monitor(self.best) if isinstance(self.best, str) else self.best


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1
