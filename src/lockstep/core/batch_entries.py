"""The entries of a batch for a loss of (outputs, targets), and how a model is called with the first of them.

Data sets often give (image, label, index). Taken for a weight, an index trains another model without a word.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Any

from lockstep.core.batches import OBJECTIVE_EXAMPLE, describe
from lockstep.errors import BatchError, ModelError

if TYPE_CHECKING:
    from lockstep.backends.array_ops import ArrayOps


def split_batch(batch: Any, as_floats: str) -> tuple[Any, Any, Any]:
    """The inputs, targets and example weights (or None) of a batch.

    Floats and bools are weights. Integers may as well be something else and are refused; `as_floats` is how the
    framework's users make floats of `weights`.

    >>> import numpy as np
    >>> split_batch((np.ones(2), np.zeros(2), np.array([True, False])), "weights.astype(float)")[2]
    array([ True, False])
    """
    if not isinstance(batch, tuple) or len(batch) not in (2, 3):
        raise BatchError(
            "With a loss of (outputs, targets) a batch is (inputs, targets) or (inputs, targets, weights). "
            f"Got {describe(batch)}. Give one of these, or write an objective:\n{OBJECTIVE_EXAMPLE}"
        )
    if len(batch) == 2:
        return batch[0], batch[1], None
    inputs, targets, third = batch
    kind = _integer_type(third)
    if kind:
        raise BatchError(
            "The third entry of a batch is the examples' weights, which are floats or bools. "
            f"Got {describe(batch)} with a third entry of {kind}. "
            "If it is an index or an id, give ((inputs, index), targets) to a model that takes it, else leave it out. "
            f"If it is weights, give {as_floats}. If the first two are both inputs, give ((a, b), targets)."
        )
    return inputs, targets, third


@contextmanager
def explain_missing_input(batch: Any) -> Iterator[None]:
    """Says how several inputs are written if a model lacks one and the batch has three entries."""
    try:
        yield
    except TypeError as error:
        lacks = "missing" in str(error) and "positional argument" in str(error)
        if not (lacks and isinstance(batch, tuple) and len(batch) == 3):
            raise
        raise BatchError(
            f"{error}. The model was called with the first entry of {describe(batch)}: three entries are "
            "(inputs, targets, weights). If the first two are both inputs, give ((a, b), targets)."
        ) from error


def call_model(model: Any, inputs: Any) -> Any:
    """The model's outputs: a tuple of inputs goes in by position, a dict by name."""
    arguments, named = spread_inputs(inputs)
    outputs = model(*arguments, **named)
    if outputs is None:
        raise ModelError(f"A model gives outputs. Got None from {type(model).__name__}. End its forward with `return`.")
    return outputs


def spread_inputs(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with which a model is called.

    >>> spread_inputs((1, 2)), spread_inputs({"x": 1})
    (((1, 2), {}), ((), {'x': 1}))
    """
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, tuple) else (inputs,)), {}


def check_example_weights(ops: "ArrayOps", weights: Any, examples: int) -> Any:
    """The weights as an array; raises unless there is one for each example."""
    weights = ops.as_array(weights) if isinstance(weights, list) else weights
    shape = tuple(getattr(weights, "shape", ()))
    if not shape or prod(shape) != examples:
        raise BatchError(
            f"There is one weight per example. Got weights of shape {shape} for a shard of {examples}. "
            "Give one number for each example."
        )
    return weights


def _integer_type(value: Any) -> str:
    """The name of the integer type of an array or list, of whatever framework; empty for any other."""
    if isinstance(value, list):
        return "int" if value and all(isinstance(each, int) and not isinstance(each, bool) for each in value) else ""
    dtype = getattr(value, "dtype", None)
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    name = name.rpartition(".")[2]  # torch's types are called torch.int64
    return name if name.startswith(("int", "uint")) else ""
