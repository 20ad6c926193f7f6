"""Replicas: the variables as each device reads them.

A shard reads variables and writes none, so the replicas of one device read the same ones:
the script's own on the first device and on every CPU. Another device has copies, which
take the values over before it computes.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from lockstep.backends.tensorflow.program import Copy


class Replicas:
    """One replica on each of the devices."""

    def __init__(self, devices: Sequence[str]) -> None:
        self.devices = tuple(devices)
        self._copied: dict[tuple[str, int], tuple[Any, Any]] = {}  # of (device, script's variable): it and the copy
        self._carry: Any = None

    def place(self, replica: int) -> AbstractContextManager[Any]:
        """Inside, TensorFlow computes on the replica's device."""
        kind, _, index = self.devices[replica].partition(":")
        placed: AbstractContextManager[Any] = tf.device(f"/{kind.upper()}:{index}") if kind != "cpu" else nullcontext()
        return placed

    def copies(self, own: Copy) -> list[Copy]:
        """What each replica reads in place of the script's own variables, with the values that these have now."""
        known = len(self._copied)
        copies = [Copy(*([self._read(i, each) for each in part] for part in own)) for i in range(len(self.devices))]
        if len(self._copied) > known:
            self._carry = tf.function(self._carried, autograph=False)
        if self._carry is not None:
            self._carry()
        return copies

    def _read(self, replica: int, variable: Any) -> Any:
        device = self.devices[replica]
        if device == self.devices[0] or device.startswith("cpu"):
            return variable
        key = device, id(variable)
        if key not in self._copied:
            with self.place(replica):
                self._copied[key] = variable, tf.Variable(variable, trainable=variable.trainable)
        return self._copied[key][1]

    def _carried(self) -> None:
        for variable, copy in self._copied.values():
            copy.assign(variable.read_value())
