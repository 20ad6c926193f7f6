"""Checks that raise an error for Keras models that Lockstep cannot train, with what to write instead."""

from collections.abc import Sequence
from typing import Any

import keras

from lockstep.backends.base import Recipe
from lockstep.core.batches import describe
from lockstep.core.metric_kinds import METHODS
from lockstep.errors import BatchError, ModelError, OptimizerError

_BACKENDS = {"tensorflow": "tensorflow", "torch": "torch", "jaxlib": "jax", "jax": "jax"}  # by the package of an array
_USE_OBJECTIVE = (
    "Move the loss into compute_loss, or into an objective: lockstep.wrap(model, optimizer, lockstep.objective(f))."
)
# Methods of a model that Lockstep does not call, and what to write instead.
_UNUSED_METHODS = {
    "train_step": _USE_OBJECTIVE,
    "test_step": _USE_OBJECTIVE,
    "predict_step": "Move its code into call, or apply it to what trainer.predict returns.",
    "compute_metrics": "Use compile(metrics=[...]), or return values from an objective: return loss, {'name': value}.",
}
RESTORING = "Restoring a state"  # an operation for `check_built`


def check_model(model: Any) -> None:
    """Raises ModelError for a model with its own train_step or metrics, or one built on another Keras backend."""
    current, built = keras.config.backend(), _find_backend(model)
    if built != current:
        raise ModelError(
            f"The model was built on {built}, but Keras now runs on {current}. Set KERAS_BACKEND={built} before the "
            f"first import of keras, or build the model on {current}."
        )
    for method, instead in _UNUSED_METHODS.items():
        if getattr(type(model), method) is not getattr(keras.Model, method):
            raise ModelError(
                f"{type(model).__name__} defines {method}, which Lockstep does not call: it computes losses, metrics "
                f"and updates itself. {instead}"
            )
    layers = model._flatten_layers(include_self=True, recursive=True)
    for metric in (metric for layer in layers for metric in layer._metrics):
        raise ModelError(
            f"The metric {metric.name!r} is an attribute of the model, so Lockstep does not add it over the shards. "
            "Use compile(metrics=[...]), or return its value from an objective: "
            f"return loss, {{{metric.name!r}: value}}."
        )


def check_metrics(metrics: Any) -> None:
    """Raises ModelError for metric objects of other libraries, which Keras would call as functions and average."""
    for metric in keras.tree.flatten(metrics):
        if isinstance(metric, str | keras.metrics.Metric):
            continue
        methods = [method for method in METHODS if callable(getattr(metric, method, None))]
        if methods:
            raise ModelError(
                f"The metric {type(metric).__name__} has the methods {', '.join(methods)}, but is not a Keras metric, "
                "so Keras would call it as a function. Use a class of keras.metrics (AUC, F1Score, ...), or update the "
                "object yourself with the outputs of trainer.predict."
            )


def check_compiled(model: Any) -> None:
    """Raises OptimizerError for a model that is not compiled or has no optimizer."""
    if not getattr(model, "compiled", False) or model.optimizer is None:
        raise OptimizerError(
            f"Training needs an optimizer and a loss, but {model.name!r} is not compiled. Use "
            "model.compile(optimizer=..., loss=...) first, or lockstep.wrap(model, optimizer, loss)."
        )


def check_loss(model: Any) -> None:
    """Raises ModelError for a model without a loss; called after the model, which may add losses itself."""
    if not _has_own_loss(model) and model._compile_loss is None and not model.losses:
        raise ModelError(
            f"Training needs a loss, but {model.name!r} was compiled without a loss and its layers add no losses. "
            "Use model.compile(optimizer, loss)."
        )


def check_targets(model: Any, targets: Any) -> None:
    """Raises BatchError for a batch without targets, if the loss needs them."""
    if not _has_own_loss(model) and model._compile_loss is not None and targets is None:
        raise BatchError("The loss needs targets, but the batch has inputs alone. Give (inputs, targets).")


def check_inputs(model: Any, inputs: Any) -> None:
    """Raises BatchError for several inputs to a model with one, because Keras would ignore all but the first."""
    own_inputs = getattr(model, "inputs", None) or ()  # unknown for a subclass of keras.Model
    if len(own_inputs) == 1 and isinstance(inputs, tuple) and len(inputs) > 1:
        raise BatchError(
            f"The model {model.name!r} has one input. Got {describe(inputs)}. Give one array, or an iterator for "
            "several batches, as in trainer.predict(iter([x1, x2]))."
        )


def check_compiled_once(before: Sequence[Any], now: Sequence[Any]) -> None:
    """Raises ModelError for a model that was compiled again since it was wrapped."""
    if any(one is not other for one, other in zip(before, now, strict=True)):
        raise ModelError(
            "The model was compiled again since it was wrapped, but its trainer still has the optimizer, loss and "
            "metrics of the first compile. Call lockstep.wrap(model) again."
        )


def check_same_parts(before: Sequence[Any], now: Sequence[Any]) -> None:
    """Raises ModelError if variables or layers were replaced or moved: traced functions still use the old ones."""
    if list(map(id, before)) != list(map(id, now)):
        raise ModelError(
            "Layers or variables of the model were added, removed or moved since it was wrapped, but its trainer still "
            "has the old layers and variables. Compile the model and call lockstep.wrap(model) again."
        )


def check_built(model: Any, what: str) -> None:
    """Raises ModelError for a model without variables; `what` is the operation that needs the variables."""
    if not model.built:
        raise ModelError(
            f"{what} needs the model's variables, but {model.name!r} has none before its first batch. Begin the model "
            "with keras.Input(shape), or call it on an example before lockstep.wrap: model(x[:1])."
        )


def check_precision(recipe: Recipe) -> None:
    """Raises ModelError if a precision was given for the whole step."""
    if recipe.options.precision is not None:
        raise ModelError(
            f"precision={recipe.options.precision!r} is not supported for a Keras model, in which each layer has its "
            "own precision. Leave precision out, and call "
            "keras.mixed_precision.set_global_policy('mixed_bfloat16') before you create the model."
        )


def check_loss_scale(optimizer: Any) -> None:
    """Raises ModelError for an optimizer with a loss scale, which Lockstep does not apply on JAX and PyTorch."""
    # By class, not by the attribute `dynamic_scale`, which an optimizer has only once it is built.
    has_scale = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if has_scale or getattr(optimizer, "loss_scale_factor", None):
        raise ModelError(
            f"The optimizer {type(optimizer).__name__} has a loss scale, which Lockstep does not support for Keras on "
            "JAX and PyTorch. Call keras.mixed_precision.set_global_policy('mixed_bfloat16') before you create the "
            "model, or use Keras on TensorFlow."
        )


def _has_own_loss(model: Any) -> bool:
    """Returns whether the model's class defines compute_loss itself."""
    return type(model).compute_loss is not keras.Model.compute_loss


def _find_backend(model: Any) -> str:
    """Returns the Keras backend of the model's variables or, if the model has no variables, of its class."""
    for variable in model.variables:
        backend = _BACKENDS.get(type(variable.value).__module__.partition(".")[0])
        if backend is not None:
            return backend
    for kind in type(model).__mro__:
        backend = kind.__module__.removeprefix("keras.src.backend.").partition(".")[0]
        if kind.__module__.startswith("keras.src.backend.") and backend in _BACKENDS.values():
            return backend
    return str(keras.config.backend())
