"""Callbacks: what runs beside the steps of `fit`, with Keras's names.

`lockstep.callbacks.progress` is imported by whoever shows one: rich takes its time.
"""

from lockstep.callbacks.base import Callback
from lockstep.callbacks.chain import Chain
from lockstep.callbacks.history import History

__all__ = ["Callback", "Chain", "History"]
