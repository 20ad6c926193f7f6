"""Refusals: what cannot be trained in parallel as it is, with the line to change."""

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from lockstep.backends.base import Recipe
from lockstep.errors import ExactError, ModelError, OptimizerError

_DRAWS = {
    *("RandomUniform", "RandomUniformInt", "RandomStandardNormal", "TruncatedNormal", "ParameterizedTruncatedNormal"),
    *("Multinomial", "RandomGamma", "RandomPoisson", "RandomPoissonV2", "RandomShuffle", "RngReadAndSkip", "RngSkip"),
    *("StatefulUniform", "StatefulUniformFullInt", "StatefulUniformInt", "StatefulStandardNormalV2"),
    *("StatefulTruncatedNormal", "StatefulRandomBinomial"),
}
_WRITES = ("Assign", "ResourceScatter", "ResourceApply", "ResourceSparseApply")
_STATELESS = "def net(x, seed): ... tf.nn.experimental.stateless_dropout(x, 0.5, seed=seed)"


def check_function(recipe: Recipe) -> None:
    """Refuses what is no function with variables to train."""
    function, variables = recipe.model
    if not callable(function) or not all(isinstance(variable, tf.Variable) for variable in variables):
        kinds = sorted({type(variable).__name__ for variable in variables})
        raise ModelError(
            "A model of plain TensorFlow is (function, [tf.Variable, ...]). "
            f"Got {type(function).__name__} and a list of {', '.join(kinds)}. Give the function and its variables."
        )
    if not any(variable.trainable for variable in variables):
        raise ModelError(
            f"Training needs a variable to train. Got {len(variables)}, none trainable. Use tf.Variable(value)."
        )
    check_precision(recipe)


def check_precision(recipe: Recipe) -> None:
    """Refuses a precision for the whole step; in Keras each layer has its own."""
    if recipe.options.precision is not None:
        raise ModelError(
            f"TensorFlow's precision is the layers' own. Got precision={recipe.options.precision!r}. Use "
            "keras.mixed_precision.set_global_policy('mixed_bfloat16') before the model is made."
        )


def check_optimizer(optimizer: Any) -> Any:
    """The optimizer, where it is one of Keras's that computes with TensorFlow."""
    if not isinstance(optimizer, tf.keras.optimizers.Optimizer):
        raise OptimizerError(
            f"TensorFlow's variables go with a Keras optimizer. Got {type(optimizer).__name__}. "
            "Use for example keras.optimizers.SGD(0.1)."
        )
    if tf.keras.backend.backend() != "tensorflow":
        raise OptimizerError(
            "TensorFlow's variables go with an optimizer that computes with TensorFlow. Got Keras on "
            f"{tf.keras.backend.backend()}. Set KERAS_BACKEND=tensorflow before the first import of keras."
        )
    return optimizer


def check_graph(graph: Any, exact: bool) -> None:
    """Refuses a shard that writes to variables, or draws from a generator that remembers."""
    for kind in _operations(graph):
        if kind.startswith(_WRITES):
            raise ModelError(
                f"A function reads its variables, and the step writes them. Got one that writes ({kind}). "
                "Return what it computes, or use a Keras model, whose running statistics are averaged."
            )
        if kind in _DRAWS and exact:
            raise draws(kind)


def draws(kind: str) -> ExactError:
    """The error of a draw that depends on the draws before it."""
    return ExactError(
        f"A shard draws from its own seed alone. Got {kind}, whose generator remembers its draws. Take a parameter "
        f"`seed` and draw with TensorFlow's stateless operations:\n    {_STATELESS}\n"
        "or use exact=False to train without the promise."
    )


def _operations(graph: Any) -> Iterator[str]:
    """The kinds of the operations of a graph and of the functions it calls."""
    for operation in graph.get_operations():
        yield operation.type
    for function in graph.as_graph_def().library.function:
        for node in function.node_def:
            yield node.op
