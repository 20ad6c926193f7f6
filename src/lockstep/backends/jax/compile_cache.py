"""Compiles a function once and runs the same machine code on every device.

XLA optimizes differently for one device and for several: the same Adam step divided by a scalar if compiled for one
device, and multiplied by its reciprocal if mapped over two. So a program is always compiled for a single device, and
its machine code is loaded on the other devices unchanged.
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
from jax.experimental import serialize_executable
from jax.extend.core import jaxpr_as_fun


class CompiledProgram:
    """A compiled function of arrays that are all on one device."""

    def __init__(
        self, run: Callable[..., Any], devices: Sequence[Any], options: Any, donate_argnums: tuple[int, ...] = ()
    ) -> None:
        # Unused arguments are kept, because the text of a program is its key in the cache: two programs that differ in
        # an unused argument alone must not share machine code.
        self._jitted = jax.jit(run, compiler_options=options, donate_argnums=donate_argnums, keep_unused=True)
        self._options = options
        self._devices = devices
        self._loaded: list[Any] = [None] * len(devices)
        self._code: MachineCode | None = None

    def __call__(self, row: int, *arguments: Any) -> Any:
        """Runs the function on the device of this row, which must have its arguments; compiles it on the first call."""
        if self._loaded[row] is None:
            device = self._devices[row]
            self._code = self._code or _find_or_compile(self._jitted.lower(*arguments), device, self._options)
            self._loaded[row] = self._code.load_on(device) or self._jitted.lower(*arguments).compile()
        return self._loaded[row](*arguments)


class TracedFunction:
    """A function that is traced once; several programs compute parts of its result from the same trace."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run
        self._flat: Callable[..., Any] | None = None
        self._structure: Any = None

    def select(self, index: int) -> Callable[..., Any]:
        """Returns a function that computes one entry of the result; XLA removes code that only other entries need."""

        def run(*arguments: Any) -> Any:
            if self._flat is None:
                traced, shapes = jax.make_jaxpr(self._run, return_shape=True)(*arguments)
                self._flat, self._structure = jaxpr_as_fun(traced), jax.tree.structure(shapes)
            return jax.tree.unflatten(self._structure, self._flat(*jax.tree.leaves(arguments)))[index]

        return run


class MachineCode:
    """The machine code of a program: compiled for one device, loaded on others when needed."""

    def __init__(self, compiled: Any, device: Any) -> None:
        self._loaded = {device: compiled}
        self._compiled_for = device
        self._serialized: Any = None

    def load_on(self, device: Any) -> Any:
        """Returns the program on this device; None if its machine code cannot be serialized."""
        if device not in self._loaded:
            if self._serialized is None:
                try:
                    self._serialized = serialize_executable.serialize(self._loaded[self._compiled_for])
                except _CANNOT_SERIALIZE:
                    return None  # then each device compiles the program itself: slower, but the same optimizations
            data, inputs, outputs = self._serialized
            self._loaded[device] = _load_code(data, inputs, outputs, self._compiled_for, device)
        return self._loaded[device]


_CODES: OrderedDict[Any, MachineCode] = OrderedDict()  # this process's cache; the most recently used code comes last
_MAX_CODES = 256  # the least recently used code is dropped first
# What `serialize` raises for programs that XLA cannot serialize, and for programs that call functions of the script.
_CANNOT_SERIALIZE = NotImplementedError, ValueError, AttributeError, TypeError, pickle.PicklingError


def clear() -> None:
    """Drops all machine code, because the devices that it was compiled for are about to be created again."""
    _CODES.clear()


def _find_or_compile(lowered: Any, device: Any, options: Any) -> MachineCode:
    """Returns the program's machine code, from the cache if this process has compiled the program before."""
    text = lowered.as_text()
    if "callback" in text:  # not cached: the program calls a Python function, which the text does not identify
        return MachineCode(lowered.compile(), device)
    key = (
        hashlib.sha256(text.encode()).digest(),
        lowered.in_tree,
        lowered.out_tree,
        tuple((options or {}).items()),
        device.client,  # machine code belongs to one client, and `clear_backends` creates a new client
    )
    if key not in _CODES:
        _CODES[key] = MachineCode(lowered.compile(), device)
    _CODES.move_to_end(key)
    while len(_CODES) > _MAX_CODES:
        _CODES.popitem(last=False)
    return _CODES[key]


def _load_code(data: bytes, inputs: Any, outputs: Any, compiled_for: Any, device: Any) -> Any:
    executable, arguments, no_kwargs = _ExecutableReader(data, compiled_for, device).load()
    return jax.stages.Compiled(executable.load(), [], inputs.unflatten(arguments), outputs, no_kwargs=no_kwargs)


class _ExecutableReader(serialize_executable._JaxPjrtUnpickler):
    """Deserializes an executable for another device of this process."""

    def __init__(self, data: bytes, compiled_for: Any, device: Any) -> None:
        super().__init__(io.BytesIO(data), device.client, [device])  # type: ignore[no-untyped-call]
        self.devices_by_id = {compiled_for.id: device}
        self._options = compiler.get_compile_options(
            num_replicas=1, num_partitions=1, device_assignment=np.array([[device.id]])
        )

    def persistent_load(self, pid: Any) -> Any:
        """Returns the deserialized machine code, assigned to the device it is loaded for.

        JAX's own method would assign it to the device it was compiled for.
        """
        if pid[0] == "exec":
            return self.backend.deserialize_executable(pid[1], self.execution_devices, self._options)
        return super().persistent_load(pid)  # type: ignore[no-untyped-call]
