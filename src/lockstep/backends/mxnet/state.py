"""Stored: the state as named arrays on the host, and back into the block and its optimizer."""

import zlib
from collections.abc import Mapping
from typing import Any

from lockstep.backends.base import Array, State
from lockstep.backends.mxnet.arrays import array_of, fill
from lockstep.backends.mxnet.optimizer import Updates
from lockstep.backends.mxnet.replicas import Replicas
from lockstep.errors import StateError


class Stored:
    """Parameters under `model.`, the optimizer's slots and counters under `optimizer.`."""

    def __init__(self, replicas: Replicas, updates: Updates) -> None:
        self._replicas = replicas
        self._updates = updates
        self._seen: list[Any] = []

    def state(self) -> State:
        """A copy of everything."""
        self._replicas.require()
        state = {f"model.{name}": array_of(self._replicas.array(name)) for name in self._replicas.parameters}
        return {**state, **self._updates.slots.state(), **self._updates.counters(self._device_id)}

    def load(self, state: Mapping[str, Array]) -> None:
        """Takes over a state that fits; parameters without a shape learn theirs from it."""
        self._check(state)
        for name, parameter in self._replicas.parameters.items():
            if parameter._data is None:
                parameter.shape = state[f"model.{name}"].data.shape
                parameter._finish_deferred_init()
        arrays = {name: self._replicas.array(name) for name in self._replicas.parameters}
        self._updates.slots.check(state, arrays)
        for name, array in arrays.items():
            fill(array, state[f"model.{name}"])
        self._updates.slots.load(state, arrays)
        self._updates.set_counters(state, self._device_id)
        self._replicas.share()

    def _check(self, state: Mapping[str, Array]) -> None:
        own = {f"model.{name}": parameter for name, parameter in self._replicas.parameters.items()}
        for name, parameter in own.items():
            short = name.removeprefix("model.")
            if name not in state:
                raise StateError(
                    f"The state does not fit this model. It has nothing for {short!r}. Load the state of this model."
                )
            shape = tuple(parameter.shape)
            known = len(shape) == state[name].data.ndim and all(
                size in (0, -1, there) for size, there in zip(shape, state[name].data.shape, strict=True)
            )
            if not known:
                raise StateError(
                    f"The state does not fit this model. At {short!r} it has {state[name].data.shape}, "
                    f"the model {shape}. Load the state of this model."
                )
        for name in state:
            if name.startswith("model.") and name not in own:
                raise StateError(
                    f"The state does not fit this model, which has no {name.removeprefix('model.')!r}. "
                    "Load the state of this model."
                )

    @property
    def _device_id(self) -> int:
        """By which the optimizer keeps its counters apart."""
        return int(self._replicas.contexts[0].device_id)

    # -- what the script wrote

    def touched(self) -> bool:
        """Whether anything was written since the last look; looks. MXNet counts no writes, so bytes are compared."""
        seen, self._seen = self._seen, self._signature()
        return bool(seen) and self._seen != seen

    def look(self) -> None:
        """Takes the state as it is now for seen, where somebody asks for that."""
        if self._seen:
            self._seen = self._signature()

    def _signature(self) -> list[Any]:
        return [(name, zlib.crc32(array.data.tobytes())) for name, array in self.state().items()]
