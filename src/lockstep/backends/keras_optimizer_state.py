"""A Keras optimizer's variables by name, and its plain numbers.

Keras's optimizers step Keras models whatever these run on, and the variables of plain
TensorFlow. Nothing is imported here: an optimizer is known by what it holds.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.errors import StateError

RATE = "learning_rate"
_NUMBERS = (bool, int, float)


def name_variables(optimizer: Any, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return the optimizer's variables by name, without the learning rate, which is a plain number.

    A variable that belongs to a weight is named after the weight.
    """
    names = {id(weight): name for name, weight in weights.items()}
    references: dict[str, list[str]] = {}
    for weight in optimizer._trainable_variables:  # in the order of their variables, frozen since or not
        flat = _flatten_name(weight)
        references.setdefault(flat, []).append(names.get(id(weight), flat))
    seen: dict[str, int] = {}
    result = {}
    for variable in optimizer.variables:
        if variable.name != RATE:
            number = seen[variable.name] = seen.get(variable.name, -1) + 1
            result[_find_name(variable.name, number, references)] = variable
    return result


def read_numbers(optimizer: Any) -> list[dict[str, Any]]:
    """Return one group: the learning rate of the next step, and every number that the optimizer was made with."""
    return [{"lr": _read_rate(optimizer), **read_constants(optimizer)}]


def read_constants(optimizer: Any) -> dict[str, Any]:
    """Return the numbers that a traced update holds as constants."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if not name.startswith("_") and name != "built" and (type(value) in _NUMBERS or value is None)
    }


def set_numbers(optimizer: Any, numbers: Sequence[Mapping[str, Any]]) -> None:
    """Write such numbers; if there is a schedule, it still sets the learning rate."""
    if len(numbers) != 1:
        raise StateError(f"A Keras optimizer has one group of parameters. Got numbers for {len(numbers)}. Give one.")
    for name, value in numbers[0].items():
        if name != "lr":
            setattr(optimizer, name, value)
        elif value != _read_rate(optimizer):
            optimizer.learning_rate = value


def _read_rate(optimizer: Any) -> float:
    return float(optimizer.learning_rate)


def _flatten_name(variable: Any) -> str:
    """Return a weight's name as Keras begins the names of the optimizer's variables for it."""
    path = variable.path if hasattr(variable, "path") else variable.name
    return str(path).replace("/", "_").replace(":", "_")


def _find_name(name: str, number: int, references: Mapping[str, Sequence[str]]) -> str:
    """Join the weight's name and the variable's own; weights of the same name differ by their order."""
    flat = name.rpartition("_")[0]
    while flat:  # the longest first
        if number < len(references.get(flat, ())):
            return f"{references[flat][number]}.{name[len(flat) + 1 :]}"
        flat = flat.rpartition("_")[0]
    return f"{name}.{number}" if number else name
