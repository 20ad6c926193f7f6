"""Shards: one shard's forward and backward pass, and the leaf it leaves behind.

Every shard starts from the same parameters and buffers and from a seed of its
own, and nothing it does is seen by the next.
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lockstep.backends.base import Node, Work
from lockstep.backends.torch import array_ops, losses, rng, settings
from lockstep.backends.torch.attribute_guard import Kept
from lockstep.backends.torch.buffers import Statistics, of_loss, writes
from lockstep.backends.torch.compiled_code import check_compiled, name_modules
from lockstep.backends.torch.gradients import copy_gradients, real
from lockstep.backends.torch.inputs import copied, put
from lockstep.backends.torch.loss_scaler import cast_parameters, power_of_two
from lockstep.backends.torch.model_loss import ModelLoss
from lockstep.backends.torch.parameter_guard import ParameterGuard
from lockstep.backends.torch.replica import Replica
from lockstep.core import seeds
from lockstep.core.batch_entries import call_model
from lockstep.core.batches import count, transform
from lockstep.core.layout import Layout
from lockstep.core.metrics import DIVIDED, FIRST_METRIC, WEIGHT, Column, Metric, Sums
from lockstep.core.options import Options
from lockstep.core.outputs import ShardOutputs
from lockstep.core.shard_sums import NUM_CHECKS, ShardNames, check_loss, find_room, measure, pad
from lockstep.core.weighing import Share, Term
from lockstep.errors import BatchError, ExactError, ModelError

Value = TypeVar("Value")


def accumulated(tensor: Tensor) -> str:
    """The type in which leaves of this tensor are added: float64 stays, smaller floats are added in float32."""
    if not tensor.is_floating_point() and not tensor.is_complex():
        return "int64"
    return "float64" if tensor.dtype in (torch.float64, torch.complex128) else "float32"


class Fields:
    """The arrays of one node, as views of its vectors."""

    def __init__(self, layout: Layout, node: Node, num_trained: int) -> None:
        views = [
            node[field.dtype][field.offset : field.offset + field.size].view(field.shape) for field in layout.fields
        ]
        self.gradients: list[Tensor] = views[:num_trained]
        self.buffers: list[Tensor] = views[num_trained:-2]
        self.there: Tensor = views[-2]
        self.sums: Tensor = views[-1]
        self.all: list[Tensor] = views


class Shards:
    """Computes the shards of one replica."""

    def __init__(
        self, replica: Replica, loss: Any, chosen: list[Metric], options: Options, outputs: ShardOutputs
    ) -> None:
        self._replica = replica
        self._term = ModelLoss() if loss is None else losses.choose_term(loss)
        self._reading, self._begun = "", False
        self._metrics = chosen
        self._kept_outputs = outputs
        self._precision = options.precision
        self._room = find_room(chosen, loss)
        own = list(loss.modules()) if isinstance(loss, nn.Module) else []
        if options.exact:
            check_compiled(replica.model, replica.optimizer, loss, chosen)
        self.statistics = Statistics([*replica.buffers, *of_loss(loss)], [*replica.modules, *filter(writes, own)])
        self._kept = Kept(name_modules(replica.model, loss), loss) if options.exact else Kept({})
        roots = (replica.model, *([loss] if isinstance(loss, nn.Module) else []))
        self._guard = ParameterGuard(*roots) if options.exact else ParameterGuard()
        self.names = ShardNames()

    @property
    def columns(self) -> Sequence[Column]:
        """The metrics of the last shard computed."""
        return self.names.columns

    def begin(self) -> None:
        """A new command, whose shards may have other metrics."""
        self.names.begin()
        self._begun = False

    def layout(self, trained: Mapping[str, Tensor]) -> Layout:
        """Gradients first, then buffers, the flags that tell which of both were there, and the sums."""
        buffers = self.statistics.averaged
        return Layout.build(
            [(name, accumulated(tensor), tuple(real(tensor).shape)) for name, tensor in trained.items()],
            [
                *((buffer.name, accumulated(buffer.tensor), tuple(buffer.tensor.shape)) for buffer in buffers),
                ("there", "int64", (len(trained) + len(buffers),)),
                ("sums", "float64", (FIRST_METRIC + self._room + NUM_CHECKS,)),
            ],
        )

    def leaf(self, work: Work, shard: int, piece: Any, trained: list[Tensor], fields: Fields, scale: float) -> None:
        """Writes the leaf of one shard."""
        if not self._begun:
            self._kept.keep(training=True)
            self._guard.keep(work.num_shards, training=True)
            self._reading, self._begun = "", True
        for _ in self._kept.passes(lambda: fields.all):
            self._write(work, shard, piece, trained, fields, scale)
        if shard == max(work.shards):
            self._guard.check()
            self._kept.check()

    def _write(self, work: Work, shard: int, piece: Any, trained: list[Tensor], fields: Fields, scale: float) -> None:
        self.clear()
        term, share = self._forward(work, shard, piece, alone=work.num_shards == 1)
        if term.reading and self._reading not in ("", term.reading):
            raise _other_readings()
        self._reading = term.reading or self._reading
        sums = self._measure(term, share.examples)
        scaled = self._precision == "fp16"
        if not scaled:  # else the scaler leaves such an update out
            check_loss(sums, work.step, shard)
        factor = term.gradient_factor or 1.0
        whole = abs(sums[WEIGHT]) * work.num_examples / share.examples if sums[DIVIDED] else 1.0
        shrunk = power_of_two(whole / factor or work.num_examples) if scaled else 1.0
        cast: Container[int] = ()
        if bool(term.contributes):
            cast = cast_parameters(term.root) if scaled and not share.alone else ()
            with _explained(work, shard):
                _check(term.root)
                times = scale / shrunk
                (term.root if times == 1.0 else term.root * times).backward()
        there = copy_gradients(trained, fields.gradients, factor * shrunk, cast)
        there += self.statistics.collect(fields.buffers, None if share.alone else share.fraction, first=shard == 0)
        fields.there.copy_(torch.tensor(there))
        fields.sums.copy_(torch.from_numpy(pad(sums, len(fields.sums), self._checks(term.reading))))

    def sums(self, work: Work, shard: int, piece: Any) -> Tensor:
        """The sums of one shard, without training."""

        def compute() -> Tensor:
            term, share = self._forward(work, shard, piece, alone=False)
            return torch.from_numpy(self._measure(term, share.examples))

        return self._unseen(compute, lambda sums: [sums], work.num_shards)

    def outputs(self, work: Work, shard: int, piece: Any) -> Any:
        """The model's outputs for one shard's inputs."""

        def compute() -> Any:
            with self._alone(work, shard):
                return call_model(self._replica.model, put(piece, self._replica.device))

        return self._unseen(compute, flat, work.num_shards)

    def loss(self, criterion: Any, outputs: Any, targets: Any) -> float | None:
        """The criterion's value for outputs and targets in numpy; None if it gives more than one number."""
        device = self._replica.device
        with self._kept.restored(), settings.precise(self._precision, device):
            try:
                value = criterion(put(outputs, device), put(targets, device))
            finally:
                self.statistics.restore()
        return float(value) if isinstance(value, Tensor) and not value.ndim else None

    def _unseen(self, compute: Callable[[], Value], results: Callable[[Value], list[Tensor]], num_shards: int) -> Value:
        """Afterwards the buffers are as they were kept, for a module may count its calls in evaluation too."""

        values: list[Value] = []
        self._kept.keep(training=False)
        self._guard.keep(num_shards, training=False)
        for _ in self._kept.passes(lambda: results(values[-1])):
            try:
                values.append(compute())
            finally:
                self.statistics.restore()
        self._guard.check()
        self._kept.check()
        return values[0]

    def clear(self) -> None:
        """Forgets gradients, as `zero_grad` does, also those of parameters that the optimizer does not hold."""
        for parameter in self._replica.parameters.values():
            parameter.grad = None

    def _forward(self, work: Work, shard: int, piece: Any, alone: bool) -> tuple[Term, Share]:
        examples = count(piece)
        share = Share(examples, examples / work.num_examples, alone, work.summed)
        with self._alone(work, shard):
            term = self._term(self._replica.model, put(piece, self._replica.device), share)
        if self._kept_outputs.wanted:
            self._kept_outputs.keep(work, shard, copied(term.outputs), copied(term.targets), share.examples)
        return term, share

    @contextmanager
    def _alone(self, work: Work, shard: int) -> Iterator[None]:
        """The shard's own seed, the precision asked for, and errors that name the shard."""
        rng.seed(seeds.shard(work.seed, work.step, shard), self._replica.device)
        with _explained(work, shard), settings.precise(self._precision, self._replica.device):
            yield

    def _measure(self, term: Term, examples: int) -> Sums:
        """[loss, weight, divided, metric sums ...] of one shard, read once."""
        with torch.no_grad():
            parts, columns = measure(array_ops, self._metrics, term, examples)
        self.names.add(columns)
        sums: Sums = array_ops.join(parts, self._replica.device).cpu().numpy()
        return sums

    def check_names(self, sums: Sums) -> None:
        """Raise if a shard of another process has other metrics, or read the model's own loss otherwise."""
        if self._reading and self.names.begun and sums[-2] != self._checks(self._reading)[0] * sums[-1]:
            raise _other_readings()
        if not isinstance(self._term, ModelLoss):
            self.names.check(sums)

    def _checks(self, reading: str) -> list[float]:
        """What a shard's sums end with; zeros for a shard that does not tell how its loss is read."""
        return (
            [0.0, 0.0]
            if isinstance(self._term, ModelLoss) and not reading
            else self.names.checks(*filter(None, [reading]))
        )


