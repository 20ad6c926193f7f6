"""The numpy side of the seam: replicas of a dense network, each with parameters of its own.

Nothing here is clever: what a shard's loss weighs, how leaves add and how a step is
applied can be read off line by line.
"""

import copy
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import cloudpickle
import numpy as np

from lockstep.backends import host_vectors
from lockstep.backends.base import Array, Node, Recipe, State, Work, arrays
from lockstep.backends.change_detector import ChangeDetector
from lockstep.backends.numpy import array_ops
from lockstep.backends.numpy.network import LOSSES, SGD, CrossEntropy, Dense, Floats, SquaredError, read_array
from lockstep.core import seeds
from lockstep.core.batch_entries import check_example_weights, split_batch
from lockstep.core.batches import count
from lockstep.core.layout import Layout
from lockstep.core.metrics import FIRST_METRIC, Column, Sums, resolve
from lockstep.core.named_metrics import LossTraits, NamedMetrics
from lockstep.core.outputs import ShardOutputs
from lockstep.core.shard_sums import check_loss, find_room, measure, pad
from lockstep.core.state import MODEL, OPTIMIZER, ArraySpec, check_state
from lockstep.core.weighing import Term
from lockstep.errors import ModelError, OptimizerError

_MOMENTUM = ".momentum"


