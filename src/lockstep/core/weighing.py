"""Weighs the losses of the shards so that they add up to the loss of the whole batch.

A mean over the shard's examples is multiplied by (its examples / the batch's) before the
backward pass; the shards then simply add. A loss that divides by something else (targets
that are not ignored, class weights, example weights) is summed instead and divided once
after the tree. With one shard neither happens: the loss is the script's own, to the bit.
The reasons are in docs/design/weighing.md.

This is written over `ArrayOps` and also runs inside jax.jit and tf.function, so a
decision about values is itself an array, never an `if`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from lockstep.core.batch_entries import call_model, check_example_weights, explain_missing_input, split_batch
from lockstep.core.batches import describe, leaves
from lockstep.core.criterion import Criterion
from lockstep.core.objective import Objective, Sum, read_sum
from lockstep.core.target_kind import Labels, check_labels
from lockstep.errors import ModelError

if TYPE_CHECKING:
    from lockstep.backends.array_ops import ArrayOps


class Share(NamedTuple):
    """A shard's part of the batch."""

    examples: int
    fraction: Any  # its examples / the batch's; traced in a framework that compiles shards of many batch sizes once
    alone: bool  # whether the batch has no other shard
    summed: bool = False  # whether a loss that does not say how it reduces is a sum


@dataclass
class Term:
    """The weighed loss of one shard: where the backward pass starts (`root`), and what is added to the sums."""

    root: Any
    loss: Any
    weight: Any
    divided: Any = 0.0  # 1 if the loss and the gradient are still to be divided by the weight, after the tree
    times: float = 1.0  # by what the loss is multiplied on its way into the sums
    contributes: Any = True  # whether the shard has a loss at all; if not, the gradient may be NaN and counts as zero
    gradient_factor: Any = None  # by what the gradient is still to be multiplied
    outputs: Any = None
    targets: Any = None
    values: Mapping[str, Any] = field(default_factory=dict)  # an objective's own metrics
    carried: Any = None  # the state that an objective gives to the next batch
    labels: Labels | None = None  # what the targets may be, if they are labels
    reading: str = ""  # how the loss of the model's output was read, which must be one way in all shards
    is_own: bool = False  # whether no other code has the arrays `loss` and `weight`, so that they need not be copied
    is_mean: bool = False  # whether the sums get `loss` times `weight`, once they are read on the host
    per_example: bool = False  # whether the gradient is a sum over the examples, by whose number the update divides


class Counted(NamedTuple):
    """The divisor of a mean that the loss itself has computed."""

    weight: Any
    contributes: Any  # whether anything counts: weights of both signs may cancel
    total: Any = None  # the sum that the mean would have divided, if it is taken for 0 when the weights cancel


