"""The loss in a model's own output (`loss=None`), and the number by which its mean divides.

Hugging Face's models return the mean over the labels that are not -100, which in a language model are tokens. Shards
are weighed by their numbers of such labels, so that any number of shards gives the whole batch's mean. To determine the
kind of mean, the loss is compared with the cross-entropy of the output's logits. If they differ, the model is called
with `num_items_in_batch`, by which its loss must then divide. Any other loss is taken for a mean over examples, as long
as no label is ignored.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.backends.torch.array_ops import SHORT
from lockstep.backends.torch.losses import WEIGHING
from lockstep.backends.torch.train_mode import evaluation_mode
from lockstep.core.weighing import Share, Term
from lockstep.errors import ModelError

IGNORED = -100  # torch's own, and that of every model of Hugging Face


class Reading(NamedTuple):
    """What a model's own loss is a mean over: the labels that are not ignored, or the examples."""

    labels: bool  # over the labels that count; else over the examples
    shifted: bool = False  # no logits predict the first label of a row, as in a causal language model

    def mask_counted(self, labels: Tensor) -> Tensor:
        """Returns a mask of the labels that a mean over labels divides by."""
        return (labels[..., 1:] if self.shifted else labels) != IGNORED


OF_EXAMPLES = Reading(labels=False)


class ModelLoss:
    """The function (model, shard's batch, share) -> Term for a model that computes its own loss.

    The first shard decides how the loss is read, and later shards are checked until one is conclusive: without ignored
    labels a mean over labels equals a mean over examples, and with few ignored labels nearly so.
    """

    def __init__(self, call: Callable[[nn.Module, Any], Any]) -> None:
        self._call_model = call
        self._reading: Reading | None = None
        self._settled = False

    def __call__(self, model: nn.Module, batch: Any, share: Share) -> Term:
        """Returns the `Term` of one shard: the model's loss, and the number by which it is divided."""
        outputs = self._call_model(model, batch)
        loss, rest = WEIGHING.find_model_loss(outputs, batch, share)
        labels = None if loss.ndim else _find_labels(model, batch)
        if labels is None:
            return WEIGHING.mean(loss, share, **rest)
        readings = _list_readings(model, batch, labels)
        if not share.alone and loss.isnan() and not all(bool(each.mask_counted(labels).any()) for each in readings):
            return Term(loss, 0.0, 0.0, 1.0, contributes=False, **rest)  # 0 / 0
        reading = self._read(readings, model, batch, labels, rest["outputs"], loss, share)
        rest["reading"] = repr(reading)
        if not reading.labels:
            return WEIGHING.mean(loss, share, **rest)
        count = float(reading.mask_counted(labels).sum())
        total = loss.detach().double() * count
        if share.alone:
            return Term(loss, total, count, **rest)
        if loss.dtype in SHORT:  # which would round the count
            return Term(loss, total, count, 1.0, gradient_factor=count, **rest)
        return Term(loss * count, total, count, 1.0, **rest)

    def _read(
        self,
        readings: list[Reading],
        model: nn.Module,
        batch: Any,
        labels: Tensor,
        logits: Any,
        loss: Tensor,
        share: Share,
    ) -> Reading:
        """Returns how to read the loss; raises if labels are ignored and the kind of mean cannot be determined."""
        ignored = bool((labels == IGNORED).any())
        if self._reading is not None and (self._settled or not ignored):
            return self._reading
        found = _find_closest(readings, loss, logits, labels)
        if found is None and _takes_num_items(model):
            found = next((each for each in readings if _divides_by_num_items(model, batch, each, labels)), None)
        if found is None and ignored and share.fraction < 1:
            raise ModelError(
                f"The loss of {type(model).__name__} is not the mean over the labels that are not {IGNORED} (it gives "
                f"{loss.item():.6g} for {int((labels != IGNORED).sum())} of {labels.numel()} labels) and does not "
                "divide by num_items_in_batch, so it is unknown how shards with unequal numbers of labels add up. "
                "For a mean over examples write an objective that returns model(**batch).loss; for a mean over "
                "something that you can count, one that returns lockstep.Sum(model(**batch).loss * count, count); or "
                "use shards=1."
            )
        if math.isfinite(loss.detach()):
            self._reading = found or OF_EXAMPLES
            self._settled = ignored and (found is None or _is_conclusive(found, loss, logits, labels))
        return found or OF_EXAMPLES


def _find_loss(outputs: Any) -> Tensor | None:
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    return loss if isinstance(loss, Tensor) else None


def _find_labels(model: nn.Module, batch: Any) -> Tensor | None:
    """Returns the integer labels that the model is called with, if any; shifted ones if the batch has them."""
    named = batch
    if isinstance(batch, tuple):
        try:
            named = inspect.signature(model.forward).bind_partial(*batch).arguments
        except TypeError:
            return None
    if not isinstance(named, Mapping):
        return None
    labels = named.get("shift_labels", named.get("labels"))
    integers = isinstance(labels, Tensor) and not (labels.is_floating_point() or labels.dtype == torch.bool)
    return labels if integers and labels.ndim else None


