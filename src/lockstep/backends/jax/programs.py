"""Programs: functions that are compiled once and run with the same machine code on every device.

XLA does not take one way through its passes for one device and for several: the
same Adam step, compiled for one device and mapped over two, divided by a scalar
here and multiplied by its reciprocal there. So a program is compiled for a single
device, always, and what came out is loaded onto the others as it is.
"""

import io
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import compiler
from jax.experimental import serialize_executable as packing


class Program:
    """A function over arrays that all lie on one device."""

    def __init__(
        self, run: Callable[..., Any], devices: Sequence[Any], options: Any, donated: tuple[int, ...] = ()
    ) -> None:
        self._jitted = jax.jit(run, compiler_options=options, donate_argnums=donated)
        self._devices = devices
        self._loaded: list[Any] = [None] * len(devices)
        self._packed: Any = None  # the machine code, and the device it was made for

    def __call__(self, row: int, *arguments: Any) -> Any:
        """The function's result on the device of this row, where its arguments lie."""
        if self._loaded[row] is None:
            self._loaded[row] = self._load(row, arguments)
        return self._loaded[row](*arguments)

    def _load(self, row: int, arguments: Any) -> Any:
        if self._packed is not None:
            return _moved(self._packed, self._devices[row])
        compiled = self._jitted.lower(*arguments).compile()
        if len(self._devices) > 1:
            try:
                self._packed = *packing.serialize(compiled), self._devices[row]
            except (NotImplementedError, ValueError):  # then every device compiles: slower to start, the same passes
                self._packed = None
        return compiled


class _Reader(packing._JaxPjrtUnpickler):
    """Reads an executable back for another device of this process."""

    def __init__(self, data: bytes, made_for: Any, device: Any) -> None:
        super().__init__(io.BytesIO(data), device.client, [device])  # type: ignore[no-untyped-call]
        self.devices_by_id = {made_for.id: device}
        self._options = compiler.get_compile_options(
            num_replicas=1, num_partitions=1, device_assignment=np.array([[device.id]])
        )

    def persistent_load(self, pid: Any) -> Any:
        """The machine code, assigned to the other device."""
        if pid[0] == "exec":
            return self.backend.deserialize_executable(pid[1], self.execution_devices, self._options)
        return super().persistent_load(pid)  # type: ignore[no-untyped-call]


def _moved(packed: Any, device: Any) -> Any:
    data, inputs, outputs, made_for = packed
    executable, arguments, no_names = _Reader(data, made_for, device).load()
    return jax.stages.Compiled(executable.load(), [], inputs.unflatten(arguments), outputs, no_kwargs=no_names)