def flat(outputs: Any) -> list[Tensor]:
    """The tensors of a nest."""
    found: list[Tensor] = []
    transform(outputs, lambda value: found.append(value) if isinstance(value, Tensor) else None)
    return found


def _other_readings() -> ModelError:
    return ModelError(
        "The losses of a batch's shards are one kind of mean. The model's own is a mean over other things in one shard "
        "than in another: over its labels that are not -100, or over its examples. Write an objective that returns "
        "lockstep.Sum(model(**batch).loss * count, count) with the count that you mean."
    )


def _check(root: Tensor) -> None:
    if root.ndim:
        raise ModelError(f"A loss is one number. Got shape {tuple(root.shape)}. Return its mean.")
    if not root.requires_grad:
        raise ModelError(
            "A loss depends on parameters that are trained. Got one that has no gradient. "
            "Compute it from the model's outputs, outside torch.no_grad()."
        )


@contextmanager
def _explained(work: Work, shard: int) -> Iterator[None]:
    """Says which shard an error came from, and what to do about those that the sharding brings."""
    try:
        yield
    except (ModelError, BatchError):
        raise
    except Exception as error:
        text = str(error)
        if "more than 1 value per channel" in text:
            raise BatchError(
                f"Batch norm needs more than one value per channel in every shard. Shard {shard} of step {work.step} "
                f"has too few examples: {work.num_examples} in {work.num_shards} shards. "
                "Use fewer shards, a larger batch, or leave the short last batch out."
            ) from error
        if "use_deterministic_algorithms(" in text:
            raise ExactError(
                "Equal bits need deterministic operations. "
                f"Got one that has no such form: {text.partition(' does not')[0]}. "
                "Replace it, or use lockstep.wrap(..., exact=False) to train without the promise."
            ) from error
        error.add_note(f"In shard {shard} of step {work.step}.")
        raise