class Weighing:
    """Builds the terms of losses, in one framework.

    `as_floats` is the code that error messages suggest for converting `weights` to floats.
    """

    call: Callable[[Any, Any], Any] = staticmethod(call_model)  # (model, inputs) -> outputs

    def __init__(self, ops: "ArrayOps", as_floats: str, call: Callable[[Any, Any], Any] | None = None) -> None:
        self.ops = ops
        self.as_floats = as_floats
        if call is not None:
            self.call = call

    # -- what the script gave as loss

    def weigh_objective(
        self,
        objective: Objective,
        model: Any,
        batch: Any,
        share: Share,
        function: Callable[[Any, Any], Any] | None = None,
    ) -> Term:
        """Returns the term of an objective: a mean, a sum, or one of them with metrics.

        `function` is a compiled form of the objective's own.
        """
        loss, values, carried = objective.compute(model, batch, function)
        if carried is not None:
            self._check_carried(carried, share)
        if isinstance(loss, Sum):
            return self.sum(loss, share, values=values, carried=carried)
        if not self.is_mean(loss, share):
            raise ModelError(
                "An objective must return the shard's mean loss as an array, one loss per example, "
                "lockstep.Sum(total, count), or (one of these, {name: value}). "
                f"Got {describe(loss)} for a shard of {share.examples}."
            )
        return self.mean(loss, share, values=values, carried=carried)

    def _check_carried(self, carried: Any, share: Share) -> None:
        """Raises ModelError unless the state has one row for each example of the shard."""
        found = list(leaves(carried))
        if not found or not all(
            self.ops.is_array(each) and tuple(each.shape)[:1] == (share.examples,) for each in found
        ):
            raise ModelError(
                "The state of a lockstep.Carried must be an array, or a tuple or dict of arrays, with one row per "
                f"example on axis 0. Got {describe(carried)} for a shard of {share.examples}. Swap the axes of a state "
                "with its examples elsewhere, for example (layers, examples, width) to (examples, layers, width), and "
                "swap them back where the objective reads it."
            )

    def weigh_model(self, model: Any, batch: Any, share: Share) -> Term:
        """Calls the model with one shard, and returns the term of the loss that is in the model's output."""
        loss, rest = self.find_model_loss(self.call(model, batch), batch, share)
        return self.mean(loss, share, **rest)

    def find_model_loss(self, outputs: Any, batch: Any, share: Share) -> tuple[Any, dict[str, Any]]:
        """Returns the loss in a model's output, and the logits and labels that the metrics compare.

        If the output has no logits, the metrics get the whole output instead.
        """
        named = isinstance(outputs, Mapping)
        loss: Any = outputs.get("loss") if named else getattr(outputs, "loss", None)
        if not self.ops.is_array(loss):
            raise ModelError(
                "Without a loss in wrap, the model's output must have the loss as `.loss`. "
                f"Got {describe(outputs)}. Give wrap a loss, or return an output with `.loss`."
            )
        if not self.is_mean(loss, share):
            raise ModelError(
                "The loss in a model's output must be one number, or one per example. "
                f"Got shape {tuple(loss.shape)} for a shard of {share.examples}. Return its mean."
            )
        logits = outputs.get("logits", outputs) if named else getattr(outputs, "logits", outputs)
        return loss, {"outputs": logits, "targets": batch.get("labels") if isinstance(batch, Mapping) else None}

    def compare(self, criterion: Criterion, model: Any, batch: Any, share: Share) -> Term:
        """Returns the term of a loss of (outputs, targets), with example weights if the batch has them."""
        inputs, targets, weights = split_batch(batch, self.as_floats)
        try:
            outputs = self.call(model, inputs)
        except TypeError as error:
            explain_missing_input(error, batch)
            raise
        criterion.check(outputs, targets, share.examples)
        labels = None
        # Before the loss, unless the loss itself refuses them: a GPU's kernel would end the process's context.
        if not criterion.refuses_labels(targets):
            labels = self._check_labels(criterion, outputs, targets)
        try:
            term = criterion.weigh(self, outputs, targets, weights, share)
        except Exception:
            self._check_labels(criterion, outputs, targets)  # a clearer error than the loss's own
            raise
        term.outputs, term.targets, term.labels, term.is_own = outputs, targets, labels, criterion.is_own
        return term

    def _check_labels(self, criterion: Criterion, outputs: Any, targets: Any) -> Labels | None:
        """Returns which labels are valid, if the targets are labels; raises if a label is known and not valid."""
        labels = criterion.find_labels(outputs, targets)
        if labels is not None and (found := self.ops.to_host(targets)) is not None:
            check_labels(found, *labels)
        return labels

    def weigh_outputs(self, criterion: Criterion, outputs: Any, targets: Any, weights: Any, share: Share) -> Term:
        """Returns the term of a loss of these outputs and targets; `weights` is None or has one number per example."""
        if weights is not None:
            return self._weigh_examples(criterion, outputs, targets, weights, share)
        counted = None if criterion.is_sum else criterion.count(targets)
        if counted is not None:
            contributes: Any = True
            if not criterion.adds_nothing_uncounted:
                contributes = self.ops.any_nonzero(criterion.find_contributing(targets, counted))
            return self.pair(criterion.compute_sum(outputs, targets), self.ops.total(counted), share, contributes)
        value = read_sum(criterion.compute(outputs, targets))
        if isinstance(value, Sum):
            return self.sum(value, share)
        if not self.is_mean(value, share):
            raise ModelError(
                "A loss must return one number, one per example, or lockstep.Sum(total, count). "
                f"Got {describe(value)} for a shard of {share.examples}."
            )
        if criterion.is_sum or share.summed:
            return self.sum(Sum(value), share)
        return self.mean(value, share)

    def _weigh_examples(self, criterion: Criterion, outputs: Any, targets: Any, weights: Any, share: Share) -> Term:
        """Returns the term of a weighted mean: the weighted sum over the sum of the weights."""
        ops = self.ops
        weights = check_example_weights(ops, weights, share.examples)
        values = criterion.compute_each(outputs, targets)
        if not ops.is_array(values) or tuple(values.shape)[:1] != (share.examples,):
            raise ModelError(
                f"Example weights need a loss that gives one value per example. Got {describe(values)} for a shard of "
                f"{share.examples}. Return one value per example, or write an objective that returns "
                "lockstep.Sum(total, count)."
            )
        weights = ops.reshape(ops.double(weights), (share.examples,))
        column = ops.as_column(weights, values)
        counted = None if criterion.is_sum else criterion.count(targets)
        if criterion.is_sum or counted is not None:
            total = ops.total(values * ops.cast_like(column, values))
        else:
            total = ops.total(ops.average_rows(values, share.examples) * ops.cast_like(weights, values))
        if criterion.is_sum:
            return self.sum(Sum(total), share)
        if counted is None:
            return self.pair(total, ops.total(weights), share, ops.any_nonzero(weights))
        contributing = criterion.find_contributing(targets, counted) * column
        return self.pair(total, ops.total(counted * column), share, ops.any_nonzero(contributing))

    # -- the ways in which losses weigh

    def mean(self, value: Any, share: Share, **rest: Any) -> Term:
        """Returns the term of a mean over the shard's examples.

        If the loss has a shorter type than the sum of the gradients, multiplying the loss would round it; then the
        gradient is multiplied instead.
        """
        value = self.ops.average(value) if self.ops.shape(value) else value
        if share.alone or self.ops.is_short(value):
            factor = None if share.alone else share.fraction
            return Term(value, value, share.examples, times=share.examples, gradient_factor=factor, **rest)
        return Term(self.ops.scale(value, share.fraction), value, share.examples, times=share.examples, **rest)

    def sum(self, loss: Sum, share: Share, **rest: Any) -> Term:
        """Returns the term of a sum, which is divided only if it has a count."""
        if loss.count is None:
            return Term(loss.total, loss.total, 0.0, **rest)
        return self.pair(loss.total, loss.count, share, **rest)

    def pair(self, value: Any, weight: Any, share: Share, contributes: Any = None, **rest: Any) -> Term:
        """Returns the term of a sum with its divisor; `contributes` says whether anything in the shard counts.

        A shard is left out only if nothing in it counts. A divisor of 0 does not show this: weights of both signs may
        cancel, and label smoothing gives a loss to targets whose class has weight 0. If `contributes` is None, a shard
        with divisor 0 is left out only if its sum is 0 or not finite. A batch whose weights sum to 0 is refused later.
        """
        ops = self.ops
        number = ops.as_weight(weight)
        if share.alone:
            nonzero = number != 0
            loss, divided = ops.where(nonzero, value, 0), ops.double(number == 0)
            return Term(ops.divide(value, weight), loss, number, divided, contributes=nonzero, **rest)
        if contributes is None:
            contributes = number != 0
            if contributes is not True:  # a framework that has the number on the host need not wait for the value
                contributes = contributes | ops.is_finite_nonzero(value)
        return Term(value, ops.where(contributes, value, 0), number, 1.0, contributes=contributes, **rest)

    def own_mean(self, value: Any, counted: Counted, share: Share, **rest: Any) -> Term:
        """Returns the term of a mean whose divisor is not the number of examples but `counted.weight`."""
        ops = self.ops
        number = ops.as_weight(counted.weight)
        nonzero = number != 0
        if share.alone:
            loss = ops.double(value)
            loss = ops.where(nonzero, loss * ops.cast_like(number, loss), 0)
            return Term(value, loss, number, ops.double(number == 0), contributes=nonzero, **rest)
        total = value * ops.cast_like(number, value)
        if counted.total is not None:
            total = ops.where(nonzero, total, ops.cast_like(counted.total, value))
        loss = ops.where(counted.contributes, total, 0)
        return Term(total, loss, number, 1.0, contributes=counted.contributes, **rest)

    def is_mean(self, value: Any, share: Share) -> bool:
        """Returns whether this is one number, or one row per example."""
        return self.ops.is_array(value) and self.ops.shape(value)[:1] in ((), (share.examples,))
