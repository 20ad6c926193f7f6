"""The arrays that an optimizer has for each parameter (momentum, variances, a float32 copy), by name."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lockstep.backends.mxnet.arrays import as_nd, fill, get_dtype, is_array
from lockstep.core.state import OPTIMIZER, ArraySpec
from lockstep.core.types import Array
from lockstep.errors import OptimizerError


class UpdaterState:
    """The optimizer state of an updater, under `optimizer.<parameter>.<index>`, or several indices if it is nested."""

    def __init__(self, updater: Any, parameters: Sequence[tuple[int, str]]) -> None:
        self._updater = updater
        self._parameters = parameters

    def arrays(self) -> dict[str, Any]:
        """Returns every array by its name in the state."""
        return {
            f"{OPTIMIZER}{name}{path}": array
            for index, name in self._parameters
            for path, array in _list_arrays(self._updater.states.get(index))
        }

    def specs(self, state: Mapping[str, Array], arrays: Mapping[str, Any]) -> dict[str, ArraySpec]:
        """Returns the specs of the arrays that a saved state must have; a never updated parameter has no arrays."""
        return {
            f"{OPTIMIZER}{name}{path}": ArraySpec(tuple(array.shape), get_dtype(array))
            for index, name in self._parameters
            if _is_updated(state, name)
            for path, array in _list_arrays(self._create(index, arrays[name]))
        }

    def load(self, state: Mapping[str, Array], arrays: Mapping[str, Any]) -> None:
        """Writes a state, which was checked before; removes the state of parameters that were never updated."""
        for index, name in self._parameters:
            self._updater.states.pop(index, None)
            self._updater.states_synced.pop(index, None)
            if not _is_updated(state, name):
                continue
            own = self._create(index, arrays[name])
            for path, array in _list_arrays(own):
                fill(array, state[f"{OPTIMIZER}{name}{path}"])
            self._updater.states[index], self._updater.states_synced[index] = own, True

    def _create(self, index: int, array: Any) -> Any:
        """Creates a parameter's optimizer state as its first update does."""
        return self._updater.optimizer.create_state_multi_precision(index, as_nd(array))


def _is_updated(state: Mapping[str, Array], name: str) -> bool:
    """Returns whether a state has the count or an array of a parameter, which the first update creates."""
    prefix = f"{OPTIMIZER}{name}."
    return any(key.startswith(prefix) and _is_own(key.removeprefix(prefix)) for key in state)


def _is_own(path: str) -> bool:
    """Returns whether a path is an array or the count of this parameter, not of a parameter with a longer name."""
    return path == "count" or path.replace(".", "").isdigit()


def _list_arrays(states: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields each array in one parameter's optimizer state, with the path of indices that leads to it.

    The indices are those of the nested tuples and lists, joined by dots.
    """
    if is_array(states):
        yield path or ".0", states
    elif isinstance(states, tuple | list):
        for index, each in enumerate(states):
            yield from _list_arrays(each, f"{path}.{index}")
    elif states is not None:
        raise OptimizerError(
            f"The optimizer's state has a {type(states).__name__}, but only arrays can be saved. Use another optimizer."
        )
