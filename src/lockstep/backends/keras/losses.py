"""Losses: by what a compiled loss divides, so that the shards add up to the batch's own loss.

Keras divides by the number of values, which is the same for every example. Only masks
and the reduction `mean_with_sample_weight` have a denominator of their own.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops
from keras.src.backend import get_keras_mask  # JAX's arrays carry no attributes, so theirs lie in a table

from lockstep.backends.keras_losses import is_of_keras
from lockstep.core.objective import Sum
from lockstep.core.target_kind import Labels
from lockstep.core.weighing import Counted, Share, Term, Weighing
from lockstep.errors import ModelError

SUM = "sum"


def flat(model: Any) -> Sequence[Any]:
    """The losses of every output, once Keras has built them."""
    compiled = model._compile_loss
    return () if compiled is None or not compiled.built else [each.loss for each in compiled._flat_losses]


def criterion(model: Any) -> Callable[[Any, Any], Any] | None:
    """The compiled loss as a function of (outputs, targets), if it has a part that is the script's own function.

    Keras takes what such a function gives for values and means over them: one number stays what it is.
    """
    if type(model).compute_loss is not keras.Model.compute_loss:
        return _unknown
    compiled = model._compile_loss
    given = [] if compiled is None else [each for each in keras.tree.flatten(compiled._user_loss) if each is not None]
    if all(isinstance(each, str) or is_of_keras(each) or getattr(each, "reduction", None) == SUM for each in given):
        return None
    return lambda outputs, targets: compiled(targets, outputs)


def _unknown(outputs: Any, targets: Any) -> float:
    """A model's own compute_loss may ask for more than these."""
    return float("nan")


def summed(model: Any, assumed: bool) -> bool:
    """Whether the loss is a plain sum; several losses are all sums or all means. `assumed` is what its values tell."""
    if assumed:
        return True
    kinds = {loss.reduction == SUM for loss in flat(model)}
    if len(kinds) > 1:
        raise ModelError(
            "The losses of a model are all sums or all means. Got both. Use reduction='sum_over_batch_size' everywhere."
        )
    return True in kinds


def weigh(
    weighing: Weighing, model: Any, value: Any, extra: Any, counted: Counted | None, share: Share, **rest: Any
) -> Term:
    """The term of a compiled loss; `extra` are the parts of it that are no sum over the examples."""
    ops = weighing.ops
    if summed(model, share.summed):
        extra = ops.cast_like(extra, value)
        value = value if share.alone else value - extra + ops.scale(extra, share.fraction)  # these count once
        return weighing.sum(Sum(value), share, **rest)
    if counted is None:
        return weighing.mean(value, share, **rest)
    return weighing.own_mean(value, counted, share, **rest)


def find_labels(model: Any, outputs: Any) -> Labels | None:
    """What the targets may be, if the model's one loss is a cross-entropy of labels: Keras ignores one outside."""
    losses, arrays = flat(model), keras.tree.flatten(outputs)
    if type(model).compute_loss is not keras.Model.compute_loss or not len(losses) == len(arrays) == 1:
        return None
    (loss,), (output,) = losses, arrays
    names = type(loss).__name__, getattr(getattr(loss, "fn", loss), "__name__", "")
    if not {"SparseCategoricalCrossentropy", "sparse_categorical_crossentropy"} & set(names):
        return None
    if get_keras_mask(output) is not None:  # what is masked out may have any label
        return None
    keywords = getattr(loss, "_fn_kwargs", {})
    return Labels(output.shape[keywords.get("axis", -1)], keywords.get("ignore_class"))


def counted(model: Any, targets: Any, outputs: Any, weights: Any) -> Counted | None:
    """By what the model's one loss divides, where that is not the number of its values; else None."""
    losses = flat(model)
    found = [
        _counted(loss, target, output, weight)
        for loss, target, output, weight in zip(
            losses,
            keras.tree.flatten(targets),
            keras.tree.flatten(outputs),
            _spread(weights, len(losses)),
            strict=False,
        )
    ]
    if all(each is None for each in found):
        return None
    if len(losses) > 1:
        raise ModelError(
            "With several outputs every loss divides by its examples. Got one that divides by its mask or weights. "
            "Use reduction='sum_over_batch_size' without masks, or write an objective that returns "
            "lockstep.Sum(total, count)."
        )
    factor = model._compile_loss._flat_losses[0].loss_weights
    (one,) = found
    return one if one is None or one.total is None or factor is None else one._replace(total=one.total * factor)


def _spread(weights: Any, count: int) -> list[Any]:
    flat_weights = [] if weights is None else keras.tree.flatten(weights)
    return flat_weights if len(flat_weights) == count else [flat_weights[0] if flat_weights else None] * count


def _counted(loss: Any, targets: Any, outputs: Any, weights: Any) -> Counted | None:
    weighted = loss.reduction == "mean_with_sample_weight"
    mask = get_keras_mask(outputs)
    if mask is None and getattr(loss, "_fn_kwargs", {}).get("ignore_class") is None and not weighted:
        return None  # nothing is left out, so nothing is worked out twice
    values = loss.call(ops.convert_to_tensor(targets, loss.dtype), ops.convert_to_tensor(outputs, loss.dtype))
    out_mask = get_keras_mask(values)
    if mask is not None and out_mask is not None:
        mask = ops.logical_and(mask, out_mask)
    elif mask is None:
        mask = out_mask
    wide = _wide()
    if not weighted or weights is None:
        if mask is None:
            return None
        weight = ops.sum(ops.ones(values.shape, wide) * ops.cast(mask, wide))
        return Counted(weight, weight != 0, None)
    shape = [*weights.shape, *[1] * (len(values.shape) - len(weights.shape))]
    each = ops.broadcast_to(ops.reshape(ops.cast(weights, wide), shape), values.shape)
    each = each if mask is None else each * ops.cast(mask, wide)
    total = ops.sum(values * ops.cast(each, values.dtype))
    return Counted(ops.sum(each), ops.any(each != 0), total)


def _wide() -> str:
    """The widest float that the backend computes in."""
    if keras.config.backend() != "jax":
        return "float64"
    import jax

    return str(jax.dtypes.canonicalize_dtype("float64"))
