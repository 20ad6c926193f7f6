"""The PyTorch backend: one replica, in this process, on one device."""

import functools
import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lockstep.backends.base import Recipe
from lockstep.backends.torch import array_ops, inputs, loaders, losses, pickling, rng, settings, train_mode
from lockstep.backends.torch.compiled_code import check_compiled, name_modules
from lockstep.backends.torch.flat_vectors import DeviceCopy, FlatVectors, LeafArrays, SingleLeaf, copy_to, create_scalar
from lockstep.backends.torch.gradients import clip_gradients, make_update, mark_nonzero, set_gradients
from lockstep.backends.torch.loss_references import LossReferences
from lockstep.backends.torch.loss_scaler import HALF, NUM_UPDATES, SCALE, LossScaler
from lockstep.backends.torch.replica import Replica
from lockstep.backends.torch.shard_compiler import ShardCompiler
from lockstep.backends.torch.shard_pass import TorchShards
from lockstep.backends.torch.shard_program import ShardProgram
from lockstep.backends.torch.state_arrays import to_array
from lockstep.core.averaged_state import AveragedArray
from lockstep.core.batches import transform
from lockstep.core.fold import Fold
from lockstep.core.layout import Layout
from lockstep.core.loss_reduction import Criterion
from lockstep.core.metrics import Column, Sums, resolve
from lockstep.core.named_metrics import NamedMetrics
from lockstep.core.outputs import ShardOutputs
from lockstep.core.shard_sums import ShardSums
from lockstep.core.tree import Span
from lockstep.core.types import Array, LazyState, PartialSum, Phases, State, Work


