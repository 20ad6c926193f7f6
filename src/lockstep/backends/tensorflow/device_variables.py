"""The variables that the replicas on each device read.

A shard reads variables and writes none, so all replicas on one device share its variables. The first device and every
CPU read the script's own variables. Every other device has copies, which get the current values before it computes.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from lockstep.backends.tensorflow.training_program import ReplicaVariables


class DeviceVariables:
    """Copies of the script's variables on every other device, updated by `synchronize`."""

    def __init__(self, devices: Sequence[str]) -> None:
        self.devices = tuple(devices)
        self._copies: dict[tuple[str, int], tuple[Any, Any]] = {}  # (device, id of a variable): (variable, its copy)
        self._update: Any = None

    def place(self, replica: int) -> AbstractContextManager[Any]:
        """Returns a context in which TensorFlow computes on the replica's device."""
        kind, _, index = self.devices[replica].partition(":")
        placed: AbstractContextManager[Any] = tf.device(f"/{kind.upper()}:{index}") if kind != "cpu" else nullcontext()
        return placed

    def synchronize(self, own: ReplicaVariables) -> list[ReplicaVariables]:
        """Copies the script's variables to the other devices, and returns the variables that each replica reads."""
        num_before = len(self._copies)
        replicas = range(len(self.devices))
        variables = [ReplicaVariables(*([self._find_copy(i, each) for each in part] for part in own)) for i in replicas]
        if len(self._copies) > num_before:  # the traced function must copy the new variables, too
            self._update = tf.function(self._update_copies, autograph=False)
        if self._update is not None:
            self._update()
        return variables

    def _find_copy(self, replica: int, variable: Any) -> Any:
        """Returns the variable that this replica reads: the script's own, or a copy, which is created on first use."""
        device = self.devices[replica]
        if device == self.devices[0] or device.startswith("cpu"):
            return variable
        key = device, id(variable)
        if key not in self._copies:
            with self.place(replica):
                # The original is stored, too, so that no other variable gets its id.
                self._copies[key] = variable, tf.Variable(variable, trainable=variable.trainable)
        return self._copies[key][1]

    def _update_copies(self) -> None:
        for variable, copy in self._copies.values():
            copy.assign(variable.read_value())
