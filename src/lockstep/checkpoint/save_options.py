"""`lockstep.Checkpoint`: in which folder a run saves its checkpoints, how often, and how many of them are kept."""

import os
from dataclasses import dataclass

from lockstep.core.monitor import Monitor
from lockstep.errors import CheckpointError


@dataclass(frozen=True)
class Checkpoint:
    """The folder for the checkpoints of a `fit`, how often to save, and which checkpoints to keep.

    A checkpoint is saved after every epoch, or after every `every` steps. The `keep` newest checkpoints are kept; all
    of them if `keep` is None. With `best="val_accuracy"` the checkpoint with the best value of this metric is kept too,
    and a link named `best` points to it. Raises `CheckpointError` or `ModelError` for arguments that are not valid.

    >>> Checkpoint("ckpt/", every=500, best="val_accuracy")
    Checkpoint(path='ckpt/', every=500, keep=3, best='val_accuracy')
    """

    path: str | os.PathLike[str]
    every: str | int = "epoch"
    keep: int | None = 3
    best: str | Monitor | None = None

    def __post_init__(self) -> None:
        """Raises CheckpointError for arguments that are not valid."""
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
            raise CheckpointError(
                f"best must be the name of a metric. Got {self.best!r}. Use for example best='val_loss'."
            )
        _ = self.monitor  # raises if the name does not imply whether lower or higher values are better

    @property
    def monitor(self) -> Monitor | None:
        """The monitor of the metric that decides which checkpoint is best; None if `best` was not given."""
        return Monitor(self.best) if isinstance(self.best, str) else self.best


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1
