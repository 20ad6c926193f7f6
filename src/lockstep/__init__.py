"""Lockstep: one model, many devices, the same bits.

trainer = lockstep.wrap(model, optimizer, loss)
trainer.fit((x, y), epochs=10, batch_size=256)
"""

from lockstep.callbacks import Callback, History
from lockstep.core.metrics import Metric
from lockstep.core.objective import objective
from lockstep.errors import LockstepError
from lockstep.trainer import Trainer
from lockstep.wrap import wrap

__all__ = ["Callback", "History", "LockstepError", "Metric", "Trainer", "objective", "wrap"]
__version__ = "0.1.0"
