"""Metrics by name, as (sum, weight) over a shard."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from lockstep.backends.jax import losses, vector_fields
from lockstep.core.metrics import Column, Metric, ratio
from lockstep.core.objective import Objective
from lockstep.core.target_kind import Match, match
from lockstep.errors import ModelError

CUSTOM_SUMS = 1024  # room for a metric with sums of its own, such as a confusion matrix of 32 classes
Scaled = tuple[Any, float]  # a value, and a plain number by which the host multiplies it


def named(loss: Any) -> Mapping[str, Callable[[Any, Any], Any]]:
    """The metrics that go by a name; targets that the loss ignores do not count."""
    ignored = getattr(losses.resolve(loss), "ignore_index", None)
    flags = getattr(loss, "func", loss) is optax.sigmoid_binary_cross_entropy

    def accuracy(outputs: Any, targets: Any) -> Any:
        found = match("accuracy", outputs.shape, targets.shape, flags=flags)
        if found is Match.FLAGS:
            hits = (outputs.reshape(targets.shape) > 0) == (targets > 0.5)
            return hits.sum(), hits.size
        targets = targets.argmax(-1) if found is Match.ODDS else targets
        return _counted(outputs.argmax(-1) == targets, targets)

    def top5(outputs: Any, targets: Any) -> Any:
        found = match("top5", outputs.shape, targets.shape)
        targets = targets.argmax(-1) if found is Match.ODDS else targets
        best = jax.lax.top_k(outputs, min(5, outputs.shape[-1]))[1]
        return _counted((best == targets[..., None]).any(-1), targets)

    def mse(outputs: Any, targets: Any) -> Any:
        errors = _errors(outputs, targets)
        return jnp.square(errors).sum(), errors.size

    def mae(outputs: Any, targets: Any) -> Any:
        errors = _errors(outputs, targets)
        return jnp.abs(errors).sum(), errors.size

    def _counted(hits: Any, targets: Any) -> Any:
        counted = jnp.ones_like(hits) if ignored is None else targets != ignored
        return (hits & counted).sum(), counted.sum()

    return {"accuracy": accuracy, "top5": top5, "mse": mse, "mae": mae}


def room(chosen: Sequence[Metric], loss: Any) -> int:
    """How many sums the metrics of a step may give, those of an objective's own among them."""
    known = sum(2 if metric.result is ratio else CUSTOM_SUMS for metric in chosen)
    return known + CUSTOM_SUMS * isinstance(loss, Objective)


def measure(metric: Metric, outputs: Any, targets: Any, examples: int) -> tuple[list[Scaled], Column]:
    """The sums of a metric over one shard, and the column they fill."""
    value = metric.sums(outputs, targets)
    if metric.result is ratio:
        return pair(metric.name, value, examples), Column(metric.name, 2)
    sums = list(value) if isinstance(value, tuple | list) else list(jnp.ravel(value))
    return [(each, 1.0) for each in sums], Column(metric.name, len(sums), metric.result)


def pair(name: str, value: Any, examples: int) -> list[Scaled]:
    """(sum, weight) out of a pair, one value per example, or the mean over the shard."""
    if isinstance(value, tuple) and len(value) == 2:
        return [(value[0], 1.0), (value[1], 1.0)]
    value = jnp.asarray(value)
    if value.ndim == 0:
        return [(value, examples), (examples, 1.0)]
    if len(value) != examples:
        raise ModelError(
            f"A metric gives one value per example, or (sum, weight). Got shape {tuple(value.shape)} from {name!r} "
            f"for a shard of {examples}. Return one of these."
        )
    if not jnp.issubdtype(value.dtype, jnp.floating):
        value = value.astype(vector_fields.wide())
    return [(value.reshape(examples, -1).mean(1).sum(), 1.0), (examples, 1.0)]


def _errors(outputs: Any, targets: Any) -> Any:
    if outputs.shape != targets.shape:
        raise ModelError(
            "mse and mae compare outputs and targets of one shape. "
            f"Got {tuple(outputs.shape)} and {tuple(targets.shape)}. Reshape one of them."
        )
    return outputs - targets