def _list_readings(model: nn.Module, batch: Any, labels: Tensor) -> list[Reading]:
    """Returns the means over labels that the loss may be, first the one that Hugging Face's Trainer would take.

    Labels are taken for shifted if the model's loss function is that of a causal language model, unless the model is an
    encoder-decoder.
    """
    if labels.ndim < 2 or (isinstance(batch, Mapping) and "shift_labels" in batch):
        return [Reading(labels=True)]
    function = getattr(model, "loss_function", None) if getattr(model, "loss_type", None) else None
    decodes = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    causal = getattr(function, "__name__", "") == "ForCausalLMLoss" and not decodes
    return [Reading(labels=True, shifted=causal), Reading(labels=True, shifted=not causal)]


def _find_closest(readings: list[Reading], loss: Tensor, logits: Any, labels: Tensor) -> Reading | None:
    """Returns the reading by which the loss is the mean cross-entropy of the logits; None if none fits.

    If several fit equally well, returns the first. In a short dtype several may be close, but the right one is exact.
    """
    distances = {each: _measure_distance(each, loss, logits, labels) for each in readings}
    best = min(readings, key=lambda each: distances[each])
    return best if distances[best] <= _find_tolerance(loss) * abs(float(loss.detach())) + 1e-8 else None


def _measure_distance(reading: Reading, loss: Tensor, logits: Any, labels: Tensor) -> float:
    """Returns how far the loss is from the cross-entropy of the logits, averaged over the labels that count."""
    if not isinstance(logits, Tensor) or logits.shape[:-1] != labels.shape or not logits.is_floating_point():
        return math.inf
    if reading.shifted:
        logits, labels = logits[..., :-1, :], labels[..., 1:]
    classes = logits.shape[-1]
    invalid = (labels != IGNORED) & ((labels < 0) | (labels >= classes))
    if bool(invalid.any()):  # a GPU's kernel would end the process's context
        return math.inf
    logits, labels = logits.detach().reshape(-1, classes), labels.reshape(-1).long()
    with torch.no_grad():  # some models convert their logits to float32, others do not
        own = [
            F.cross_entropy(each, labels) for each in {each.dtype: each for each in (logits, logits.float())}.values()
        ]
    distances = [abs(float(loss.detach()) - float(each)) for each in own]
    return min((each for each in distances if math.isfinite(each)), default=math.inf)


def _is_conclusive(reading: Reading, loss: Tensor, logits: Any, labels: Tensor) -> bool:
    """Returns whether this batch distinguishes a mean over labels from a mean of the rows' means.

    Rows with equal numbers of labels decide nothing. If the cross-entropy cannot be computed, the model itself has
    divided by `num_items_in_batch`, which is conclusive.
    """
    counts = reading.mask_counted(labels).reshape(len(labels), -1).sum(1)
    if bool((counts == counts[0]).all()):
        return False
    if math.isinf(_measure_distance(reading, loss, logits, labels)):
        return True
    zero = torch.zeros(())  # whose distance from a row's mean cross-entropy is that mean
    rows = [_measure_distance(reading, zero, logits[index], labels[index]) for index, each in enumerate(counts) if each]
    return abs(sum(rows) / len(rows) - float(loss.detach())) > 100 * _find_tolerance(loss) * abs(float(loss.detach()))


def _takes_num_items(model: nn.Module) -> bool:
    """Returns whether Hugging Face's Trainer would give the model `num_items_in_batch`."""
    accepts = getattr(model, "accepts_loss_kwargs", None)
    if accepts is not None:
        return bool(accepts)
    parameters = inspect.signature(model.forward).parameters
    return "num_items_in_batch" in parameters or any(
        each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()
    )


def _divides_by_num_items(model: nn.Module, batch: Any, reading: Reading, labels: Tensor) -> bool:
    """Returns whether the model's loss divides by `num_items_in_batch` if given, else by the number of labels.

    A `forward` with **kwargs may ignore the argument, so the loss must fall if the number is doubled.
    """
    count = reading.mask_counted(labels).sum()
    if not count:
        return False
    with _preserve_state(model):
        try:
            losses = [_find_loss(_call(model, batch, number)) for number in (None, count, 2 * count)]
        except TypeError:  # raised by what the model passes its keywords to
            return False
    own, same, half = losses
    if own is None or same is None or half is None:
        return False
    return _is_close(own, same) and not _is_close(own, half)


def _call(model: nn.Module, batch: Any, num_items: Tensor | None) -> Any:
    named = {} if num_items is None else {"num_items_in_batch": num_items}
    if isinstance(batch, Mapping):
        return model(**{**batch, **named})
    return model(*batch, **named) if isinstance(batch, tuple) else model(batch, **named)


@contextmanager
def _preserve_state(model: nn.Module) -> Iterator[None]:
    """A context in evaluation mode without gradients; restores modes, buffers and random number generators."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with (
        evaluation_mode(model),
        torch.random.fork_rng(devices=range(torch.cuda.device_count())),
        torch.no_grad(),
    ):
        yield
        for buffer, before in buffers:
            if not torch.equal(buffer, before):
                buffer.copy_(before)


def _is_close(one: Tensor, other: Tensor) -> bool:
    """Returns whether two losses are equal but for their last digits."""
    return math.isclose(float(one), float(other), rel_tol=_find_tolerance(one), abs_tol=1e-8)


def _find_tolerance(loss: Tensor) -> float:
    return 2.0**-7 if loss.dtype in SHORT else 2e-6
