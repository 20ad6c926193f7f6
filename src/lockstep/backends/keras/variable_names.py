"""Names a Keras model's variables independently of other models in the process.

Keras numbers the layers of a process: if a script's first model has the layers `dense`, `dense_1` and `dense_2`, the
first layer of its second model is called `dense_3`. Here the numbers start at 0 in each model, so the same model has
the same names in every process.
"""

import re
from collections.abc import Sequence
from typing import Any


def name_variables(model: Any, variables: Sequence[Any]) -> dict[str, Any]:
    """Returns the variables by name, with the numbers of Keras's automatic layer names starting at 0."""
    automatic = _find_automatic_names(model)
    numbers: dict[str, dict[str, int]] = {}

    def rename(part: str) -> str:
        base = automatic.get(part)
        if base is None:
            return part
        indices = numbers.setdefault(base, {})
        index = indices.setdefault(part, len(indices))
        return f"{base}_{index}" if index else base

    result: dict[str, Any] = {}
    for variable in variables:
        # A path begins with the model's name, which Keras numbers, too, or with a layer's.
        first, *rest = variable.path.split("/")
        parts = rest if rest and first == model.name else [first, *rest]
        name = "/".join(map(rename, parts))
        result[f"{name}.{len(result)}" if name in result else name] = variable
    return result


def _find_automatic_names(model: Any) -> dict[str, str]:
    """Returns Keras's automatic layer names, mapped to the names without the number, e.g. `dense_3` to `dense`."""
    result = {}
    for layer in model._flatten_layers(include_self=True, recursive=True):
        base = _to_snake_case(type(layer).__name__)
        if re.fullmatch(rf"{base}(_\d+)?", layer.name):
            result[layer.name] = base
    return result


def _to_snake_case(name: str) -> str:
    """Returns the layer name that Keras derives from a class name.

    >>> _to_snake_case("Conv2D"), _to_snake_case("BatchNormalization")
    ('conv2d', 'batch_normalization')
    """
    name = re.sub(r"\W+", "", name)
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()
