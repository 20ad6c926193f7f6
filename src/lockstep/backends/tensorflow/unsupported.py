"""Checks that raise an error for models and optimizers that this backend cannot train, with what to write instead."""

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from lockstep.backends.base import Recipe
from lockstep.errors import ExactError, ModelError, OptimizerError

_STATEFUL_RANDOM_OPS = {
    *("RandomUniform", "RandomUniformInt", "RandomStandardNormal", "TruncatedNormal", "ParameterizedTruncatedNormal"),
    *("Multinomial", "RandomGamma", "RandomPoisson", "RandomPoissonV2", "RandomShuffle", "RngReadAndSkip", "RngSkip"),
    *("StatefulUniform", "StatefulUniformFullInt", "StatefulUniformInt", "StatefulStandardNormalV2"),
    *("StatefulTruncatedNormal", "StatefulRandomBinomial"),
}
_WRITE_OPS = ("Assign", "ResourceScatter", "ResourceApply", "ResourceSparseApply")
_STATELESS_EXAMPLE = "def net(x, seed): ... tf.nn.experimental.stateless_dropout(x, 0.5, seed=seed)"


def check_function(recipe: Recipe) -> None:
    """Raises ModelError if the model is not a function with variables to train, or if a precision was given."""
    function, variables = recipe.model
    if not callable(function) or not all(isinstance(variable, tf.Variable) for variable in variables):
        kinds = sorted({type(variable).__name__ for variable in variables})
        raise ModelError(
            "A plain TensorFlow model must be a function and a list of tf.Variables. "
            f"Got {type(function).__name__} and a list of {', '.join(kinds)}. Use (function, [tf.Variable, ...])."
        )
    if not any(variable.trainable for variable in variables):
        raise ModelError(
            f"Training needs a trainable variable, but none of the model's {len(variables)} variables is trainable. "
            "Create a variable with tf.Variable(value, trainable=True)."
        )
    if recipe.options.precision is not None:
        raise ModelError(
            f"precision={recipe.options.precision!r} is not supported for a TensorFlow function, which computes in the "
            "dtypes of its tensors. Leave precision out, and use tf.cast in the function."
        )


def check_optimizer(optimizer: Any) -> Any:
    """Returns the optimizer if it is a Keras optimizer that runs on TensorFlow; raises OptimizerError if not."""
    if not isinstance(optimizer, tf.keras.optimizers.Optimizer):
        raise OptimizerError(
            f"TensorFlow variables need a Keras optimizer. Got {type(optimizer).__name__}. "
            "Use for example keras.optimizers.SGD(0.1)."
        )
    if tf.keras.backend.backend() != "tensorflow":
        raise OptimizerError(
            "TensorFlow variables need a Keras optimizer that runs on TensorFlow, but Keras runs on "
            f"{tf.keras.backend.backend()}. Set KERAS_BACKEND=tensorflow before the first import of keras."
        )
    return optimizer


def check_graph(graph: Any, exact: bool) -> None:
    """Raises an error if a shard writes to variables, or uses a stateful random number generator."""
    for kind in _list_operations(graph):
        if kind.startswith(_WRITE_OPS):
            raise ModelError(
                f"The model's function writes to a variable ({kind}), but shards run in parallel, and only the "
                "optimizer's step may write. Return the value instead, or use a Keras model, whose running statistics "
                "are averaged."
            )
        if kind in _STATEFUL_RANDOM_OPS and exact:
            raise create_random_error(kind)


def create_random_error(operation: str) -> ExactError:
    """Returns the error for a random operation whose result depends on earlier random operations."""
    return ExactError(
        f"The model's function uses {operation}, whose result depends on earlier random operations. A shard's random "
        "numbers must follow from its own seed. Add a parameter `seed` and use TensorFlow's stateless operations:\n"
        f"    {_STATELESS_EXAMPLE}\n"
        "or use exact=False, which gives up equal results on any number of devices."
    )


def _list_operations(graph: Any) -> Iterator[str]:
    """Yields the kinds of the operations of a graph and of the functions it calls."""
    for operation in graph.get_operations():
        yield operation.type
    for function in graph.as_graph_def().library.function:
        for node in function.node_def:
            yield node.op
