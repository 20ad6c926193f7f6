"""Slots: a Keras optimizer's variables by name, and its plain numbers.

Keras's optimizers step Keras models whatever these run on, and the variables of plain
TensorFlow. Nothing is imported here: an optimizer is known by what it holds.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.errors import StateError

RATE = "learning_rate"
_NUMBERS = (bool, int, float)


def of(optimizer: Any, weights: Mapping[str, Any]) -> dict[str, Any]:
    """The optimizer's variables, those of a weight under its name; less the learning rate, which is a plain number."""
    names = {id(weight): name for name, weight in weights.items()}
    references: dict[str, list[str]] = {}
    for weight in optimizer._trainable_variables:  # in the order that the slots were made in, frozen since or not
        flat = _flat(weight)
        references.setdefault(flat, []).append(names.get(id(weight), flat))
    seen: dict[str, int] = {}
    result = {}
    for variable in optimizer.variables:
        if variable.name != RATE:
            number = seen[variable.name] = seen.get(variable.name, -1) + 1
            result[_named(variable.name, number, references)] = variable
    return result


def numbers(optimizer: Any) -> list[dict[str, Any]]:
    """One group: the learning rate of the next step, and every number that the optimizer was made with."""
    return [{"lr": _rate(optimizer), **constants(optimizer)}]


def constants(optimizer: Any) -> dict[str, Any]:
    """The numbers that a traced update holds as constants."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if not name.startswith("_") and name != "built" and (type(value) in _NUMBERS or value is None)
    }


def set_numbers(optimizer: Any, numbers: Sequence[Mapping[str, Any]]) -> None:
    """Writes them; a schedule keeps its say over the learning rate."""
    if len(numbers) != 1:
        raise StateError(f"A Keras optimizer has one group of parameters. Got numbers for {len(numbers)}. Give one.")
    for name, value in numbers[0].items():
        if name != "lr":
            setattr(optimizer, name, value)
        elif value != _rate(optimizer):
            optimizer.learning_rate = value


def _rate(optimizer: Any) -> float:
    return float(optimizer.learning_rate)


def _flat(variable: Any) -> str:
    """A variable's name as Keras makes it the beginning of its slots' names."""
    path = variable.path if hasattr(variable, "path") else variable.name
    return str(path).replace("/", "_").replace(":", "_")


def _named(name: str, number: int, references: Mapping[str, Sequence[str]]) -> str:
    """The slot's name: its weight's and its own; weights of one name are told apart by their order."""
    flat = name.rpartition("_")[0]
    while flat:  # the longest first
        if number < len(references.get(flat, ())):
            return f"{references[flat][number]}.{name[len(flat) + 1 :]}"
        flat = flat.rpartition("_")[0]
    return f"{name}.{number}" if number else name
