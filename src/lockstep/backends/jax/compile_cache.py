"""Programs: functions that are compiled once and run with the same machine code on every device.

XLA does not take one way through its passes for one device and for several: the
same Adam step, compiled for one device and mapped over two, divided by a scalar
here and multiplied by its reciprocal there. So a program is compiled for a single
device, always, and what came out is loaded onto the others as it is.
"""

import hashlib
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import compiler
from jax.experimental import serialize_executable as packing
from jax.extend.core import jaxpr_as_fun


class Program:
    """A function over arrays that all lie on one device."""

    def __init__(
        self, run: Callable[..., Any], devices: Sequence[Any], options: Any, donated: tuple[int, ...] = ()
    ) -> None:
        # With what it does not read, too: code is known by its text, which has to tell one argument from another.
        self._jitted = jax.jit(run, compiler_options=options, donate_argnums=donated, keep_unused=True)
        self._options = options
        self._devices = devices
        self._loaded: list[Any] = [None] * len(devices)
        self._code: Code | None = None

    def __call__(self, row: int, *arguments: Any) -> Any:
        """The function's result on the device of this row, where its arguments lie."""
        if self._loaded[row] is None:
            device = self._devices[row]
            self._code = self._code or _compiled(self._jitted.lower(*arguments), device, self._options)
            self._loaded[row] = self._code.on(device) or self._jitted.lower(*arguments).compile()
        return self._loaded[row](*arguments)


class Traced:
    """A function that is traced once, and then is what it was: programs are made of parts of its result."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run
        self._flat: Callable[..., Any] | None = None
        self._nest: Any = None

    def part(self, index: int) -> Callable[..., Any]:
        """The function with one part of its result; what the others alone need is not computed."""

        def run(*arguments: Any) -> Any:
            if self._flat is None:
                traced, forms = jax.make_jaxpr(self._run, return_shape=True)(*arguments)
                self._flat, self._nest = jaxpr_as_fun(traced), jax.tree.structure(forms)
            return jax.tree.unflatten(self._nest, self._flat(*jax.tree.leaves(arguments)))[index]

        return run


class Code:
    """A compiled program: on the device that it was made for, and for others as they ask for it."""

    def __init__(self, compiled: Any, device: Any) -> None:
        self._loaded = {device: compiled}
        self._made_for = device
        self._packed: Any = None

    def on(self, device: Any) -> Any:
        """The program on this device; None where its machine code cannot be moved there."""
        if device not in self._loaded:
            if self._packed is None:
                try:
                    self._packed = packing.serialize(self._loaded[self._made_for])
                except _UNPACKABLE:  # every device compiles then: slower to start, the same passes
                    return None
            data, inputs, outputs = self._packed
            self._loaded[device] = _moved(data, inputs, outputs, self._made_for, device)
        return self._loaded[device]


_CODES: OrderedDict[Any, Code] = OrderedDict()  # of this process, by what was compiled; the last used come last
_MOST_CODES = 256
# What XLA cannot write down, and functions of the script's own that a program calls back.
_UNPACKABLE = NotImplementedError, ValueError, AttributeError, TypeError, pickle.PicklingError


def forget() -> None:
    """Lets go of all code, for its devices are made again."""
    _CODES.clear()


def _compiled(lowered: Any, device: Any, options: Any) -> Code:
    """The program's code: what was compiled before in this process is not compiled again."""
    text = lowered.as_text()
    if "callback" in text:  # into Python: the text says that, and not which function
        return Code(lowered.compile(), device)
    key = (
        hashlib.sha256(text.encode()).digest(),
        lowered.in_tree,
        lowered.out_tree,
        tuple((options or {}).items()),
        device.client,
    )
    if key not in _CODES:
        _CODES[key] = Code(lowered.compile(), device)
    _CODES.move_to_end(key)
    while len(_CODES) > _MOST_CODES:
        _CODES.popitem(last=False)
    return _CODES[key]


def _moved(data: bytes, inputs: Any, outputs: Any, made_for: Any, device: Any) -> Any:
    executable, arguments, no_names = _Reader(data, made_for, device).load()
    return jax.stages.Compiled(executable.load(), [], inputs.unflatten(arguments), outputs, no_kwargs=no_names)


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
