"""Shards: one shard's forward and backward pass, and the leaf it leaves behind.

Every shard starts from the same parameters and statistics and from a seed of its
own. All of it is only told to the engine, which has a thread for each context; the
host waits once a step, for the sums. So the loss of a shard is kept until then, to
name the shard whose loss is not a number.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd, nd

from lockstep.backends.base import Work
from lockstep.backends.mxnet import array_ops, arrays, losses, settings
from lockstep.backends.mxnet.flat_vectors import Marks, Vectors
from lockstep.backends.mxnet.inputs import call, host, put
from lockstep.backends.mxnet.replicas import Replicas
from lockstep.core import seeds
from lockstep.core.batches import count, transform
from lockstep.core.metrics import FIRST_METRIC, LOSS, Metric, Sums
from lockstep.core.objective import Objective
from lockstep.core.outputs import ShardOutputs
from lockstep.core.shard_sums import ShardNames, check_room, find_room, measure
from lockstep.core.weighing import Share, Term
from lockstep.errors import LockstepError, ModelError, NonFiniteError


class Shards:
    """Computes shards of one block, each on the context it is given."""

    def __init__(self, block: Any, loss: Any, chosen: list[Metric], outputs: ShardOutputs) -> None:
        self._block = block
        self._loss = loss
        self._kept_outputs = outputs
        self._term = losses.choose_term(loss)
        self._compares = loss is not None and not isinstance(loss, Objective)
        self._metrics = chosen
        self._room = FIRST_METRIC + find_room(chosen, loss)
        self.names = ShardNames()
        self.begin(wide=False, seeded=True)

    @property
    def num_sums(self) -> int:
        """Room for the sums of one shard."""
        return self._room

    def begin(self, wide: bool, seeded: bool, narrow: frozenset[int] = frozenset()) -> None:
        """Forgets the shards of the step before.

        `wide`: the block computes in float64. `seeded`: shards may draw. `narrow`: the
        variables, by their place, whose gradients are added in a wider type than their own.
        """
        self._wide = wide
        self._narrow = narrow
        self.seeded = seeded
        self.reached: set[int] = set()  # the parameters that some shard's gradient has reached, by their place
        self._losses: list[tuple[int, Any]] = []
        self._form: tuple[Any, ...] | None = None
        self.names.begin()

    @property
    def per_example(self) -> bool:
        """Whether the gradient of this step is a sum over examples, which the update divides."""
        return self._form is not None and self._form[1]

    def leaf(self, work: Work, shard: int, piece: Any, variables: Sequence[Any], leaf: Vectors) -> Share:
        """Writes gradient and sums of one shard; the gradients of `variables` go straight into the leaf."""
        context = leaf.context
        share = _share(work, piece, work.num_shards == 1)
        targets = leaf.gradients
        if self._narrow:
            targets = [
                nd.empty(variable.shape, context, variable.dtype) if index in self._narrow else gradient
                for index, (variable, gradient) in enumerate(zip(variables, targets, strict=True))
            ]
            Marks(targets)(variables)
        else:
            leaf.mark(variables)
        with self._alone(work, shard, context):
            batch = self._put(piece, context, self._wide)
            with autograd.record():
                term = self._term(self._block, batch, share)
            if self._wide and term.per_example:  # gluon's rescale_grad is a float32 number, too coarse here
                term = replace(term, divided=1.0, per_example=False)
            self._keep(work, shard, term, share)
            values = self._measure(term, share)
            self._losses.append((shard, values[0]))
            if not term.contributes:
                leaf.clear()
            else:
                with _differentiated():
                    autograd.backward([term.root])
                self._finish(variables, targets, leaf.gradients)
            self._write(values, leaf.sums, context)
        return share

    def _finish(self, variables: Sequence[Any], targets: Sequence[Any], gradients: Sequence[Any]) -> None:
        """Brings the gradient of every parameter into the leaf; one that was not reached counts as zero."""
        for index, variable in enumerate(variables):
            if not variable._fresh_grad:
                nd.zeros_like(gradients[index], out=gradients[index])
                continue
            self.reached.add(index)
            if index in self._narrow:
                nd.cast(targets[index], dtype=gradients[index].dtype, out=gradients[index])

    def _measure(self, term: Term, share: Share) -> list[Any]:
        """[loss, weight, divided, metric sums ...] of one shard: numbers, and vectors on its context."""
        parts, columns = measure(array_ops, self._metrics, term, share.examples)
        self.names.add(columns)
        self._check_form(term)
        return array_ops.list_values(parts)

    def _check_form(self, term: Term) -> None:
        """Raise if this shard's loss has another form than those of the shards before."""
        form = (term.divided, term.per_example)
        if self._form not in (None, form):
            raise ModelError(
                "A loss has one form for every shard. Got a mean in one and a sum in another. Return one of them."
            )
        self._form = form

    def _write(self, values: list[Any], out: Any, context: Any) -> None:
        """Writes the sums of one shard, end to end, in one operator."""
        num_sums = FIRST_METRIC + sum(column.width for column in self.names.columns)
        check_room(num_sums - FIRST_METRIC, self._room - FIRST_METRIC)
        part = out if num_sums == self._room else arrays.view(out, 0, num_sums)
        nd.concat(*arrays.joined(values, context), dim=0, out=part)

    def check_finite(self, sums: Sums, step: int) -> None:
        """Raises where the sum of the losses is not a number, naming the first shard at fault."""
        if np.isfinite(sums[LOSS]) or not self._losses:
            return
        for shard, value in sorted(self._losses, key=lambda each: each[0]):
            number = float(value.asscalar()) if arrays.is_array(value) else float(value)
            if not np.isfinite(number):
                raise NonFiniteError.at(step, shard, number)
        raise NonFiniteError.at(step, self._losses[0][0], float(sums[LOSS]))

    def _put(self, piece: Any, context: Any, wide: bool) -> Any:
        """The batch on the context; example weights stay on the host, where they are added up in float64."""
        batch = put(piece, context, wide)
        if self._compares and isinstance(piece, tuple) and len(piece) == 3:
            return (*batch[:2], host(piece[2]))
        return batch

    def _keep(self, work: Work, shard: int, term: Term, share: Share) -> None:
        if self._kept_outputs.wanted:
            outputs, targets = (transform(each, arrays.detached) for each in (term.outputs, term.targets))
            self._kept_outputs.keep(work, shard, outputs, targets, share.examples)

    # -- forward only

    def show(self, work: Work, replicas: Replicas) -> None:
        """Runs the loss of the first shard once, so that the block learns its shapes from it."""
        shard = min(work.shards)
        piece, context = work.shards[shard], replicas.contexts[0]
        share = _share(work, piece, alone=False)
        with context:
            self._term(replicas.block, self._put(piece, context, replicas.wide()), share)

    def sums(self, work: Work, shard: int, piece: Any, context: Any) -> Any:
        """The sums of one shard on its context, without training."""
        share = _share(work, piece, alone=False)
        with self._alone(work, shard, context):
            batch = self._put(piece, context, self._wide)
            term = self._term(self._block, batch, share)
            self._keep(work, shard, term, share)
            values = self._measure(term, share)
            out = nd.zeros((self._room,), ctx=context, dtype="float64")
            self._write(values, out, context)
        return out

    def loss(self, outputs: Any, targets: Any, context: Any) -> float | None:
        """The loss of outputs and targets in numpy; None if it gives more than one number."""
        with context:
            value = self._loss(put(outputs, context, wide=True), put(targets, context, self._wide))
        return float(host(value).item()) if arrays.is_array(value) and value.size == 1 else None

    def outputs(self, work: Work, shard: int, piece: Any, context: Any) -> Any:
        """The block's outputs for one shard's inputs, on its context."""
        with self._alone(work, shard, context):
            return call(self._block, put(piece, context, self._wide))

    @contextmanager
    def _alone(self, work: Work, shard: int, context: Any) -> Iterator[None]:
        """The shard's own seed, its context, and errors that name it."""
        if self.seeded:
            settings.seed(seeds.shard(work.seed, work.step, shard), context)
        try:
            with context:
                yield
        except LockstepError:
            raise
        except Exception as error:
            error.add_note(f"In shard {shard} of step {work.step}.")
            raise


def _share(work: Work, piece: Any, alone: bool) -> Share:
    examples = count(piece)
    return Share(examples, examples / work.num_examples, alone, work.summed)


@contextmanager
def _differentiated() -> Iterator[None]:
    """Says what is missing where MXNet finds no way back from the loss."""
    try:
        yield
    except mx.MXNetError as error:
        if "not in a computational graph" not in str(error):
            raise
        raise ModelError(
            "A loss depends on parameters that are trained. Got one that has no gradient. "
            "Compute it from the block's outputs, outside autograd.pause() and without asnumpy()."
        ) from None
