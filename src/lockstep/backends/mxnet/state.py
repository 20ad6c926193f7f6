"""The state as named arrays on the host: read from the block and its optimizer, and written to them."""

import zlib
from collections.abc import Mapping
from typing import Any

from mxnet import nd

from lockstep.backends.change_detector import ChangeDetector
from lockstep.backends.mxnet.arrays import fill, get_dtype, to_array
from lockstep.backends.mxnet.optimizer import OptimizerAdapter
from lockstep.backends.mxnet.replicas import Replicas
from lockstep.core.state import MODEL, OPTIMIZER, ArraySpec, check_state
from lockstep.core.types import Array, LazyState


class NamedState:
    """The state by name: parameters under `model.`, the optimizer's arrays and counters under `optimizer.`."""

    def __init__(self, replicas: Replicas, optimizer: OptimizerAdapter) -> None:
        self._replicas = replicas
        self._optimizer = optimizer
        self._writes = ChangeDetector(self._sum_bytes)

    def state(self) -> LazyState:
        """Returns the state (parameters, optimizer state, counters) by name; an array is copied when it is read."""
        return LazyState(self.arrays(), to_array)

    def arrays(self) -> dict[str, Any]:
        """Returns the arrays of the parameters and the optimizer themselves (not copies).

        The optimizer's counters are returned as a copy.
        """
        self._replicas.check_initialized()
        own = {f"{MODEL}{name}": self._replicas.get_array(name) for name in self._replicas.parameters}
        return {**own, **self._optimizer.state.arrays(), **self._optimizer.read_counters(self._device_id)}

    def load(self, state: Mapping[str, Array]) -> None:
        """Writes a state, or changes nothing if it does not fit; parameters without a shape take the saved shape."""
        self._check(state)
        for name, parameter in self._replicas.parameters.items():
            if parameter._data is None:
                parameter.shape = state[f"{MODEL}{name}"].data.shape
                parameter._finish_deferred_init()
        arrays = {name: self._replicas.get_array(name) for name in self._replicas.parameters}
        for name, array in arrays.items():
            fill(array, state[f"{MODEL}{name}"])
        self._optimizer.state.load(state, arrays)
        self._optimizer.load_counters(state, self._device_id)
        self._replicas.copy_to_script_contexts()

    def _check(self, state: Mapping[str, Array]) -> None:
        """Raises StateError if a state does not fit.

        The model is checked first, because the shapes of the optimizer state follow from the model's shapes.
        """
        model = {f"{MODEL}{name}": _read_spec(parameter) for name, parameter in self._replicas.parameters.items()}
        check_state({name: array for name, array in state.items() if not name.startswith(OPTIMIZER)}, model)
        arrays = {name: self._take_array(name, state) for name in self._replicas.parameters}
        optimizer = {**self._optimizer.state.specs(state, arrays), **self._optimizer.describe_counters(state)}
        check_state(state, {**model, **optimizer})

    def _take_array(self, name: str, state: Mapping[str, Array]) -> Any:
        """Returns a parameter's own array, or zeros of the saved shape if the parameter does not know its shape yet."""
        parameter = self._replicas.parameters[name]
        if parameter._data is not None:
            return self._replicas.get_array(name)
        shape = state[f"{MODEL}{name}"].data.shape
        return nd.zeros(shape, ctx=self._replicas.contexts[0], dtype=parameter.dtype)

    @property
    def _device_id(self) -> int:
        """The index of the first context, by which the optimizer finds its counters."""
        return int(self._replicas.contexts[0].device_id)

    # -- writes of the script

    def has_changed(self) -> bool:
        """Returns whether the script has written to the state since the last call."""
        return self._writes.has_changed()

    def accept(self) -> None:
        """Makes later calls of `has_changed` compare with the state as it is now."""
        self._writes.accept()

    def _sum_bytes(self) -> list[Any]:
        """Returns a checksum of every array, because MXNet does not count writes."""
        return [(name, zlib.crc32(array.data.tobytes())) for name, array in self.state().items()]


def _read_spec(parameter: Any) -> ArraySpec:
    """Returns a parameter's shape and dtype; None for an axis whose length follows from the first batch."""
    # gluon writes such a length as 0 or -1.
    return ArraySpec(tuple(size if size > 0 else None for size in parameter.shape), get_dtype(parameter))
