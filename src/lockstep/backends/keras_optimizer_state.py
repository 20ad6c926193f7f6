"""A Keras optimizer's variables by name, and its hyperparameters.

Keras optimizers train Keras models on every framework, and the variables of plain
TensorFlow. This module imports neither Keras nor a framework.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.errors import StateError

RATE = "learning_rate"
_KINDS = (bool, int, float)  # the types of hyperparameters


def name_variables(optimizer: Any, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the optimizer's variables by name, without the learning rate, which is a hyperparameter.

    The name of a variable that belongs to a weight begins with the weight's name.
    """
    names = {id(weight): name for name, weight in weights.items()}
    references: dict[str, list[str]] = {}
    for weight in optimizer._trainable_variables:  # ordered like their optimizer variables; some may be frozen by now
        flat = _flatten_name(weight)
        references.setdefault(flat, []).append(names.get(id(weight), flat))
    seen: dict[str, int] = {}
    result = {}
    for variable in optimizer.variables:
        if variable.name != RATE:
            number = seen[variable.name] = seen.get(variable.name, -1) + 1
            result[_find_name(variable.name, number, references)] = variable
    return result


def read_hyperparameters(optimizer: Any) -> list[dict[str, Any]]:
    """Returns a list of one group: the learning rate of the next step, and all other hyperparameters."""
    return [{"lr": _read_rate(optimizer), **read_constants(optimizer)}]


def read_constants(optimizer: Any) -> dict[str, Any]:
    """Returns the hyperparameters that a traced update contains as constants: all but the learning rate."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if not name.startswith("_") and name != "built" and (type(value) in _KINDS or value is None)
    }


def write_hyperparameters(optimizer: Any, groups: Sequence[Mapping[str, Any]]) -> None:
    """Sets the optimizer's hyperparameters.

    With a learning-rate schedule `lr` must be the schedule's present value; Keras raises TypeError for other values.
    """
    if len(groups) != 1:
        raise StateError(
            f"A Keras optimizer has one group of hyperparameters. Got {len(groups)} groups. Give a list of one dict."
        )
    for name, value in groups[0].items():
        if name != "lr":
            setattr(optimizer, name, value)
        elif value != _read_rate(optimizer):
            optimizer.learning_rate = value


def _read_rate(optimizer: Any) -> float:
    return float(optimizer.learning_rate)


def _flatten_name(variable: Any) -> str:
    """Returns a weight's name as Keras writes it at the start of the names of its optimizer variables."""
    path = variable.path if hasattr(variable, "path") else variable.name
    return str(path).replace("/", "_").replace(":", "_")


def _find_name(name: str, number: int, references: Mapping[str, Sequence[str]]) -> str:
    """Returns an optimizer variable's name in the state: its weight's name, then the part that Keras has added.

    `number` counts the optimizer variables of this name, because two weights may have one name.
    """
    flat = name.rpartition("_")[0]
    while flat:  # the longest first
        if number < len(references.get(flat, ())):
            return f"{references[flat][number]}.{name[len(flat) + 1 :]}"
        flat = flat.rpartition("_")[0]
    return f"{name}.{number}" if number else name