class TorchBackend:
    """One replica of a `torch.nn.Module`."""

    name = "torch"

    def __init__(self, recipe: Recipe, device: str, program: ShardProgram | None = None) -> None:
        self.devices: tuple[str, ...] = (device,)
        self._recipe, self._options = recipe, recipe.options
        self._device = torch.device("cpu") if device.startswith("cpu") else torch.device(device)
        importlib.import_module("torch._dynamo")  # the first optimizer step would, which takes seconds in a worker
        loss = recipe.loss.to(self._device) if isinstance(recipe.loss, torch.nn.Module) else recipe.loss
        self._replica = Replica(recipe.model, recipe.optimizer, loss, self._device)
        self.compiler = ShardCompiler(self._options, self._device, name_modules(recipe.model, loss).values())
        self.versions: Mapping[str, str] = {**settings.read_versions(self._device), **self.compiler.versions}
        if program is None:
            named = NamedMetrics(array_ops, losses.find_traits(loss), leaves_counts=True)
            program = ShardProgram(loss, resolve(recipe.metrics, named.functions()), self.compiler)
        if self._options.exact:
            check_compiled(recipe.model, recipe.optimizer, loss, program.metrics)
        self.outputs = ShardOutputs(
            recipe.keeps_outputs, inputs.output_to_host, torch.tensor, inputs.move_metric_to_cpu
        )
        self._shards = TorchShards(self._replica, loss, program, self._options, self.outputs)
        self._loss, self._references, self.recipe_version = loss, LossReferences(loss, recipe.model), 0
        self._scaler = LossScaler(2.0**16) if self._options.precision == "fp16" else LossScaler()
        self._last_scale, self._device_copy = self._scaler.scale, DeviceCopy(self._device)
        self._trained: dict[str, Tensor] = {}
        self._layout: Layout | None = None

    def spread(self, devices: Sequence[str]) -> None:
        """Does nothing, because each process has one device."""

    @contextmanager
    def computing(self, work: Work) -> Iterator[None]:
        """A context with the run's number of threads, deterministic algorithms if exact, and gradients enabled."""
        needs = settings.Preparation(work.threads, self._device, self._options.exact, bool(self._options.precision))
        self._replica.note_period(work.quiet_period)
        with needs, self._references.accept_changes(), self.compiler.computing():
            yield

    # -- one step

    def layout(self) -> Layout:
        """Returns the layout of a partial sum, a new one if other parameters are trained than before."""
        trained, before = self._replica.find_trained(), self._trained
        if self._layout is None or (trained is not before and trained.keys() != before.keys()):
            self._layout = self._shards.layout(trained)
        self._trained = trained
        return self._layout

    def create_buffer(self, layout: Layout, memory: memoryview | None) -> PartialSum:
        """Returns vectors for a partial sum in the given memory, or else in new memory on the device."""
        if memory is None:
            return FlatVectors.allocate(self._device, layout, len(self._trained))
        return FlatVectors.wrap_memory(memory, layout, len(self._trained))

    def partial_sums(self, work: Work, fold: Fold) -> tuple[Mapping[Span, PartialSum], ShardSums]:
        """Computes shard after shard; returns the partial sums and the shards' sums. Always restores the buffers."""
        shards, trained, pieces = self._shards, list(self._trained.values()), work.shards
        stays = fold.is_single_leaf and self._options.precision != "fp16"  # no other process or device needs it
        generators = rng.get_state(self._device)
        shards.begin(work, pieces, training=True)
        try:
            for shard, piece in pieces.items():
                if stays:
                    fold.push(shard, SingleLeaf(shards.compute(work, shard, piece, trained, None, 1.0)))
                else:
                    buffer = fold.get_buffer(shard)
                    near = self._device_copy.get(buffer)
                    shards.compute(work, shard, piece, trained, near.fields, self._scaler.scale)
                    fold.push(shard, near if near is buffer else self.add(near, None, buffer))
            if shards.check_guards():
                self._replica.accept_attributes()
        except BaseException:
            shards.abandon()
            raise
        finally:
            rng.set_state(generators, self._device)
            shards.clear()
        return fold.partial_sums(), ShardSums(lambda: shards.read_sums(work), shards.check_names)

    def add(self, left: PartialSum, right: PartialSum | None, out: PartialSum | None) -> PartialSum:
        """Returns left + right, in `out` if given; copies `left` to `out` if `right` is None."""
        if right is None:
            return copy_to(left, out)
        if out is None:
            return {dtype: vector + right[dtype] for dtype, vector in left.items()}
        for dtype, vector in left.items():
            torch.add(vector, right[dtype], out=out[dtype])
        return out

    def divide(self, total: PartialSum, by: float) -> None:
        """Divides the sum in place, by a tensor: CUDA would multiply by the reciprocal of a Python number."""
        for vector in total.values():
            vector.div_(create_scalar(by, vector.dtype, vector.device))

    def update(self, total: PartialSum, sums: Sums, work: Work) -> None:
        """Makes the optimizer's step with the summed gradient, and writes the averages of the shards' buffers."""
        fields = self._get_arrays(total)
        given, changed = self._shards.read_flags(sums, list(self._trained.values()))
        self._last_scale = self._scaler.scale
        given = mark_nonzero(given, fields.gradients) if work.phases is Phases.UPDATE else given
        self._references.count_update()
        self._step(fields.gradients, given, work)
        self._shards.statistics.apply(fields.buffers, changed)
        if work.quiet_period is None:  # else nothing is compared before the next step
            self._replica.accept_writes()

    def _get_arrays(self, total: PartialSum) -> LeafArrays:
        """Returns the gradients and buffers in the sum of all shards, as tensors on the device."""
        return total.fields if isinstance(total, SingleLeaf) else self._device_copy.fill(total).fields

    def averaged(self) -> list[AveragedArray]:
        """Returns copies of the float buffers, which are averaged over the shards."""
        return [
            AveragedArray(each.name, each.name, inputs.output_to_host(each.tensor))
            for each in self._shards.statistics.averaged
            if each.tensor.is_floating_point()
        ]

    def norm(self, total: PartialSum) -> float:
        """Returns the norm of all gradients together, before clipping."""
        gradients = [gradient for gradient in self._get_arrays(total).gradients if gradient is not None]
        return float(torch.nn.utils.get_total_norm(gradients)) / self._last_scale

    @property
    def columns(self) -> Sequence[Column]:
        """The metrics of the last shard computed."""
        return self._shards.columns

    def _step(self, found: list[Any], flags: list[float], work: Work) -> None:
        used = [parameter for parameter, flag in zip(self._trained.values(), flags, strict=True) if flag]
        gradients = [gradient for gradient, flag in zip(found, flags, strict=True) if flag]
        if self._options.precision == "fp16":
            halves = [flag >= HALF for flag in flags if flag]
            if (unscaled := self._scaler.unscale(gradients, halves, work.step)) is None:  # one is not finite
                return
            gradients = unscaled
        if self._options.clip_norm is not None and gradients:
            gradients = clip_gradients(gradients, self._options.clip_norm)
        set_gradients(self._recipe.optimizer, used, gradients)
        make_update(self._recipe.optimizer, work, self._device)
        self._shards.clear()

    # -- forward only

    @property
    def criterion(self) -> Criterion | None:
        """The loss as a function of (outputs, targets); None if it is known whether it is a sum or a mean."""
        found = losses.find_unknown(self._loss)
        return None if found is None else functools.partial(self._compute_criterion, found)

    def _compute_criterion(self, criterion: Any, outputs: Any, targets: Any) -> float | None:
        with self._evaluation():
            return self._shards.judge(criterion, outputs, targets)

    def evaluate(self, work: Work) -> Iterator[tuple[int, Sums]]:
        """Yields (shard, its sums of loss and metrics), computed in evaluation mode."""
        self._shards.names.begin()
        with self._evaluation():
            for shard, piece in work.shards.items():
                yield shard, self._shards.evaluate(work, shard, piece)

    def forward(self, work: Work) -> Iterator[tuple[int, Any]]:
        """Yields (shard, the model's outputs in numpy), computed in evaluation mode."""
        with self._evaluation():
            for shard, piece in work.shards.items():
                yield shard, transform(self._shards.predict(work, shard, piece), inputs.output_to_host)

    def native(self, outputs: Any) -> Any:
        """Returns outputs as tensors on this replica's device."""
        return transform(outputs, lambda value: inputs.copy_to_device(value, self._device))

    @contextmanager
    def _evaluation(self) -> Iterator[None]:
        """A context in evaluation mode without gradients; restores modes, parameters and buffers afterwards."""
        try:
            with train_mode.evaluation_mode(self._replica.model):
                self._shards.statistics.save()
                with rng.preserve(self._device), torch.no_grad():
                    yield
        finally:
            self._replica.accept_attributes()

    # -- state

    def state(self) -> State:
        """Returns a copy of the one replica's state."""
        return dict(LazyState(self.state_tensors(), to_array))

    def copies(self) -> Iterator[LazyState]:
        """Yields the state of this process's one replica, whose arrays are copied when they are read."""
        yield LazyState(self.state_tensors(), to_array)

    def state_tensors(self) -> dict[str, Any]:
        """Returns the state's own tensors and numbers by name, not copied; with float16 also the loss scale."""
        return self._replica.state_tensors() | (self._scaler.to_state() if self._options.precision == "fp16" else {})

    def model_arrays(self) -> Mapping[str, Any]:
        """Returns the replica's parameters and saved buffers by name, not copied."""
        return self._replica.model_arrays()

    def load(self, state: Mapping[str, Array]) -> None:
        """Writes a complete state into the replica; raises StateError, and changes nothing, if it does not fit."""
        self._replica.load({name: array for name, array in state.items() if name not in (SCALE, NUM_UPDATES)})
        if self._options.precision == "fp16" and SCALE in state:
            self._scaler = LossScaler.from_state(state)

    def numbers(self) -> list[dict[str, Any]]:
        """Returns the hyperparameters of every parameter group."""
        return self._replica.numbers()

    def set_numbers(self, numbers: Sequence[Mapping[str, Any]]) -> None:
        """Writes hyperparameters, as `numbers` returns them, into the parameter groups."""
        self._replica.set_numbers(numbers)

    def attributes(self) -> dict[str, Any]:
        """Returns `requires_grad` of every parameter, and the numbers and strings in modules' attributes."""
        return self._replica.attributes()

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        """Sets the saved attributes of the modules and `requires_grad` of the parameters; raises if they do not fit."""
        self._replica.set_attributes(attributes)

    def controls(self) -> Any:
        """Returns what the script may change between steps; raises ExactError if a change cannot be sent to workers."""
        if self._options.exact:
            self.recipe_version = self._references.check()
        return self._replica.controls()

    def turn(self, controls: Any) -> None:
        """Writes what `controls` returned in the script's process into this replica."""
        self._replica.turn(controls)

    def enter_training_mode(self) -> None:
        """Puts the model into training mode, except submodules that the script has put into evaluation mode."""
        train_mode.enter_training_mode(self._replica.model)

    def touched(self) -> bool:
        """Returns whether the script wrote to the state since the last step."""
        return self._replica.touched()

    # -- data and processes

    def host(self, value: Any) -> Any:
        """Returns a tensor as numpy, and any other value as it is."""
        return inputs.to_host(value)

    def stage(self, piece: Any) -> Any:
        """Copies the piece to the GPU ahead of time; on a CPU returns it as it is."""
        return inputs.stage(piece, self._device)

    def source(self, data: Any, batch_size: int, shuffle: bool, seed: int) -> Any:
        """Returns a source of batches for a `Dataset` or `DataLoader`; None for any other data."""
        return loaders.find_source(data, batch_size, shuffle, seed)

    def num_threads(self) -> int:
        """Returns the script's own intra-op thread count."""
        return torch.get_num_threads()

    def dump(self) -> bytes:
        """Returns model, optimizer and loss in one pickle, with all tensors on the CPU."""
        self._references.start()
        return pickling.dump(self._recipe)
