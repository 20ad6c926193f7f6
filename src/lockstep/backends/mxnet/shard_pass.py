"""Computes one shard's forward and backward pass.

Every shard starts from the same parameters and running statistics, and from its own seed. The passes are only queued in
MXNet's engine, which has a thread for each context; the host waits once per step, for the shards' sums.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd, nd

from lockstep.backends.mxnet import array_ops, arrays, losses, settings
from lockstep.backends.mxnet.flat_vectors import ContextVectors, GradientTargets
from lockstep.backends.mxnet.inputs import call, put, to_numpy
from lockstep.backends.mxnet.replicas import Replicas
from lockstep.core import seeds
from lockstep.core.batches import transform
from lockstep.core.metrics import FIRST_METRIC, Metric, Sums
from lockstep.core.objective import Objective
from lockstep.core.outputs import ShardOutputs, select_outputs
from lockstep.core.shard_sums import ShardNames, Summand, check_loss, find_room, measure, pad
from lockstep.core.types import Work
from lockstep.core.weighing import Share, Term
from lockstep.errors import LockstepError, ModelError


class MxnetShardRunner:
    """Computes shards of one block, each on a given context."""

    def __init__(self, block: Any, loss: Any, chosen: list[Metric], outputs: ShardOutputs) -> None:
        self._block = block
        self._loss = loss
        self._outputs = outputs
        self._term = losses.choose_term(loss)
        self._compares = loss is not None and not isinstance(loss, Objective)
        self._metrics = chosen
        self.num_sums = FIRST_METRIC + find_room(chosen, loss)  # the length of a shard's vector of sums
        self.names = ShardNames()
        self.begin(wide=False, seeded=True)

    def begin(self, wide: bool, seeded: bool, narrow: frozenset[int] = frozenset()) -> None:
        """Starts a new command, and drops the results of the last command.

        `wide`: the block computes in float64. `seeded`: a shard may draw random numbers, so each shard is seeded.
        `narrow`: the indices of the variables whose gradients are added in a wider dtype than their own.
        """
        self._wide = wide
        self._narrow = narrow
        self.seeded = seeded
        self.reached: set[int] = set()  # indices of the parameters for which some shard had a gradient
        self._parts: dict[int, list[Summand]] = {}  # each shard's sums, which the engine may still be computing
        self._loss_form: tuple[Any, ...] | None = None
        self.names.begin()

    @property
    def per_example(self) -> bool:
        """Whether the gradient of this step is a sum over examples, which the update divides."""
        return self._loss_form is not None and self._loss_form[1]

    def train(self, work: Work, shard: int, piece: Any, variables: Sequence[Any], leaf: ContextVectors) -> Share:
        """Computes one shard in training mode, and writes its gradient with respect to `variables` to `leaf`."""
        context = leaf.context
        share = _make_share(work, shard, work.num_shards == 1)
        targets = leaf.gradients
        if self._narrow:
            targets = [
                nd.empty(variable.shape, context, variable.dtype) if index in self._narrow else gradient
                for index, (variable, gradient) in enumerate(zip(variables, targets, strict=True))
            ]
            GradientTargets(targets).attach(variables)
        else:
            leaf.targets.attach(variables)
        with self._isolate(work, shard, context):
            batch = self._put(piece, context, self._wide)
            with autograd.record():
                term = self._term(self._block, batch, share)
            if self._wide and term.per_example:  # gluon's rescale_grad is float32, too coarse here
                term.divided, term.per_example = 1.0, False
            self._keep_outputs(work, shard, term, share)
            self._measure(shard, term, share)
            if not term.contributes:
                leaf.clear()
            else:
                with _explain_missing_gradient():
                    autograd.backward([term.root])
                self._collect_gradients(variables, targets, leaf.gradients)
        return share

    def _collect_gradients(self, variables: Sequence[Any], targets: Sequence[Any], gradients: Sequence[Any]) -> None:
        """Completes `gradients` after the backward pass, which writes directly to most of them.

        A variable on which the loss does not depend gets zeros. A gradient that is added in a wider dtype than its own
        is converted from `targets`.
        """
        for index, variable in enumerate(variables):
            if not variable._fresh_grad:
                nd.zeros_like(gradients[index], out=gradients[index])
                continue
            self.reached.add(index)
            if index in self._narrow:
                nd.cast(targets[index], dtype=gradients[index].dtype, out=gradients[index])

    def _measure(self, shard: int, term: Term, share: Share) -> None:
        """Stores copies of a shard's [loss, weight, divided, metric sums ...]: later passes may write to the arrays."""
        parts, columns = measure(array_ops, self._metrics, term, share.examples)
        self.names.add(columns)
        self._check_form(term)
        self._parts[shard] = [Summand(arrays.copy_double(value), times) for value, times in parts]

    def _check_form(self, term: Term) -> None:
        """Raises ModelError if this shard's loss is a mean and an earlier shard's loss a sum, or the reverse."""
        form = (term.divided, term.per_example)
        if self._loss_form not in (None, form):
            raise ModelError(
                "The loss is a mean for one shard and a sum for another. Return a mean, or a sum, for every shard."
            )
        self._loss_form = form

    def read_sums(self) -> dict[int, Sums]:
        """Waits for the sums, and returns each shard's vector of sums."""
        return {shard: self._read_row(shard) for shard in sorted(self._parts)}

    def read_finite_sums(self, step: int) -> dict[int, Sums]:
        """Returns each shard's vector of sums; raises if a loss is not finite, and names the first such shard."""
        rows = self.read_sums()
        for shard, row in rows.items():
            check_loss(row, step, shard)
        return rows

    def _read_row(self, shard: int) -> Sums:
        values = [np.ravel(array_ops.to_host(value)) * times for value, times in self._parts[shard]]
        return pad(np.concatenate(values), self.num_sums)

    def copy_results(self, shard: int, leaf: ContextVectors) -> list[Any]:
        """Returns what a pass has computed, in numpy: the vectors of the shard's partial sum, and its sums."""
        return [*(vector.asnumpy() for vector in leaf.values()), self._read_row(shard)]

    def _put(self, piece: Any, context: Any, wide: bool) -> Any:
        """Copies the batch to the context. Example weights stay on the host, which adds them in float64."""
        batch = put(piece, context, wide)
        if self._compares and isinstance(piece, tuple) and len(piece) == 3:
            return (*batch[:2], to_numpy(piece[2]))
        return batch

    def _keep_outputs(self, work: Work, shard: int, term: Term, share: Share) -> None:
        found = transform(select_outputs(term, self._outputs.wanted), arrays.detach)
        self._outputs.keep(work, shard, found, share.examples)

    # -- forward only

    def infer_shapes(self, work: Work, replicas: Replicas) -> None:
        """Computes the loss of the first shard, so that parameters without a shape get their shape from its inputs."""
        shard = min(work.shards)
        piece, context = work.shards[shard], replicas.contexts[0]
        share = _make_share(work, shard, alone=False)
        with context:
            self._term(replicas.block, self._put(piece, context, replicas.is_double()), share)

    def evaluate(self, work: Work, shard: int, piece: Any, context: Any) -> None:
        """Computes the loss and metrics of one shard on its context, in evaluation mode."""
        share = _make_share(work, shard, alone=False)
        with self._isolate(work, shard, context):
            term = self._term(self._block, self._put(piece, context, self._wide), share)
            self._keep_outputs(work, shard, term, share)
            self._measure(shard, term, share)

    def compute_loss(self, outputs: Any, targets: Any, context: Any) -> float | None:
        """Returns the loss of numpy outputs and targets; None if the loss is not a scalar."""
        with context:
            value = self._loss(put(outputs, context, wide=True), put(targets, context, self._wide))
        return float(to_numpy(value).item()) if arrays.is_array(value) and value.size == 1 else None

    def predict(self, work: Work, shard: int, piece: Any, context: Any) -> Any:
        """Computes the block's outputs for one shard's inputs, in evaluation mode on the shard's context."""
        with self._isolate(work, shard, context):
            return call(self._block, put(piece, context, self._wide))

    @contextmanager
    def _isolate(self, work: Work, shard: int, context: Any) -> Iterator[None]:
        """Opens a context with the shard's seed and MXNet context; errors inside get a note that names the shard."""
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


def _make_share(work: Work, shard: int, alone: bool) -> Share:
    examples = work.count(shard)
    return Share(examples, examples / work.num_examples, alone, work.summed)


@contextmanager
def _explain_missing_gradient() -> Iterator[None]:
    """Replaces MXNet's error for a loss without a graph by an error that says what to change."""
    try:
        yield
    except mx.MXNetError as error:
        if "not in a computational graph" not in str(error):
            raise
        raise ModelError(
            "The loss does not depend on any parameter that is trained, so it has no gradient. "
            "Compute the loss from the block's outputs, outside autograd.pause() and without asnumpy()."
        ) from None