class NumpyBackend:
    """Replicas of a `Dense`, each with parameters of its own."""

    name = "numpy"
    versions: Mapping[str, str] = {"numpy": np.__version__}
    criterion = None  # every loss says what it is

    def __init__(self, recipe: Recipe, devices: Sequence[str]) -> None:
        if not isinstance(recipe.optimizer, SGD):
            raise OptimizerError(f"A Dense goes with lockstep.backends.numpy.SGD. Got {recipe.optimizer!r}.")
        loss = LOSSES.get(recipe.loss, recipe.loss) if isinstance(recipe.loss, str) else recipe.loss
        if not isinstance(loss, CrossEntropy | SquaredError):
            raise ModelError(f"A Dense's loss is 'cross_entropy', 'mse' or an object of theirs. Got {recipe.loss!r}.")
        self.devices = tuple(devices)
        self._recipe = recipe
        self._loss = loss
        named = NamedMetrics(array_ops, LossTraits(getattr(loss, "ignore_index", None)))
        self._metrics = resolve(recipe.metrics, named.functions())
        self.outputs = ShardOutputs(recipe.keeps_outputs, np.array)
        self._replicas = [(recipe.model, recipe.optimizer)]
        self._replicas += [copy.deepcopy((recipe.model, recipe.optimizer)) for _ in devices[1:]]
        self._layout = Layout.build(
            [(name, str(value.dtype), value.shape) for name, value in recipe.model.parameters.items()],
            [("sums", "float64", (FIRST_METRIC + find_room(self._metrics, loss),))],
        )
        self._writes = ChangeDetector(self._read_bytes)

    def spread(self, devices: Sequence[str]) -> None:
        """Each process has one device, so there is nothing to move."""

    def computing(self, work: Work) -> AbstractContextManager[None]:
        """numpy has no global switches that change these bits."""
        return nullcontext()

    # -- one step

    def layout(self) -> Layout:
        """Every parameter, and the sums."""
        return self._layout

    def node(self, layout: Layout, memory: memoryview | None) -> Node:
        """Lay vectors into the given memory, or into new memory."""
        return host_vectors.allocate(layout, memory)

    def leaves(self, work: Work, into: Mapping[int, Node]) -> Generator[tuple[int, Node], None, None]:
        """Computes shard after shard on each replica."""
        for replica, pieces in work.pieces.items():
            model = self._model(replica)
            for shard, piece in pieces.items():
                inputs, targets, weights = _parts(piece)
                generator = np.random.Generator(np.random.PCG64(seeds.shard(work.seed, work.step, shard)))
                values = model.forward(inputs, generator)
                self.outputs.keep(work, shard, values[-1], targets, len(inputs))
                sums, slope = self._weigh(values[-1], targets, weights, work)
                check_loss(sums, work.step, shard)
                room = self._layout.fields[-1].size
                self._write(into[shard], {**model.backward(values, slope), "sums": pad(sums, room)})
                yield shard, into[shard]

    def add(self, left: Node, right: Node | None, out: Node | None) -> Node:
        """Add with numpy's own addition."""
        return host_vectors.add(left, right, out)

    def divide(self, total: Node, by: float) -> None:
        """Divide with numpy's own division."""
        host_vectors.divide(total, by)

    def finish(self, nodes: Mapping[Any, Node], num_shards: int) -> Node:
        """Add up the root in place."""
        return host_vectors.add_tree(nodes, num_shards)

    def sums(self, node: Node, layout: Layout) -> Sums:
        """Copy the field of sums."""
        return np.array(host_vectors.view(node, layout.fields[-1]))

    def update(self, total: Node, work: Work) -> None:
        """The optimizer's step on every replica."""
        gradients = self._read(total)
        clip = self._recipe.options.clip_norm
        if clip is not None:
            factor = min(1.0, clip / (self.norm(total) + 1e-6))
            gradients = {name: value * value.dtype.type(factor) for name, value in gradients.items()}
        for model, optimizer in self._replicas:
            optimizer.step(model.parameters, gradients)
        self._writes.accept()

    def norm(self, total: Node) -> float:
        """The norm over all parameters, tensor by tensor."""
        return float(np.sqrt(sum(float((value**2).sum()) for value in self._read(total).values())))

    @property
    def columns(self) -> Sequence[Column]:
        """The metrics of the last shard computed."""
        return self._columns

    def _weigh(self, outputs: Floats, targets: Floats, weights: Floats | None, work: Work) -> tuple[Sums, Floats]:
        """The sums of a shard and the slope of its outputs, before or after which the one division comes."""
        losses, own, slopes = self._loss(outputs, targets)
        divided = weights is not None or isinstance(self._loss, CrossEntropy)
        if weights is not None:
            losses, own, slopes = losses * weights, own * weights, slopes * weights[:, None]
        loss, weight = losses.sum(), own.sum()
        if self._loss.reduction == "sum":
            weight, divided = 0.0, False
        elif work.num_shards == 1 and weight:
            slopes, divided = slopes / weight, False
        elif not divided:
            slopes = slopes / work.num_examples
        term = Term(None, loss, weight, float(divided), outputs=outputs, targets=targets)
        parts, self._columns = measure(array_ops, self._metrics, term, len(outputs))
        return array_ops.join(parts), slopes.astype(outputs.dtype)

    def _write(self, node: Node, values: Mapping[str, Floats]) -> None:
        for place in self._layout.fields:
            host_vectors.view(node, place)[...] = values[place.name]

    def _read(self, node: Node) -> dict[str, Floats]:
        return {place.name: host_vectors.view(node, place) for place in self._layout.fields[:-1]}

    def _model(self, replica: int) -> Dense:
        """The model of a replica; replicas of this process are numbered from its first on."""
        model: Dense = self._replicas[replica % len(self._replicas)][0]
        return model

    # -- forward only

    def evaluate(self, work: Work) -> Iterator[tuple[int, Sums]]:
        """The sums of each shard, without dropout."""
        for replica, pieces in work.pieces.items():
            for shard, piece in pieces.items():
                inputs, targets, weights = _parts(piece)
                outputs = self._model(replica)(inputs)
                self.outputs.keep(work, shard, outputs, targets, len(inputs))
                yield shard, self._weigh(outputs, targets, weights, work)[0]

    def forward(self, work: Work) -> Iterator[tuple[int, Any]]:
        """The outputs of each shard, without dropout."""
        for replica, pieces in work.pieces.items():
            for shard, piece in pieces.items():
                yield shard, self._model(replica)(read_array(piece))

    def native(self, outputs: Any) -> Any:
        """numpy's own arrays are numpy's."""
        return outputs

    # -- state

    def state(self) -> State:
        """Parameters and momentum of the first replica."""
        return self._state(0)

    def copies(self) -> Iterator[State]:
        """Every replica's."""
        for replica in range(len(self._replicas)):
            yield self._state(replica)

    def model_arrays(self) -> Mapping[str, Any]:
        """The parameters of the first replica."""
        return {f"model.{name}": value for name, value in self._recipe.model.parameters.items()}

    def _state(self, replica: int) -> State:
        model, optimizer = self._replicas[replica]
        named = [(f"{MODEL}{name}", value.copy()) for name, value in model.parameters.items()]
        named += [(f"{OPTIMIZER}{name}{_MOMENTUM}", value.copy()) for name, value in optimizer.slots.items()]
        return arrays(named)

    def load(self, state: Mapping[str, Array]) -> None:
        """Write the same state into every replica; one that does not fit changes nothing."""
        check_state(state, self._specs(state))
        for model, optimizer in self._replicas:
            for name, value in model.parameters.items():
                value[...] = state[f"{MODEL}{name}"].data
            optimizer.slots = {
                name.removeprefix(OPTIMIZER).removesuffix(_MOMENTUM): value.data.copy()
                for name, value in state.items()
                if name.startswith(OPTIMIZER)
            }

    def _specs(self, state: Mapping[str, Array]) -> dict[str, ArraySpec]:
        """Describe the arrays that a saved state must have; from before a first step it may have no momentum."""
        own = self._recipe.model.parameters.items()
        specs = {f"{MODEL}{name}": ArraySpec(value.shape, str(value.dtype)) for name, value in own}
        if any(name.startswith(OPTIMIZER) for name in state):
            specs |= {f"{OPTIMIZER}{name}{_MOMENTUM}": specs[f"{MODEL}{name}"] for name, _ in own}
        return specs

    def numbers(self) -> list[dict[str, Any]]:
        """One group."""
        return [{"lr": self._recipe.optimizer.lr, "momentum": self._recipe.optimizer.momentum}]

    def set_numbers(self, numbers: Sequence[Mapping[str, Any]]) -> None:
        """On every replica."""
        for _, optimizer in self._replicas:
            for name, value in numbers[0].items():
                setattr(optimizer, name, value)

    def controls(self) -> Any:
        """The optimizer's numbers."""
        return self._recipe.optimizer.lr, self._recipe.optimizer.momentum

    def turn(self, controls: Any) -> None:
        """Takes over the script's numbers."""
        for _, optimizer in self._replicas:
            optimizer.lr, optimizer.momentum = controls

    def touched(self) -> bool:
        """Return whether the script wrote to the parameters since the last question."""
        return self._writes.has_changed()

    def _read_bytes(self) -> list[bytes]:
        """Copy the bytes of every array, because numpy does not count writes."""
        return [value.data.tobytes() for value in self.state().values()]

    # -- data and processes

    def host(self, value: Any) -> Any:
        """numpy's own arrays travel as they are."""
        return value

    def stage(self, piece: Any) -> Any:
        """numpy computes where the piece lies."""
        return piece

    def source(self, data: Any, batch_size: int, shuffle: bool, seed: int) -> Any:
        """numpy has no data containers of its own."""
        return None

    def num_threads(self) -> int:
        """numpy's threads are not ours to set."""
        return 1

    def dump(self) -> bytes:
        """The recipe in one pickle."""
        data: bytes = cloudpickle.dumps(self._recipe)
        return data


def _parts(piece: Any) -> tuple[Floats, Floats, Floats | None]:
    """Fresh copies of inputs, targets and weights."""
    inputs, targets, given = split_batch(piece, 'weights.astype("float32")')
    count(piece)
    inputs, targets = read_array(inputs), read_array(targets)
    if given is None:
        return inputs, targets, None
    weights: Floats = check_example_weights(array_ops, read_array(given), len(inputs))
    return inputs, targets, weights.reshape(-1)
