"""Lockstep: one model, many devices, the same bits.

trainer = lockstep.wrap(model, optimizer, loss)
trainer.fit((x, y), epochs=10, batch_size=256, checkpoint="ckpt/")
"""

from lockstep import data
from lockstep.callbacks import (
    EMA,
    Callback,
    CSVLogger,
    EarlyStopping,
    History,
    LearningRateSchedule,
    Log,
    Plot,
    ReduceLROnPlateau,
    TensorBoard,
)
from lockstep.checkpoint import Checkpoint, load_arrays
from lockstep.collectives import allreduce, replicate, split
from lockstep.core.metrics import Metric
from lockstep.core.objective import Carried, Sum, objective
from lockstep.errors import LockstepError
from lockstep.trainer import Trainer
from lockstep.wrap import wrap

__all__ = [
    "EMA",
    "CSVLogger",
    "Callback",
    "Carried",
    "Checkpoint",
    "EarlyStopping",
    "History",
    "LearningRateSchedule",
    "LockstepError",
    "Log",
    "Metric",
    "Plot",
    "ReduceLROnPlateau",
    "Sum",
    "TensorBoard",
    "Trainer",
    "allreduce",
    "data",
    "load_arrays",
    "objective",
    "replicate",
    "split",
    "wrap",
]
__version__ = "0.1.0"


def __dir__() -> list[str]:
    """Returns the public names."""
    return [*__all__, "__version__"]
