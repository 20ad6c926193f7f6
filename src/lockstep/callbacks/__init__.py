"""Callbacks, which `fit` calls at fixed moments; their methods have the same names as in Keras.

matplotlib and tensorboard are only imported when a run with a callback that needs them begins.
"""

from lockstep.callbacks.base import Callback
from lockstep.callbacks.callback_list import CallbackList
from lockstep.callbacks.csv_logger import CSVLogger
from lockstep.callbacks.early_stopping import EarlyStopping
from lockstep.callbacks.ema import EMA
from lockstep.callbacks.history import History
from lockstep.callbacks.log import Log
from lockstep.callbacks.plot import Plot
from lockstep.callbacks.reduce_lr import ReduceLROnPlateau
from lockstep.callbacks.schedule import LearningRateSchedule
from lockstep.callbacks.tensorboard import TensorBoard

__all__ = [
    "EMA",
    "CSVLogger",
    "Callback",
    "CallbackList",
    "EarlyStopping",
    "History",
    "LearningRateSchedule",
    "Log",
    "Plot",
    "ReduceLROnPlateau",
    "TensorBoard",
]
