"""Splits a batch into inputs, targets and example weights for a loss of (outputs, targets), and calls the model.

Data sets often give (image, label, index). If the index were used as a weight, the result would be wrong without any
error, so integers as the third entry are refused.
"""

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any

from lockstep.core.batches import OBJECTIVE_EXAMPLE, describe
from lockstep.errors import BatchError, ModelError

if TYPE_CHECKING:
    from lockstep.backends.array_ops import ArrayOps


def split_batch(batch: Any, as_floats: str) -> tuple[Any, Any, Any]:
    """Returns the inputs, the targets and the example weights (None if there are none) of a batch.

    A third entry of floats or bools is the weights. Integers could be an index instead, so they raise. `as_floats` is
    the code that the error message suggests for converting `weights` to floats.

    >>> import numpy as np
    >>> split_batch((np.ones(2), np.zeros(2), np.array([True, False])), "weights.astype(float)")[2]
    array([ True, False])
    """
    if not isinstance(batch, tuple) or len(batch) not in (2, 3):
        raise BatchError(
            f"The batch {describe(batch)} cannot be used with a loss of (outputs, targets). Give (inputs, targets) or "
            f"(inputs, targets, weights), or write an objective:\n{OBJECTIVE_EXAMPLE}"
        )
    if len(batch) == 2:
        return batch[0], batch[1], None
    inputs, targets, third = batch
    kind = _integer_type(third)
    if kind:
        raise BatchError(
            "The third entry of a batch is the example weights, which must be floats or bools. Got the batch "
            f"{describe(batch)} with a third entry of {kind}. If the third entry is an index or an id, give ((inputs, "
            "index), targets) to a model that uses it, or leave it out. If the third entry is example weights, give "
            f"{as_floats}. If the first two entries are both inputs, give ((a, b), targets)."
        )
    return inputs, targets, third


def explain_missing_input(error: TypeError, batch: Any) -> None:
    """Raises BatchError if the model lacks an argument and the batch has three entries, which may be two inputs.

    The message says how to give several inputs. Any other TypeError is left to the caller.
    """
    lacks = "missing" in str(error) and "positional argument" in str(error)
    if lacks and isinstance(batch, tuple) and len(batch) == 3:
        raise BatchError(
            f"{error}. The model was called with the first entry of the batch {describe(batch)}, because three entries "
            "are (inputs, targets, weights). If the first two entries are both inputs, give ((a, b), targets)."
        ) from error


def call_model(model: Any, inputs: Any) -> Any:
    """Returns the model's outputs. A tuple of inputs is passed as positional arguments, a dict as keyword arguments."""
    arguments, named = spread_inputs(inputs)
    return check_outputs(model, model(*arguments, **named))


def check_outputs(model: Any, outputs: Any) -> Any:
    """Returns a model's outputs; raises ModelError if there are none."""
    if outputs is None:
        raise ModelError(
            f"The model {type(model).__name__} returned None instead of its outputs. End the model's forward method "
            "with `return outputs`."
        )
    return outputs


def spread_inputs(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the positional and keyword arguments with which a model is called.

    >>> spread_inputs((1, 2)), spread_inputs({"x": 1})
    (((1, 2), {}), ((), {'x': 1}))
    """
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, tuple) else (inputs,)), {}


def check_example_weights(ops: "ArrayOps", weights: Any, examples: int) -> Any:
    """Returns the example weights as an array; raises unless there is exactly one weight for each example."""
    weights = ops.as_array(weights) if isinstance(weights, list) else weights
    shape = tuple(getattr(weights, "shape", ()))
    if not shape or prod(shape) != examples:
        raise BatchError(
            f"There must be one example weight per example. Got weights of shape {shape} for a shard of {examples} "
            "examples. Give a vector with one number for each example of the batch."
        )
    return weights


def _integer_type(value: Any) -> str:
    """Returns the name of the integer type of an array of any framework, or of a list; empty for any other value."""
    if isinstance(value, list):
        return "int" if value and all(isinstance(each, int) and not isinstance(each, bool) for each in value) else ""
    dtype = getattr(value, "dtype", None)
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    name = name.rpartition(".")[2]  # torch's types are called torch.int64
    return name if name.startswith(("int", "uint")) else ""
