"""Combines the arguments of `wrap` and of the model's `compile` into one recipe.

A compiled Keras model has an optimizer, a loss and metrics. Arguments of `wrap` replace these in the model itself, so
that `trainer.model` is compiled as it was trained.
"""

from dataclasses import replace
from typing import Any

import keras

from lockstep.backends.base import Habits, Recipe
from lockstep.backends.keras.unsupported import check_compiled, check_metrics, check_model
from lockstep.core.metrics import Metric
from lockstep.core.objective import Objective
from lockstep.errors import ModelError


def adopt(recipe: Recipe) -> Recipe:
    """Returns the recipe completed with the optimizer and the loss that the model was compiled with."""
    model = recipe.model
    check_model(model)
    check_metrics(recipe.metrics)
    _check_no_lockstep_metrics(recipe.metrics)
    metrics = recipe.metrics or None  # as `compile` takes them
    if metrics and isinstance(recipe.loss, Objective):
        raise ModelError(
            f"metrics={recipe.metrics!r} cannot be used with an objective: metrics compare outputs with targets, but "
            "an objective returns no outputs. Return the metrics from the objective: "
            "return loss, {'name': value}."
        )
    before = model if getattr(model, "compiled", False) else None
    if not _is_compiled_with(recipe, before) or metrics:
        losses, compiled_metrics = getattr(before, "_compile_loss", None), getattr(before, "_compile_metrics", None)
        optimizer = recipe.optimizer or getattr(before, "optimizer", None)
        loss = None if isinstance(recipe.loss, Objective) else recipe.loss or getattr(before, "loss", None)
        if optimizer is not None:
            model.compile(
                optimizer,
                loss,
                loss_weights=getattr(losses, "_user_loss_weights", None),
                metrics=metrics or getattr(compiled_metrics, "_user_metrics", None),
                weighted_metrics=getattr(compiled_metrics, "_user_weighted_metrics", None),
                # With True, Keras wraps the optimizer in a LossScaleOptimizer if the dtype policy is mixed_float16. A
                # script that compiled its model without one has chosen so.
                auto_scale_loss=before is None or isinstance(before.optimizer, keras.optimizers.LossScaleOptimizer),
            )
    check_compiled(model)
    compiled = getattr(model, "_compile_metrics", None)
    check_metrics([getattr(compiled, name, None) or () for name in ("_user_metrics", "_user_weighted_metrics")])
    loss = recipe.loss or model.loss
    habits = Habits("keras", (FinalizeVariables,), lists=True)
    return replace(recipe, optimizer=model.optimizer, loss=loss, metrics=(), habits=habits)


class FinalizeVariables(keras.callbacks.Callback):  # type: ignore[misc]  # without stubs it is Any
    """Replaces the weights by their moving averages at the end of training, as Keras does with `use_ema=True`."""

    def on_train_end(self, logs: Any = None) -> None:
        """Writes the averages into the weights; called before the script's own callbacks."""
        self.model.optimizer.finalize_variable_values(self.model.trainable_variables)


def _is_compiled_with(recipe: Recipe, before: Any) -> bool:
    """Returns whether the model was compiled with the optimizer and the loss that were given."""
    given = (recipe.optimizer, "optimizer"), (recipe.loss, "loss")
    return all(each is None or (before is not None and each is getattr(before, name)) for each, name in given)


def _check_no_lockstep_metrics(metrics: Any) -> None:
    """Raises ModelError if one of the metrics is a `lockstep.Metric`."""
    for metric in metrics.values() if isinstance(metrics, dict) else metrics:
        if isinstance(metric, Metric):
            raise ModelError(
                f"The lockstep.Metric {metric.name!r} cannot be used with a Keras model. Use a Keras metric (a name, a "
                "function of (y_true, y_pred) or an object of keras.metrics), or return the value from an objective: "
                "return loss, {'name': value}."
            )
