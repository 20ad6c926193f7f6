"""Finds the number by which a compiled loss divides, so that the shards' losses add up to the batch's loss.

Keras divides by the number of values, which is the same for every example. Only masks and the reduction
`mean_with_sample_weight` divide by something else.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops
from keras.src.backend import get_keras_mask  # because on JAX the mask is no attribute of the tensor

from lockstep.backends.keras_losses import is_of_keras
from lockstep.core.objective import Sum
from lockstep.core.target_kind import Labels
from lockstep.core.weighing import Counted, Share, Term, Weighing
from lockstep.errors import ModelError

SUM = "sum"


def list_losses(model: Any) -> Sequence[Any]:
    """Returns the loss of each output; an empty sequence before Keras has built the losses."""
    compiled = model._compile_loss
    return () if compiled is None or not compiled.built else [each.loss for each in compiled._flat_losses]


def find_criterion(model: Any) -> Callable[[Any, Any], Any] | None:
    """Returns the compiled loss as a function of (outputs, targets) if it calls the script's own code; else None.

    Keras averages the values that the script's function returns. If the function returns one number, its reduction is
    unknown.
    """
    if type(model).compute_loss is not keras.Model.compute_loss:
        return _return_nan
    compiled = model._compile_loss
    given = [] if compiled is None else [each for each in keras.tree.flatten(compiled._user_loss) if each is not None]
    if all(isinstance(each, str) or is_of_keras(each) or getattr(each, "reduction", None) == SUM for each in given):
        return None
    return lambda outputs, targets: compiled(targets, outputs)


def _return_nan(outputs: Any, targets: Any) -> float:
    """Returns NaN instead of calling the model's own compute_loss, which may need more than outputs and targets."""
    return float("nan")


def is_sum(model: Any, was_measured_as_sum: bool) -> bool:
    """Returns whether the loss is a sum over the examples; raises ModelError if only some of the losses are sums."""
    if was_measured_as_sum:
        return True
    reductions = [loss.reduction for loss in list_losses(model)]
    sums = [reduction == SUM for reduction in reductions]
    if any(sums) and not all(sums):
        raise ModelError(
            f"The model's losses have the reductions {', '.join(map(repr, reductions))}, but sums over the examples "
            "cannot be combined with means. Use reduction='sum_over_batch_size' in every loss."
        )
    return any(sums)


def weigh(
    weighing: Weighing, model: Any, value: Any, extra: Any, counted: Counted | None, share: Share, **rest: Any
) -> Term:
    """Returns the `Term` of a compiled loss; `extra` is the part that does not grow with the number of examples."""
    array_ops = weighing.ops
    if is_sum(model, share.summed):
        extra = array_ops.cast_like(extra, value)
        # The extra loss must count once for the whole batch, so each shard adds its fraction.
        value = value if share.alone else value - extra + array_ops.scale(extra, share.fraction)
        return weighing.sum(Sum(value), share, **rest)
    if counted is None:
        return weighing.mean(value, share, **rest)
    return weighing.own_mean(value, counted, share, **rest)


def find_labels(model: Any, outputs: Any) -> Labels | None:
    """Returns the valid labels if the only loss is a cross-entropy of labels, which Keras does not check; else None."""
    losses, arrays = list_losses(model), keras.tree.flatten(outputs)
    if type(model).compute_loss is not keras.Model.compute_loss or not len(losses) == len(arrays) == 1:
        return None
    (loss,), (output,) = losses, arrays
    names = type(loss).__name__, getattr(getattr(loss, "fn", loss), "__name__", "")
    if not {"SparseCategoricalCrossentropy", "sparse_categorical_crossentropy"} & set(names):
        return None
    if get_keras_mask(output) is not None:  # a masked example may have any label
        return None
    keywords = getattr(loss, "_fn_kwargs", {})
    return Labels(output.shape[keywords.get("axis", -1)], keywords.get("ignore_class"))


def find_denominator(model: Any, targets: Any, outputs: Any, weights: Any) -> Counted | None:
    """Returns the number by which the model's only loss divides; None if that is the number of the loss's values."""
    losses = list_losses(model)
    denominators = [
        _find_denominator(loss, target, output, weight)
        for loss, target, output, weight in zip(
            losses,
            keras.tree.flatten(targets),
            keras.tree.flatten(outputs),
            _repeat_weights(weights, len(losses)),
            strict=False,
        )
    ]
    if all(each is None for each in denominators):
        return None
    if len(losses) > 1:
        raise ModelError(
            f"The model has {len(losses)} losses, and at least one of them divides by its mask or its example weights "
            "instead of the number of its values. Use reduction='sum_over_batch_size' without masks, or write an "
            "objective that returns lockstep.Sum(total, count)."
        )
    factor = model._compile_loss._flat_losses[0].loss_weights
    (one,) = denominators
    return one if one is None or one.total is None or factor is None else one._replace(total=one.total * factor)


def _repeat_weights(weights: Any, count: int) -> list[Any]:
    """Returns the example weights of each loss; weights that are given once belong to every loss."""
    flat_weights = [] if weights is None else keras.tree.flatten(weights)
    return flat_weights if len(flat_weights) == count else [flat_weights[0] if flat_weights else None] * count


def _find_denominator(loss: Any, targets: Any, outputs: Any, weights: Any) -> Counted | None:
    """Returns what one loss divides by; None if that is the number of its values. Follows `keras.losses.Loss`."""
    is_weighted = loss.reduction == "mean_with_sample_weight"
    mask = get_keras_mask(outputs)
    if mask is None and getattr(loss, "_fn_kwargs", {}).get("ignore_class") is None and not is_weighted:
        return None  # nothing is masked, so the values need not be computed a second time
    values = loss.call(ops.convert_to_tensor(targets, loss.dtype), ops.convert_to_tensor(outputs, loss.dtype))
    out_mask = get_keras_mask(values)  # of `ignore_class`
    if mask is not None and out_mask is not None:
        mask = ops.logical_and(mask, out_mask)
    elif mask is None:
        mask = out_mask
    dtype = _find_widest_float()
    if not is_weighted or weights is None:
        if mask is None:
            return None
        weight = ops.sum(ops.ones(values.shape, dtype) * ops.cast(mask, dtype))
        return Counted(weight, weight != 0, None)
    shape = [*weights.shape, *[1] * (len(values.shape) - len(weights.shape))]
    each = ops.broadcast_to(ops.reshape(ops.cast(weights, dtype), shape), values.shape)
    each = each if mask is None else each * ops.cast(mask, dtype)
    total = ops.sum(values * ops.cast(each, values.dtype))
    return Counted(ops.sum(each), ops.any(each != 0), total)


def _find_widest_float() -> str:
    """Returns the widest float dtype of the framework."""
    if keras.config.backend() != "jax":
        return "float64"
    import jax

    return str(jax.dtypes.canonicalize_dtype("float64"))
