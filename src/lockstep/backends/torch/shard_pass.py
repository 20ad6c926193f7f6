"""Computes one shard's forward and backward pass, and writes its partial sum.

Every shard starts from the same parameters and buffers and from a seed of its own.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
from torch import Tensor, nn

from lockstep.backends.torch import gradients, rng, settings
from lockstep.backends.torch.attribute_guard import ModuleAttributeGuard
from lockstep.backends.torch.buffers import BufferAverages, find_loss_buffers, may_write_buffers
from lockstep.backends.torch.compiled_code import name_modules
from lockstep.backends.torch.flat_vectors import LeafArrays, choose_sum_type
from lockstep.backends.torch.inputs import copy_to_device, copy_to_host, find_tensors, view_as_tensors
from lockstep.backends.torch.loss_scaler import find_cast_parameters, find_power_of_two
from lockstep.backends.torch.parameter_guard import ParameterGuard
from lockstep.backends.torch.replica import Replica
from lockstep.backends.torch.shard_errors import build_reading_error, check_root, explain_error
from lockstep.backends.torch.shard_program import ShardProgram
from lockstep.backends.torch.shard_rows import ShardRows
from lockstep.core import seeds
from lockstep.core.batch_entries import call_model
from lockstep.core.layout import Layout
from lockstep.core.metrics import DIVIDED, FIRST_METRIC, WEIGHT, Column, Sums
from lockstep.core.objective import Objective
from lockstep.core.options import Options
from lockstep.core.outputs import Outputs, ShardOutputs, select_outputs
from lockstep.core.shard_sums import NUM_CHECKS, ShardNames, check_loss
from lockstep.core.types import Work
from lockstep.core.weighing import Share, Term
from lockstep.errors import ExactError

Value = TypeVar("Value")


class TorchShards:
    """Computes the shards of one replica.

    Work that is the same for all shards of a command is done once: call `begin`, `compute` for each shard,
    `check_guards`. Nothing is read from the device meanwhile, except under float16's loss scale.
    """

    def __init__(
        self, replica: Replica, loss: Any, program: ShardProgram, options: Options, outputs: ShardOutputs
    ) -> None:
        self._replica, self._program, self._kept_outputs = replica, program, outputs
        self._may_keep = outputs.wanted or isinstance(loss, Objective)  # only an objective returns carried state
        self._precision, self._room = options.precision, FIRST_METRIC + program.room
        own = list(loss.modules()) if isinstance(loss, nn.Module) else []
        self.statistics = BufferAverages(
            [*replica.buffers, *find_loss_buffers(loss)], [*replica.modules, *filter(may_write_buffers, own)]
        )
        named = name_modules(replica.model, loss) if options.exact else {}
        self._attribute_guard = ModuleAttributeGuard(named, loss, program.attribute_advice)
        roots = (replica.model, *([loss] if isinstance(loss, nn.Module) else []))
        self._parameter_guard = ParameterGuard(*roots) if options.exact else ParameterGuard()
        self._parameters = list(replica.parameters.values())
        self._positions = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        self._has_large = True  # whether a gradient is moved before the backward pass ends; of the last layout
        self.names = ShardNames()
        self._rows = ShardRows()
        self._seeds: dict[int, int] = {}
        self._readings: dict[int, str] = {}  # of the shards that tell how the model's own loss is read
        self._flags: dict[int, list[int]] = {}  # of each shard: which gradients there are, which buffers have changed

    @property
    def columns(self) -> Sequence[Column]:
        """The metrics of the last shard computed."""
        return self.names.columns

    def layout(self, trained: Mapping[str, Tensor]) -> Layout:
        """Returns a partial sum's layout: gradients, buffers; then the sums, with flags for both and a checksum."""
        buffers = self.statistics.averaged
        self._has_large = gradients.has_large(trained.values())
        return Layout.build(
            [(name, choose_sum_type(each), tuple(gradients.to_real(each).shape)) for name, each in trained.items()],
            [(buffer.name, choose_sum_type(buffer.tensor), tuple(buffer.tensor.shape)) for buffer in buffers],
            self._room + len(self._parameters) + len(buffers) + NUM_CHECKS,
        )

    def begin(self, work: Work, shards: Iterable[int], training: bool) -> None:
        """Starts a command for these shards: drops the last results, saves the buffers, derives the shards' seeds."""
        self.statistics.save()
        self.names.begin()
        self._rows, self._readings, self._flags = ShardRows(), {}, {}
        self._seeds = seeds.shards(work.seed, work.step, shards)
        self._attribute_guard.begin(training)
        self._parameter_guard.begin(work.num_shards, training)

    def abandon(self) -> None:
        """Restores the buffers and attributes that a failed command's passes have written."""
        self.statistics.restore()
        with suppress(ExactError):  # the first error says more
            self.check_guards()

    def check_guards(self) -> bool:
        """Raises ExactError if a pass has written parameters or attributes; returns whether attributes may differ."""
        self._parameter_guard.check()
        return self._attribute_guard.check()

    def compute(
        self, work: Work, shard: int, piece: Any, trained: list[Tensor], leaf: LeafArrays | None, scale: float
    ) -> LeafArrays:
        """Computes one shard and returns its gradients and buffers, in `leaf` or else where backward() has put them."""
        if not self._attribute_guard.repeats_passes:
            try:
                return self._compute(work, shard, piece, trained, leaf, scale)
            except Exception as error:
                explain_error(error, work, shard)
                raise
        arrays: LeafArrays | None = None

        def list_results() -> list[Tensor]:
            assert arrays is not None
            found = [gradient for gradient in arrays.gradients if gradient is not None]
            carried = view_as_tensors(self._kept_outputs.get_carried(shard))
            return [*found, *arrays.buffers, *self._rows.tensors(shard), *carried]

        for _ in self._attribute_guard.run_passes(list_results):
            try:
                arrays = self._compute(work, shard, piece, trained, leaf, scale)
            except Exception as error:
                explain_error(error, work, shard)
                raise
        assert arrays is not None
        return arrays

    def _compute(
        self, work: Work, shard: int, piece: Any, trained: list[Tensor], leaf: LeafArrays | None, scale: float
    ) -> LeafArrays:
        self.clear()
        term, share = self._forward(work, shard, piece, work.num_shards == 1)
        self._parameter_guard.accept_pass()
        if term.reading:
            if {*self._readings.values(), term.reading} != {term.reading}:
                raise build_reading_error()
            self._readings[shard] = term.reading
        self._measure(shard, term, share.examples)
        contributes = True if share.alone else term.contributes  # a batch without weight is refused as a whole
        if isinstance(contributes, Tensor) and contributes.is_cpu:
            contributes = bool(contributes)
        factor = term.gradient_factor or 1.0
        cast: Container[int] = ()
        moved: Container[int] = ()
        if contributes is not False:
            root = term.root
            check_root(root)
            if self._precision == "fp16":
                row = self._rows.select(shard).read(self._room)[shard]
                whole = abs(row[WEIGHT]) * work.num_examples / share.examples if row[DIVIDED] else 1.0
                shrunk = find_power_of_two(whole / factor or work.num_examples)
                cast = () if share.alone else find_cast_parameters(root)
                root, factor = root * (scale / shrunk), factor * shrunk
            if leaf is None or not self._has_large:
                gradients.run_backward(root)
            else:
                with gradients.move_large_gradients(trained, leaf.gradients) as moved:
                    gradients.run_backward(root)
        if leaf is None:
            arrays = LeafArrays(gradients.read_gradients(trained), self.statistics.allocate())
            flags = [int(gradient is not None) for gradient in arrays.gradients]
        else:
            arrays = leaf
            flags = gradients.copy_gradients(trained, leaf.gradients, factor, cast, moved)
            if isinstance(contributes, Tensor):  # the gradient of a shard without weight may be 0 / 0
                for gradient in leaf.gradients:
                    gradient.masked_fill_(~contributes, 0)
        fraction = None if share.alone else share.fraction
        changed = self.statistics.collect(arrays, fraction, first=shard == 0)
        if len(flags) < len(self._parameters):
            flags = self._spread(trained, flags)
        self._flags[shard] = [*flags, *changed]
        return arrays

    def read_sums(self, work: Work) -> dict[int, Sums]:
        """Returns each shard's vector of sums, flags and checksum; raises NonFiniteError if a loss is not finite."""
        rows = self._rows.read(self._room)
        checks = self._checks("")
        for shard, row in rows.items():
            if self._precision != "fp16":  # there the scaler leaves such an update out
                check_loss(row, work.step, shard)
            row += self._flags[shard]
            row += self._checks(self._readings[shard]) if shard in self._readings else checks
        return dict(zip(rows, np.array(list(rows.values()), np.float64), strict=True))

    def read_flags(self, sums: Sums, trained: list[Tensor]) -> tuple[list[float], list[float]]:
        """Returns the flags of the trained parameters' gradients, and of the buffers, where 0 means unchanged."""
        flags = sums[self._room : len(sums) - NUM_CHECKS].tolist()
        return [flags[self._positions[id(each)]] for each in trained], flags[len(self._parameters) :]

    def evaluate(self, work: Work, shard: int, piece: Any) -> Sums:
        """Returns the sums of loss and metrics of one shard, without a backward pass."""

        def compute() -> list[Tensor]:
            term, share = self._forward(work, shard, piece, alone=False)
            self._measure(shard, term, share.examples)
            return self._rows.tensors(shard)

        self._leave_no_trace(compute, lambda tensors: tensors, work, shard)
        return np.array(self._rows.read(self._room)[shard], np.float64)

    def predict(self, work: Work, shard: int, piece: Any) -> Any:
        """Returns the model's outputs for one shard's inputs."""

        def compute() -> Any:
            rng.seed_generators(self._seeds[shard], self._replica.device)
            with settings.use_precision(self._precision, self._replica.device):
                return call_model(self._replica.model, copy_to_device(piece, self._replica.device))

        return self._leave_no_trace(compute, find_tensors, work, shard)

    def judge(self, criterion: Any, outputs: Any, targets: Any) -> float | None:
        """Returns the criterion's value for outputs and targets in numpy; None if it is not one number."""
        device = self._replica.device
        with self._attribute_guard.preserve(), settings.use_precision(self._precision, device):
            try:
                value = criterion(copy_to_device(outputs, device), copy_to_device(targets, device))
            finally:
                self.statistics.restore()
        return float(value) if isinstance(value, Tensor) and not value.ndim else None

    def _leave_no_trace(
        self, compute: Callable[[], Value], results: Callable[[Value], list[Tensor]], work: Work, shard: int
    ) -> Value:
        """Returns what `compute` returns, and restores the buffers: a module may count its calls in evaluation, too."""
        values: list[Value] = []
        self._rows, self._seeds = ShardRows(), seeds.shards(work.seed, work.step, [shard])
        self._attribute_guard.begin(training=False)
        self._parameter_guard.begin(work.num_shards, training=False)
        for _ in self._attribute_guard.run_passes(lambda: results(values[-1])):
            try:
                values.append(compute())
            except Exception as error:
                explain_error(error, work, shard)
                raise
            finally:
                self.statistics.restore()
        self.check_guards()
        return values[0]

    def clear(self) -> None:
        """Removes gradients, as `zero_grad` does, also those of parameters that the optimizer does not have."""
        for parameter in self._parameters:
            parameter.grad = None

    def _forward(self, work: Work, shard: int, piece: Any, alone: bool) -> tuple[Term, Share]:
        examples = work.count(shard)
        share = Share(examples, examples / work.num_examples, alone, work.summed)
        device = self._replica.device
        rng.seed_generators(self._seeds[shard], device)
        batch = copy_to_device(piece, device)
        if not self._program.is_prepared:
            self._prepare(batch)
        if self._precision is None:
            term = self._program.compute(self._replica.model, batch, share)
        else:
            with settings.use_precision(self._precision, device):
                term = self._program.compute(self._replica.model, batch, share)
        if self._may_keep:
            found = select_outputs(term, self._kept_outputs.wanted)
            self._kept_outputs.keep(work, shard, Outputs(*map(copy_to_host, found)), share.examples)
        return term, share

    def _prepare(self, batch: Any) -> None:
        with rng.preserve(self._replica.device):  # else the first shard of each process would get other random numbers
            self._program.prepare(batch)
        self._attribute_guard.accept()

    def _measure(self, shard: int, term: Term, examples: int) -> None:
        """Stores [loss, weight, divided, metric sums ...] of one shard on the device."""
        parts, columns = self._program.measure(term, examples)
        self.names.add(columns)
        self._rows.add(shard, parts, term.is_mean)

    def _spread(self, trained: list[Tensor], flags: list[int]) -> list[int]:
        """Returns the flags of all parameters, 0 for frozen ones, so that a row of sums has one length."""
        result = [0] * len(self._parameters)
        for parameter, flag in zip(trained, flags, strict=True):
            result[self._positions[id(parameter)]] = flag
        return result

    def check_names(self, sums: Sums) -> None:
        """Raises ModelError if a shard of another process had other metrics, or its model's loss was another mean."""
        reading = next(iter(self._readings.values()), "")
        if reading and self.names.begun and sums[-2] != self._checks(reading)[0] * sums[-1]:
            raise build_reading_error()
        if not self._program.reads_model_loss:
            self.names.check(sums)

    def _checks(self, reading: str) -> list[float]:
        """Returns the checksum at the end of a shard's sums; zeros if the shard does not show how to read its loss."""
        return (
            [0.0, 0.0]
            if self._program.reads_model_loss and not reading
            else self.names.checks(*filter(None, [reading]))
        )
