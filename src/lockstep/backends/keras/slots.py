"""Slots: a Keras optimizer's variables by name, and its plain numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from keras import ops

from lockstep.backends.base import Array, State
from lockstep.backends.keras.compiled import Compiled
from lockstep.errors import StateError

_NUMBERS = (bool, int, float)


class Slots:
    """What an optimizer keeps beside the learning rate, which is a plain number."""

    def __init__(self, compiled: Compiled, optimizer: Any) -> None:
        self._compiled = compiled
        self._optimizer = optimizer

    def variables(self) -> dict[str, Any]:
        """The optimizer's variables: those of a weight under its name, with their own."""
        weights = {**self._compiled.trained(), **self._compiled.others()}
        flat = {variable.path.replace("/", "_"): name for name, variable in weights.items()}
        result: dict[str, Any] = {}
        for variable in self._optimizer.variables:
            if variable.name != "learning_rate":
                name = _named(variable.name, flat)
                result[f"optimizer.{name}.{len(result)}" if f"optimizer.{name}" in result else f"optimizer.{name}"] = (
                    variable
                )
        return result

    def read(self) -> State:
        """A copy of each."""
        found = {name: np.array(ops.convert_to_numpy(each.value)) for name, each in self.variables().items()}
        return {name: Array(data, data.dtype.name) for name, data in found.items()}

    def check(self, state: Mapping[str, Array]) -> None:
        """Refuses a state of another optimizer."""
        own = self.variables()
        theirs = {name: array for name, array in state.items() if name.startswith("optimizer.")}
        for name in sorted(own.keys() | theirs.keys()):
            short = name.partition(".")[2]
            there = theirs[name].data.shape if name in theirs else "nothing"
            here = tuple(own[name].shape) if name in own else "nothing"
            if there != here:
                raise StateError(
                    f"The state does not fit this optimizer. At {short!r} it has {there}, the optimizer {here}. "
                    "Load the state of this model and optimizer."
                )

    def write(self, state: Mapping[str, Array]) -> None:
        """Takes over each."""
        for name, variable in self.variables().items():
            variable.assign(state[name].data)

    def numbers(self) -> list[dict[str, Any]]:
        """One group: the learning rate, and every number that the optimizer was made with."""
        return [{"lr": self._rate(), **self.constants()}]

    def constants(self) -> dict[str, Any]:
        """The numbers that a traced update holds as constants."""
        return {
            name: value
            for name, value in vars(self._optimizer).items()
            if not name.startswith("_") and name != "built" and (type(value) in _NUMBERS or value is None)
        }

    def set_numbers(self, numbers: Sequence[Mapping[str, Any]]) -> None:
        """Writes them; a schedule keeps its say over the learning rate."""
        for name, value in numbers[0].items():
            if name != "lr":
                setattr(self._optimizer, name, value)
            elif value != self._rate():
                self._optimizer.learning_rate = value

    def _rate(self) -> float:
        return float(ops.convert_to_numpy(self._optimizer.learning_rate))


def _named(name: str, flat: Mapping[str, str]) -> str:
    for prefix in sorted(flat, key=len, reverse=True):
        if name.startswith(f"{prefix}_"):
            return f"{flat[prefix]}.{name[len(prefix) + 1 :]}"
    return name
