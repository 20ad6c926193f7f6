"""`lockstep.Checkpoint`: where a run saves its checkpoints, how often, and which of them are kept."""

import os
from dataclasses import dataclass

from lockstep.core.monitor import Monitor
from lockstep.errors import CheckpointError


@dataclass(frozen=True)
class Checkpoint:
    """The folder of `fit(checkpoint=…)`, and when to save to it: after every epoch or every so many steps.

    The `keep` newest checkpoints are kept, all if None. With `best="val_accuracy"` the best one is kept too, under the
    link `best`.

    >>> Checkpoint("ckpt/", every=500, best="val_accuracy")
    Checkpoint(path='ckpt/', every=500, keep=3, best='val_accuracy')
    """

    path: str | os.PathLike[str]
    every: str | int = "epoch"
    keep: int | None = 3
    best: str | Monitor | None = None

    def __post_init__(self) -> None:
        """Check the arguments."""
        if not isinstance(self.path, str | os.PathLike) or not os.fspath(self.path):
            raise CheckpointError(f"path must be a folder. Got {self.path!r}. Use for example 'ckpt/'.")
        if not (isinstance(self.every, str) and self.every == "epoch") and not _is_count(self.every):
            raise CheckpointError(
                f"every must be 'epoch' or a number of steps, 1 or more. Got {self.every!r}. Use every='epoch'."
            )
        if self.keep is not None and not _is_count(self.keep):
            raise CheckpointError(
                f"keep must be a number of checkpoints, 1 or more, or None for all. Got {self.keep!r}. Use keep=3."
            )
        if not isinstance(self.best, str | Monitor | None):
            raise CheckpointError(f"best must name a metric. Got {self.best!r}. Use for example best='val_loss'.")
        _ = self.monitor  # raises now if the name does not tell whether less or more is better

    @property
    def monitor(self) -> Monitor | None:
        """The metric that decides which checkpoint is best; None if the best one need not be kept."""
        return Monitor(self.best) if isinstance(self.best, str) else self.best


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1
