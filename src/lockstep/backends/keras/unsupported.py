"""Refusals: what of Keras cannot be trained in parallel as it is, with the line to change."""

from collections.abc import Sequence
from typing import Any

import keras

from lockstep.backends.base import Recipe
from lockstep.core.batches import describe
from lockstep.core.metric_kinds import METHODS
from lockstep.errors import BatchError, ModelError, OptimizerError

_HOMES = {"tensorflow": "tensorflow", "torch": "torch", "jaxlib": "jax", "jax": "jax"}


_OWN_LOSS = (
    "Put the loss into compute_loss, or into an objective: lockstep.wrap(model, optimizer, lockstep.objective(f))."
)
_STEPS = {
    "train_step": ("Lockstep makes the step.", _OWN_LOSS),
    "test_step": ("Lockstep makes the step.", _OWN_LOSS),
    "predict_step": (
        "trainer.predict calls the model.",
        "Put that into call, or do it with what trainer.predict gives.",
    ),
    "compute_metrics": (
        "Metrics come from compile, for their sums go through the tree.",
        "Use compile(metrics=[...]), or return values from an objective: return loss, {'name': value}.",
    ),
}
RESTORED = "when it takes over a state"


def check_model(model: Any) -> None:
    """Refuses a model with a step or metrics of its own, or of another backend than the one in use."""
    here = keras.config.backend()
    home = _home(model)
    if home != here:
        raise ModelError(
            f"A model computes with the backend it was built on. Got one of {home}, and Keras now runs on {here}. "
            "Choose KERAS_BACKEND before the first import of keras, and build the model then."
        )
    for method, (rule, instead) in _STEPS.items():
        if getattr(type(model), method) is not getattr(keras.Model, method):
            raise ModelError(f"{rule} Got a model with a {method} of its own. {instead}")
    layers = model._flatten_layers(include_self=True, recursive=True)
    for metric in (metric for layer in layers for metric in layer._metrics):
        raise ModelError(
            "Metrics come from compile, for their sums go through the tree. "
            f"Got {metric.name!r}, which the model keeps itself. Use compile(metrics=[...]), or return its value from "
            f"an objective: return loss, {{{metric.name!r}: value}}."
        )


def check_metrics(metrics: Any) -> None:
    """Refuses metric objects of other libraries, which Keras would call as functions and average."""
    for metric in keras.tree.flatten(metrics):
        if isinstance(metric, str | keras.metrics.Metric):
            continue
        methods = [method for method in METHODS if callable(getattr(metric, method, None))]
        if methods:
            raise ModelError(
                "A Keras model's metrics are Keras's: names, functions of (y_true, y_pred) or keras.metrics. Got a "
                f"{type(metric).__name__} with {', '.join(methods)}. Use keras.metrics (AUC, F1Score, ...), or give "
                "the object the outputs of trainer.predict."
            )


def check_compiled(model: Any) -> None:
    """Refuses a model that nobody has said how to train."""
    if not getattr(model, "compiled", False) or model.optimizer is None:
        raise OptimizerError(
            "A model needs an optimizer and a loss. Got one that is not compiled. Use model.compile(optimizer=..., "
            "loss=...) first, or lockstep.wrap(model, optimizer, loss)."
        )


def check_loss(model: Any) -> None:
    """Refuses a model, called just now, that gives nothing to minimize."""
    if not _has_own_loss(model) and model._compile_loss is None and not model.losses:
        raise ModelError(
            f"Training needs a loss. Got {model.name!r}, which was compiled without one and adds none itself. "
            "Use model.compile(optimizer, loss)."
        )


def check_targets(model: Any, targets: Any) -> None:
    """Refuses a batch that leaves the loss nothing to compare with."""
    if not _has_own_loss(model) and model._compile_loss is not None and targets is None:
        raise BatchError("A loss compares outputs with targets. Got a batch of inputs alone. Give (inputs, targets).")


def check_inputs(model: Any, inputs: Any) -> None:
    """Refuses several inputs for a model of one: of these a Sequential would take the first and drop the rest."""
    known = getattr(model, "inputs", None) or ()  # a class of the script's own does not say
    if len(known) == 1 and isinstance(inputs, tuple) and len(inputs) > 1:
        raise BatchError(
            f"{model.name!r} has one input. Got {describe(inputs)}. Give one array; several batches come from an "
            "iterator, as in trainer.predict(iter([x1, x2]))."
        )


def check_compiled_once(before: Sequence[Any], now: Sequence[Any]) -> None:
    """Refuses a model that was compiled again: its trainer has the optimizer, loss and metrics of before."""
    if any(one is not other for one, other in zip(before, now, strict=True)):
        raise ModelError(
            "A trainer goes on with the optimizer, loss and metrics that its model had when it was wrapped. Got a "
            "model that was compiled again since. Call lockstep.wrap(model) again."
        )


def check_same_parts(before: Sequence[Any], now: Sequence[Any]) -> None:
    """Refuses a model with other variables or layers than its trainer, and what was traced of it, know."""
    if list(map(id, before)) != list(map(id, now)):
        raise ModelError(
            "A trainer trains the layers and variables that its model had when it was wrapped. Got a model that has "
            "others since, or has them elsewhere. Compile it and call lockstep.wrap(model) again."
        )


def check_built(model: Any, when: str) -> None:
    """Refuses a model without variables where they are needed."""
    if not model.built:
        raise ModelError(
            f"A model has its variables {when}. Got {model.name!r}, which waits for its first batch. Begin it with "
            "keras.Input(shape), or call it on an example before lockstep.wrap: model(x[:1])."
        )


def check_precision(recipe: Recipe) -> None:
    """Refuses a precision for the whole step."""
    if recipe.options.precision is not None:
        raise ModelError(
            f"A Keras model's precision is the layers' own. Got precision={recipe.options.precision!r}. "
            "Use keras.mixed_precision.set_global_policy('mixed_bfloat16') before the model is made."
        )


def check_scale(optimizer: Any) -> None:
    """Refuses an optimizer that divides by a loss scale, where nobody multiplies by it."""
    # Not by an attribute: `dynamic_scale` is there only once the optimizer has been built.
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if scales or getattr(optimizer, "loss_scale_factor", None):
        raise ModelError(
            "On JAX and PyTorch a Keras model trains without a loss scale. "
            f"Got {type(optimizer).__name__} with one. "
            "Use keras.mixed_precision.set_global_policy('mixed_bfloat16') before the model is made, or TensorFlow."
        )


def _has_own_loss(model: Any) -> bool:
    return type(model).compute_loss is not keras.Model.compute_loss


def _home(model: Any) -> str:
    """The backend that the model's variables live on, or that its class was made for."""
    for variable in model.variables:
        home = _HOMES.get(type(variable.value).__module__.partition(".")[0])
        if home is not None:
            return home
    for kind in type(model).__mro__:
        found = kind.__module__.removeprefix("keras.src.backend.").partition(".")[0]
        if kind.__module__.startswith("keras.src.backend.") and found in _HOMES.values():
            return found
    return str(keras.config.backend())
