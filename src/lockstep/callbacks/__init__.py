"""Callbacks: what runs beside the steps of `fit`, with Keras's names."""

from lockstep.callbacks.base import Callback
from lockstep.callbacks.chain import Chain
from lockstep.callbacks.history import History
from lockstep.callbacks.progress import Progress

__all__ = ["Callback", "Chain", "History", "Progress"]
