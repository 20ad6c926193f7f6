"""The arrays that an optimizer keeps for each parameter (momentum, variances, a float32 copy), by name."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lockstep.backends.base import Array, State
from lockstep.backends.mxnet.arrays import array_of, classic, dtype_of, fill, is_array
from lockstep.core.state import OPTIMIZER, ArraySpec
from lockstep.errors import OptimizerError


class UpdaterState:
    """The optimizer state of an updater, under `optimizer.<parameter>.<index>`, or several indices if it is nested."""

    def __init__(self, updater: Any, held: Sequence[tuple[int, str]]) -> None:
        self._updater = updater
        self._held = held

    def state(self) -> State:
        """Copy every array."""
        return {
            f"{OPTIMIZER}{name}{path}": array_of(array)
            for index, name in self._held
            for path, array in _list_arrays(self._updater.states.get(index))
        }

    def specs(self, state: Mapping[str, Array], arrays: Mapping[str, Any]) -> dict[str, ArraySpec]:
        """Describe the arrays that a saved state must have: all of a parameter's, or none if it was never updated."""
        return {
            f"{OPTIMIZER}{name}{path}": ArraySpec(tuple(array.shape), dtype_of(array))
            for index, name in self._held
            if _is_updated(state, name)
            for path, array in _list_arrays(self._create(index, arrays[name]))
        }

    def load(self, state: Mapping[str, Array], arrays: Mapping[str, Any]) -> None:
        """Write a state that fits; a parameter that was never updated starts anew."""
        for index, name in self._held:
            self._updater.states.pop(index, None)
            self._updater.states_synced.pop(index, None)
            if not _is_updated(state, name):
                continue
            own = self._create(index, arrays[name])
            for path, array in _list_arrays(own):
                fill(array, state[f"{OPTIMIZER}{name}{path}"])
            self._updater.states[index], self._updater.states_synced[index] = own, True

    def _create(self, index: int, array: Any) -> Any:
        """Create a parameter's optimizer state as its first update does."""
        return self._updater.optimizer.create_state_multi_precision(index, classic(array))


def _is_updated(state: Mapping[str, Array], name: str) -> bool:
    """Whether a state comes from after the first update of a parameter, which is counted."""
    prefix = f"{OPTIMIZER}{name}."
    return any(key.startswith(prefix) and _is_own(key.removeprefix(prefix)) for key in state)


def _is_own(path: str) -> bool:
    """Whether this names an array or the count of the parameter itself, and not of a parameter with a longer name."""
    return path == "count" or path.replace(".", "").isdigit()


def _list_arrays(states: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the arrays of one parameter's optimizer state, each with the indices that lead to it."""
    if is_array(states):
        yield path or ".0", states
    elif isinstance(states, tuple | list):
        for index, each in enumerate(states):
            yield from _list_arrays(each, f"{path}.{index}")
    elif states is not None:
        raise OptimizerError(
            f"An optimizer's state may hold arrays. Got a {type(states).__name__}. Use another optimizer."
        )
