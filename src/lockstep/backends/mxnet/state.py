"""The state as named arrays on the host, and back into the block and its optimizer."""

import zlib
from collections.abc import Mapping
from typing import Any

from mxnet import nd

from lockstep.backends.base import Array, State
from lockstep.backends.change_detector import ChangeDetector
from lockstep.backends.mxnet.arrays import array_of, dtype_of, fill
from lockstep.backends.mxnet.optimizer import Updates
from lockstep.backends.mxnet.replicas import Replicas
from lockstep.core.state import MODEL, OPTIMIZER, ArraySpec, check_state


class NamedState:
    """Parameters under `model.`, the optimizer's arrays and counters under `optimizer.`."""

    def __init__(self, replicas: Replicas, updates: Updates) -> None:
        self._replicas = replicas
        self._updates = updates
        self._writes = ChangeDetector(self._sum_bytes)

    def state(self) -> State:
        """Copy everything."""
        self._replicas.require()
        state = {f"{MODEL}{name}": array_of(self._replicas.array(name)) for name in self._replicas.parameters}
        return {**state, **self._updates.state.state(), **self._updates.counters(self._device_id)}

    def load(self, state: Mapping[str, Array]) -> None:
        """Write a state, or change nothing if it does not fit. Parameters without a shape take theirs from it."""
        self._check(state)
        for name, parameter in self._replicas.parameters.items():
            if parameter._data is None:
                parameter.shape = state[f"{MODEL}{name}"].data.shape
                parameter._finish_deferred_init()
        arrays = {name: self._replicas.array(name) for name in self._replicas.parameters}
        for name, array in arrays.items():
            fill(array, state[f"{MODEL}{name}"])
        self._updates.state.load(state, arrays)
        self._updates.set_counters(state, self._device_id)
        self._replicas.share()

    def _check(self, state: Mapping[str, Array]) -> None:
        """Raise if a state does not fit; the model first, because the optimizer state follows from its shapes."""
        model = {f"{MODEL}{name}": _read_spec(parameter) for name, parameter in self._replicas.parameters.items()}
        check_state({name: array for name, array in state.items() if not name.startswith(OPTIMIZER)}, model)
        arrays = {name: self._take_array(name, state) for name in self._replicas.parameters}
        optimizer = {**self._updates.state.specs(state, arrays), **self._updates.counter_specs(state)}
        check_state(state, {**model, **optimizer})

    def _take_array(self, name: str, state: Mapping[str, Array]) -> Any:
        """Return a parameter's own array, or zeros of the saved shape if the parameter does not know its shape yet."""
        parameter = self._replicas.parameters[name]
        if parameter._data is not None:
            return self._replicas.array(name)
        shape = state[f"{MODEL}{name}"].data.shape
        return nd.zeros(shape, ctx=self._replicas.contexts[0], dtype=parameter.dtype)

    @property
    def _device_id(self) -> int:
        """By which the optimizer keeps its counters apart."""
        return int(self._replicas.contexts[0].device_id)

    # -- what the script wrote

    def touched(self) -> bool:
        """Return whether anything was written since the last question."""
        return self._writes.has_changed()

    def accept(self) -> None:
        """Take the state as it is now as known."""
        self._writes.accept()

    def _sum_bytes(self) -> list[Any]:
        """Compute a checksum of every array, because MXNet does not count writes."""
        return [(name, zlib.crc32(array.data.tobytes())) for name, array in self.state().items()]


def _read_spec(parameter: Any) -> ArraySpec:
    """Describe a parameter; sizes that it takes from its first batch are 0 or -1 in gluon."""
    return ArraySpec(tuple(size if size > 0 else None for size in parameter.shape), dtype_of(parameter))
