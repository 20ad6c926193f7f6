"""Names: a Keras model's variables by their place in the model.

Keras numbers layers through the whole process: the second model of a script has its
`dense_3` where the first had `dense`. Here numbers start anew in each model, so that the
same model has the same names wherever it is made.
"""

import re
from collections.abc import Sequence
from typing import Any


def of(model: Any, variables: Sequence[Any]) -> dict[str, Any]:
    """The variables by name."""
    automatic = _automatic(model)
    numbers: dict[str, dict[str, int]] = {}

    def renamed(part: str) -> str:
        base = automatic.get(part)
        if base is None:
            return part
        known = numbers.setdefault(base, {})
        index = known.setdefault(part, len(known))
        return f"{base}_{index}" if index else base

    result: dict[str, Any] = {}
    for variable in variables:
        first, *rest = variable.path.split("/")
        parts = rest if rest and first == model.name else [first, *rest]
        name = "/".join(map(renamed, parts))
        result[f"{name}.{len(result)}" if name in result else name] = variable
    return result


def _automatic(model: Any) -> dict[str, str]:
    """The names that Keras made itself, each with the class's name that it was made from."""
    result = {}
    for layer in model._flatten_layers(include_self=True, recursive=True):
        base = _snake_case(type(layer).__name__)
        if re.fullmatch(rf"{base}(_\d+)?", layer.name):
            result[layer.name] = base
    return result


def _snake_case(name: str) -> str:
    """A class's name as Keras makes a layer's name of it.

    >>> _snake_case("Conv2D"), _snake_case("BatchNormalization")
    ('conv2d', 'batch_normalization')
    """
    name = re.sub(r"\W+", "", name)
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()
