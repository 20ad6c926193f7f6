"""The PyTorch side of the seam: one replica, in this process, on one device."""

import functools
import importlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.backends.base import Array, Node, Recipe, State, Work
from lockstep.backends.torch import array_ops, hooks, inputs, loaders, losses, pickling, rng, settings, train_mode
from lockstep.backends.torch.closure_guard import Surroundings
from lockstep.backends.torch.flat_vectors import Nearby, Vectors
from lockstep.backends.torch.loss_scaler import HALF, Scaler
from lockstep.backends.torch.replica import Replica
from lockstep.backends.torch.shards import Fields, Shards
from lockstep.core import tree
from lockstep.core.averaged_state import AveragedArray
from lockstep.core.batches import transform
from lockstep.core.layout import Layout
from lockstep.core.metrics import Column, Sums, resolve
from lockstep.core.named_metrics import NamedMetrics
from lockstep.core.outputs import ShardOutputs
from lockstep.core.reduction import Criterion


class TorchBackend:
    """One replica of a `torch.nn.Module`."""

    name = "torch"

    def __init__(self, recipe: Recipe, device: str) -> None:
        self.devices: tuple[str, ...] = (device,)
        self._recipe = recipe
        self._options = recipe.options
        self._device = torch.device("cpu") if device.startswith("cpu") else torch.device(device)
        self.versions: Mapping[str, str] = settings.read_versions(self._device)
        importlib.import_module("torch._dynamo")  # the first optimizer step would, and take seconds in a worker
        loss = recipe.loss.to(self._device) if isinstance(recipe.loss, torch.nn.Module) else recipe.loss
        self._replica = Replica(recipe.model, recipe.optimizer, loss, self._device)
        chosen = resolve(recipe.metrics, NamedMetrics(array_ops, losses.find_traits(loss)).functions())
        self.outputs = ShardOutputs(recipe.keeps_outputs, inputs.host_output, torch.tensor, inputs.to_cpu)
        self._shards = Shards(self._replica, loss, chosen, self._options, self.outputs)
        self._loss, self._surroundings = loss, Surroundings(loss, recipe.model)
        self._scaler = Scaler(2.0**16) if self._options.precision == "fp16" else Scaler()
        self._last_scale = self._scaler.scale
        self._trained: dict[str, Tensor] = {}
        self._layout: Layout | None = None
        self._nearby = Nearby(self._device)

    def spread(self, devices: Sequence[str]) -> None:
        """Each process has one device, so there is nothing to move."""

    def computing(self, work: Work) -> AbstractContextManager[None]:
        """Threads, deterministic algorithms and gradients as the promise needs them."""
        return settings.computing(work.threads, self._device, self._options.exact)

    # -- one step

    def layout(self) -> Layout:
        """The layout of the parameters trained now; a new one when a layer is frozen or joins the optimizer."""
        trained = self._replica.find_trained()
        if self._layout is None or trained.keys() != self._trained.keys():
            self._layout, self._trained = self._shards.layout(trained), trained
        return self._layout

    def node(self, layout: Layout, memory: memoryview | None) -> Node:
        """Vectors in the given memory, or in the device's own."""
        if memory is None:
            return Vectors.on(self._device, layout, len(self._trained))
        return Vectors.within(memory, layout, len(self._trained))

    def leaves(self, work: Work, into: Mapping[int, Node]) -> Generator[tuple[int, Node], None, None]:
        """Computes shard after shard; whatever happens, the model's buffers end as they began."""
        self._shards.begin()
        trained = list(self._trained.values())
        statistics = self._shards.statistics
        statistics.keep()
        self._shards.clear()
        with rng.borrowed(self._device):
            try:
                for shard, piece in work.shards.items():
                    near = self._nearby.of(into[shard])
                    self._shards.leaf(work, shard, piece, trained, near.fields, self._scaler.scale)
                    self._shards.clear()
                    yield shard, near if near is into[shard] else self.add(near, None, into[shard])
            finally:
                statistics.restore()
                self._shards.clear()
                self._surroundings.look()

    def add(self, left: Node, right: Node | None, out: Node | None) -> Node:
        """torch's own addition."""
        if right is None:
            assert out is not None
            for dtype, vector in left.items():
                out[dtype].copy_(vector)
            return out
        if out is None:
            return {dtype: vector + right[dtype] for dtype, vector in left.items()}
        for dtype, vector in left.items():
            torch.add(vector, right[dtype], out=out[dtype])
        return out

    def divide(self, total: Node, by: float) -> None:
        """torch's own division; by a tensor, because CUDA multiplies by the reciprocal of a plain number."""
        for vector in total.values():
            vector.div_(torch.tensor(by, dtype=vector.dtype, device=vector.device))

    def finish(self, nodes: Mapping[Any, Node], num_shards: int) -> Node:
        """The root, added up in place."""
        total = tree.total(tree.root(num_shards), nodes, lambda left, right: self.add(left, right, left))
        assert total is not None
        return total

    def sums(self, node: Node, layout: Layout) -> Sums:
        """The field of sums as numpy."""
        field = layout.fields[-1]
        values = np.array(node[field.dtype][field.offset : field.offset + field.size].cpu().numpy())
        self._shards.check_names(values)
        return values

    def update(self, total: Node, work: Work) -> None:
        """The optimizer's step with the summed gradient, and the averaged buffers."""
        fields = self._nearby.filled(total).fields
        there = fields.there.tolist()
        self._last_scale = self._scaler.scale
        self._step(fields, there[: len(self._trained)], work.step)
        statistics = self._shards.statistics
        statistics.apply(fields.buffers, [bool(flag) for flag in there[len(self._trained) :]])
        self._replica.accept_writes()

    def averaged(self) -> list[AveragedArray]:
        """The float buffers."""
        buffers = self._shards.statistics.averaged
        return [
            AveragedArray(each.name, each.name, inputs.host_output(each.tensor))
            for each in buffers
            if each.tensor.is_floating_point()
        ]

    def norm(self, total: Node) -> float:
        """The norm over all tensors of the gradient, before clipping."""
        gradients = self._nearby.filled(total).fields.gradients
        return float(torch.nn.utils.get_total_norm(gradients)) / self._last_scale

    @property
    def columns(self) -> Sequence[Column]:
        """The metrics of the last shard computed."""
        return self._shards.columns

    def _step(self, fields: Fields, there: list[int], step: int) -> None:
        used = [parameter for parameter, flag in zip(self._trained.values(), there, strict=True) if flag]
        views = [field for field, flag in zip(fields.gradients, there, strict=True) if flag]
        gradients = self._clipped(views, [flag >= HALF for flag in there if flag], step)
        if gradients is None:
            return
        copied = _writes_gradients(self._recipe.optimizer)
        for parameter, gradient in zip(used, gradients, strict=True):
            own = torch.view_as_complex(gradient) if parameter.is_complex() else gradient
            if own.stride() == parameter.stride():
                parameter.grad = own.to(parameter.dtype, copy=copied)
            else:  # a fused optimizer walks the memory of both side by side
                parameter.grad = torch.empty_like(parameter).copy_(own)
        self._recipe.optimizer.step()
        self._shards.clear()

    def _clipped(self, gradients: list[Tensor], halves: list[bool], step: int) -> list[Tensor] | None:
        """The gradients without loss scale, clipped; None where one that is not finite in float16 skips the update."""
        if self._options.precision == "fp16":
            unscaled = self._scaler.unscale(gradients, halves, step)
            if unscaled is None:
                return None
            gradients = unscaled
        if self._options.clip_norm is not None and gradients:
            norm = torch.nn.utils.get_total_norm(gradients)
            factor = torch.clamp(self._options.clip_norm / (norm + 1e-6), max=1.0)
            gradients = list(torch._foreach_mul(gradients, factor))
        return gradients

    # -- forward only

    @property
    def criterion(self) -> Criterion | None:
        """A loss of which torch does not say how it reduces."""
        found = losses.find_unknown(self._loss)
        return None if found is None else functools.partial(self._judged, found)

    def _judged(self, criterion: Any, outputs: Any, targets: Any) -> float | None:
        with self._resting():
            return self._shards.loss(criterion, outputs, targets)

    def evaluate(self, work: Work) -> Iterator[tuple[int, Sums]]:
        """Loss and metrics of each shard in evaluation mode."""
        self._shards.begin()
        with self._resting():
            for shard, piece in work.shards.items():
                yield shard, self._shards.sums(work, shard, piece).numpy()

    def forward(self, work: Work) -> Iterator[tuple[int, Any]]:
        """The model's outputs in evaluation mode."""
        with self._resting():
            for shard, piece in work.shards.items():
                outputs = self._shards.outputs(work, shard, piece)
                yield shard, transform(outputs, inputs.host_output)

    def native(self, outputs: Any) -> Any:
        """Outputs as tensors on this replica's device."""
        return transform(outputs, lambda value: inputs.put(value, self._device))

    @contextmanager
    def _resting(self) -> Iterator[None]:
        """Evaluation mode without gradients; modes, parameters and buffers are afterwards as they were."""
        try:
            with train_mode.evaluation_mode(self._replica.model):
                self._shards.statistics.keep()
                with rng.borrowed(self._device), torch.no_grad():
                    yield
        finally:
            self._replica.accept_attributes()
            self._surroundings.look()

    # -- state

    def state(self) -> State:
        """The replica's state, and the loss scale where there is one."""
        state = self._replica.state()
        if self._options.precision == "fp16":
            state["scaler.scale"] = Array(np.asarray(self._scaler.scale), "float64")
            state["scaler.held"] = Array(np.asarray(self._scaler.held), "int64")
        return state

    def copies(self) -> Iterator[State]:
        """The one replica's."""
        yield self.state()

    def model_arrays(self) -> Mapping[str, Any]:
        """The replica's parameters and buffers."""
        return self._replica.model_arrays()

    def load(self, state: Mapping[str, Array]) -> None:
        """Take over a whole state; one that does not fit changes nothing."""
        self._replica.load({name: array for name, array in state.items() if not name.startswith("scaler.")})
        if self._options.precision == "fp16" and "scaler.scale" in state:
            self._scaler = Scaler(state["scaler.scale"].data.item(), state["scaler.held"].data.item())

    def numbers(self) -> list[dict[str, Any]]:
        """The numbers of every parameter group."""
        return self._replica.numbers()

    def set_numbers(self, numbers: Sequence[Mapping[str, Any]]) -> None:
        """Writes them into the parameter groups."""
        self._replica.set_numbers(numbers)

    def attributes(self) -> dict[str, Any]:
        """The frozen flags, and the modules' numbers and words."""
        return self._replica.attributes()

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        """Writes them into the modules."""
        self._replica.set_attributes(attributes)

    def controls(self) -> Any:
        """What the script may turn between steps; raises where the loss's surroundings have changed, which stay."""
        if self._options.exact:
            self._surroundings.check()
        return self._replica.controls()

    def turn(self, controls: Any) -> None:
        """Takes over the script's controls."""
        self._replica.turn(controls)

    def enter_training_mode(self) -> None:
        """Put the model into training mode, less what the script has put into evaluation mode below the root."""
        train_mode.enter_training_mode(self._replica.model)

    def touched(self) -> bool:
        """Whether the script wrote to the state since the last step."""
        return self._replica.touched()

    # -- data and processes

    def host(self, value: Any) -> Any:
        """A tensor as numpy."""
        return inputs.host(value)

    def stage(self, piece: Any) -> Any:
        """On the GPU already, copied beside the computation; a CPU computes where the piece lies."""
        return inputs.stage(piece, self._device)

    def source(self, data: Any, batch_size: int, shuffle: bool, seed: int) -> Any:
        """A source for a `Dataset` or `DataLoader`."""
        return loaders.of(data, batch_size, shuffle, seed)

    def num_threads(self) -> int:
        """The script's own intra-op thread count."""
        return torch.get_num_threads()

    def dump(self) -> bytes:
        """The recipe in one pickle, everything on the CPU."""
        self._surroundings.note()
        return pickling.dump(self._recipe)


def _writes_gradients(optimizer: Any) -> bool:
    """Whether the optimizer may write to the gradient it is given, which other processes read too.

    Of torch's own only Nesterov's in its foreach form does; strangers and hooks are not to be trusted.
    """
    own = type(optimizer).__module__.startswith("torch.optim")
    nesterov = any(group.get("nesterov") and group.get("foreach") is not False for group in optimizer.param_groups)
    return not own or nesterov or hooks.writes_gradients(optimizer)
