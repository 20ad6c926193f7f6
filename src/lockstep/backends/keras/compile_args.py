"""Adoption: what `wrap` was given, and what `compile` had, as one recipe.

A Keras model carries its optimizer, loss and metrics. What `wrap` is given takes their
place in the model itself, so that `trainer.model` is compiled as it was trained.
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
    """The recipe with whatever the model was compiled with."""
    model = recipe.model
    check_model(model)
    check_metrics(recipe.metrics)
    metrics = _metrics(recipe.metrics)
    if metrics and isinstance(recipe.loss, Objective):
        raise ModelError(
            "Metrics compare outputs and targets, and an objective tells neither. "
            f"Got metrics={recipe.metrics!r} beside one. Let it return its own: return loss, {{'name': value}}."
        )
    before = model if getattr(model, "compiled", False) else None
    if not _is_compiled_so(recipe, before) or metrics:
        losses, measures = getattr(before, "_compile_loss", None), getattr(before, "_compile_metrics", None)
        optimizer = recipe.optimizer or getattr(before, "optimizer", None)
        loss = None if isinstance(recipe.loss, Objective) else recipe.loss or getattr(before, "loss", None)
        if optimizer is not None:
            model.compile(
                optimizer,
                loss,
                loss_weights=getattr(losses, "_user_loss_weights", None),
                metrics=metrics or getattr(measures, "_user_metrics", None),
                weighted_metrics=getattr(measures, "_user_weighted_metrics", None),
                auto_scale_loss=before is None or isinstance(before.optimizer, keras.optimizers.LossScaleOptimizer),
            )
    check_compiled(model)
    compiled = getattr(model, "_compile_metrics", None)
    check_metrics([getattr(compiled, name, None) or () for name in ("_user_metrics", "_user_weighted_metrics")])
    loss = recipe.loss or model.loss
    habits = Habits("keras", (Finishing,), lists=True)
    return replace(recipe, optimizer=model.optimizer, loss=loss, metrics=(), habits=habits)


class Finishing(keras.callbacks.Callback):  # type: ignore[misc]  # without stubs it is Any
    """What Keras's own `fit` ends with: where the optimizer averages weights, these take the place of the last ones."""

    def on_train_end(self, logs: Any = None) -> None:
        """Before any callback of the script hears of the end."""
        self.model.optimizer.finalize_variable_values(self.model.trainable_variables)


def _is_compiled_so(recipe: Recipe, before: Any) -> bool:
    """Whether what was given is what the model was compiled with."""
    given = (recipe.optimizer, "optimizer"), (recipe.loss, "loss")
    return all(each is None or (before is not None and each is getattr(before, name)) for each, name in given)


def _metrics(metrics: Any) -> Any:
    """Metrics as `compile` takes them."""
    found = list(metrics.values() if isinstance(metrics, dict) else metrics)
    for metric in found:
        if isinstance(metric, Metric):
            raise ModelError(
                f"A Keras model's metrics are Keras's: names, functions of (y_true, y_pred) or keras.metrics. "
                f"Got lockstep.Metric {metric.name!r}. Give one of these, or return it from an objective."
            )
    return metrics or None
