"""Slots: the arrays an optimizer keeps for each parameter (momentum, variances, a float32 copy), by name."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lockstep.backends.base import Array, State
from lockstep.backends.mxnet.arrays import array_of, classic, fill, is_array
from lockstep.errors import OptimizerError, StateError


class Slots:
    """The slots of an updater, under `optimizer.<parameter>.<place in the nest>`."""

    def __init__(self, updater: Any, held: Sequence[tuple[int, str]]) -> None:
        self._updater = updater
        self._held = held

    def state(self) -> State:
        """A copy of every slot."""
        return {
            f"optimizer.{name}{path}": array_of(array)
            for index, name in self._held
            for path, array in _arrays(self._updater.states.get(index))
        }

    def check(self, state: Mapping[str, Array], arrays: Mapping[str, Any]) -> None:
        """Raises where a state has slots that this optimizer does not have, or lacks some."""
        for _, name in self._held:
            saved = _saved(state, name)
            if not saved:
                continue
            own = dict(_arrays(self._made(name, arrays[name])))
            for path in sorted(saved.keys() | own.keys()):
                here = tuple(own[path].shape) if path in own else "nothing"
                there = saved[path].data.shape if path in saved else "nothing"
                if here != there:
                    raise StateError(
                        f"The state does not fit this optimizer. At {name + path!r} it has {there}, the optimizer "
                        f"{here}. Use the optimizer it was saved with."
                    )

    def load(self, state: Mapping[str, Array], arrays: Mapping[str, Any]) -> None:
        """Takes over the slots of a state that fits; a parameter without any starts anew."""
        for index, name in self._held:
            saved = _saved(state, name)
            stepped = f"optimizer.{name}.count" in state
            self._updater.states.pop(index, None)
            self._updater.states_synced.pop(index, None)
            if not saved and not stepped:
                continue
            own = self._made(name, arrays[name])
            for path, array in _arrays(own):
                fill(array, saved[path])
            self._updater.states[index], self._updater.states_synced[index] = own, True

    def _made(self, name: str, array: Any) -> Any:
        """Fresh slots for a parameter."""
        index = next(index for index, each in self._held if each == name)
        return self._updater.optimizer.create_state_multi_precision(index, classic(array))


def _saved(state: Mapping[str, Array], name: str) -> dict[str, Array]:
    """The slots of a parameter in a state, by where they lie."""
    prefix = f"optimizer.{name}"
    found = {key[len(prefix) :]: value for key, value in state.items() if key.startswith(f"{prefix}.")}
    return {path: value for path, value in found.items() if path.replace(".", "").isdigit()}


def _arrays(slots: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The arrays of one parameter's slots, by where they lie in the nest."""
    if is_array(slots):
        yield path or ".0", slots
    elif isinstance(slots, tuple | list):
        for index, each in enumerate(slots):
            yield from _arrays(each, f"{path}.{index}")
    elif slots is not None:
        raise OptimizerError(f"An optimizer's slots are arrays. Got a {type(slots).__name__}. Use another optimizer.")
