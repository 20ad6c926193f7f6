"""NumPy: the reference backend, a small dense network with its gradient written by hand.

It is the oracle of the tests and the shortest complete answer to "what does a
backend do?". Nothing here is clever: what a shard's loss weighs, how leaves add
and how a step is applied can be read off line by line.
"""

import copy
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from lockstep.backends.base import Array, Backend, Node, Recipe, State, Work, arrays
from lockstep.core import seeds, tree
from lockstep.core.batches import OBJECTIVE_EXAMPLE, count, describe
from lockstep.core.layout import Layout
from lockstep.core.metrics import FIRST_METRIC, Column, Sums, resolve
from lockstep.errors import BatchError, ModelError, NonFiniteError, OptimizerError, StateError

Floats = NDArray[Any]


class Dense:
    """A network of dense layers with ReLU between them and dropout before the last.

    >>> Dense([4, 8, 3], seed=0)(np.zeros((2, 4))).shape
    (2, 3)
    """

    def __init__(self, sizes: Sequence[int], seed: int, dtype: str = "float64", dropout: float = 0.0) -> None:
        generator = np.random.Generator(np.random.PCG64(seed))
        self.dropout = dropout
        self.parameters: dict[str, Floats] = {}
        for index, (inputs, outputs) in enumerate(pairwise(sizes)):
            weight = generator.standard_normal((inputs, outputs)) / np.sqrt(inputs)
            self.parameters[f"{index}.weight"] = weight.astype(dtype)
            self.parameters[f"{index}.bias"] = np.zeros(outputs, dtype)

    def __call__(self, x: Floats) -> Floats:
        """The outputs for a batch of inputs, without dropout."""
        return self.forward(x, None)[-1]

    def forward(self, x: Floats, generator: np.random.Generator | None) -> list[Floats]:
        """The values before each layer and the outputs; with a generator, dropout draws from it."""
        values = [x]
        depth = len(self.parameters) // 2
        for index in range(depth):
            if index:
                values[-1] = np.maximum(values[-1], 0)
            if index == depth - 1 and generator is not None and self.dropout:
                keep = generator.random(values[-1].shape) >= self.dropout
                values[-1] = values[-1] * keep.astype(values[-1].dtype) / (1 - self.dropout)
            values.append(values[-1] @ self.parameters[f"{index}.weight"] + self.parameters[f"{index}.bias"])
        return values

    def backward(self, values: list[Floats], slope: Floats) -> dict[str, Floats]:
        """The gradient of every parameter, given that of the outputs."""
        gradients: dict[str, Floats] = {}
        depth = len(self.parameters) // 2
        for index in reversed(range(depth)):
            gradients[f"{index}.weight"] = values[index].T @ slope
            gradients[f"{index}.bias"] = slope.sum(0)
            slope = slope @ self.parameters[f"{index}.weight"].T
            if index == depth - 1 and self.dropout:
                slope = slope / (1 - self.dropout)
            slope = np.where(values[index] > 0, slope, 0)
        return gradients


@dataclass
class SGD:
    """Gradient descent with momentum.

    >>> SGD(0.1).momentum
    0.0
    """

    lr: float
    momentum: float = 0.0
    slots: dict[str, Floats] = field(default_factory=dict)

    def step(self, parameters: dict[str, Floats], gradients: Mapping[str, Floats]) -> None:
        """One update, in place."""
        for name, gradient in gradients.items():
            if self.momentum:
                before = self.slots.get(name)
                self.slots[name] = gradient.copy() if before is None else before * self.momentum + gradient
                gradient = self.slots[name]
            parameters[name] -= np.asarray(self.lr, gradient.dtype) * gradient


@dataclass(frozen=True)
class CrossEntropy:
    """Cross-entropy of logits and class indices.

    The mean divides by the weights of the targets that are not ignored.
    """

    ignore_index: int = -100
    weights: tuple[float, ...] | None = None
    reduction: str = "mean"

    def __call__(self, outputs: Floats, targets: Floats) -> tuple[Floats, Floats, Floats]:
        """Per example: the loss, what it weighs, and the slope of the loss."""
        if targets.max() >= outputs.shape[1]:
            raise BatchError(f"Labels run from 0 to {outputs.shape[1] - 1}. Got {targets.max()}. Mend the labels.")
        shifted = outputs - outputs.max(1, keepdims=True)
        logs = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
        rows, counted = np.arange(len(targets)), targets != self.ignore_index
        index = np.where(counted, targets, 0)
        weights = counted * (np.ones(outputs.shape[1]) if self.weights is None else np.asarray(self.weights))[index]
        slopes = np.exp(logs)
        slopes[rows, index] -= 1
        return -logs[rows, index] * weights, weights, slopes * weights[:, None]


@dataclass(frozen=True)
class SquaredError:
    """The mean over an example's outputs of the squared error."""

    reduction: str = "mean"

    def __call__(self, outputs: Floats, targets: Floats) -> tuple[Floats, Floats, Floats]:
        """Per example: the loss, what it weighs, and the slope of the loss."""
        errors = outputs - targets
        return (errors**2).mean(1), np.ones(len(errors)), 2 * errors / errors.shape[1]


_LOSSES = {"cross_entropy": CrossEntropy(), "mse": SquaredError()}


def _named(loss: CrossEntropy | SquaredError) -> dict[str, Callable[[Floats, Floats], Any]]:
    """The metrics that go by a name; targets that the loss ignores do not count."""

    def counted(hits: Floats, targets: Floats) -> tuple[float, float]:
        there = targets != getattr(loss, "ignore_index", None)
        return float((hits & there).sum()), float(there.sum())

    return {
        "accuracy": lambda outputs, targets: counted(outputs.argmax(1) == targets, targets),
        "top5": lambda outputs, targets: counted((np.argsort(-outputs, 1)[:, :5] == targets[:, None]).any(1), targets),
        "mse": lambda outputs, targets: ((outputs - targets) ** 2).mean(1),
        "mae": lambda outputs, targets: np.abs(outputs - targets).mean(1),
    }


class NumpyBackend:
    """Replicas of a `Dense`, each with parameters of its own."""

    name = "numpy"

    def __init__(self, recipe: Recipe, devices: Sequence[str]) -> None:
        if not isinstance(recipe.optimizer, SGD):
            raise OptimizerError(f"A Dense goes with lockstep.backends.numpy.SGD. Got {recipe.optimizer!r}.")
        loss = _LOSSES.get(recipe.loss, recipe.loss) if isinstance(recipe.loss, str) else recipe.loss
        if not isinstance(loss, CrossEntropy | SquaredError):
            raise ModelError(f"A Dense's loss is 'cross_entropy', 'mse' or an object of theirs. Got {recipe.loss!r}.")
        self.devices = tuple(devices)
        self._recipe = recipe
        self._loss = loss
        self._metrics = resolve(recipe.metrics, _named(loss))
        self._replicas = [(recipe.model, recipe.optimizer)]
        self._replicas += [copy.deepcopy((recipe.model, recipe.optimizer)) for _ in devices[1:]]
        self._layout = Layout.of(
            [(name, str(value.dtype), value.shape) for name, value in recipe.model.parameters.items()],
            [("sums", "float64", (FIRST_METRIC + 2 * len(self._metrics),))],
        )
        self._seen = self._bytes()

    def computing(self, work: Work) -> AbstractContextManager[None]:
        """numpy has no global switches that change these bits."""
        return nullcontext()

    # -- one step

    def layout(self, phase: str) -> Layout:
        """Every parameter, and the sums."""
        return self._layout

    def node(self, layout: Layout, memory: memoryview | None) -> Node:
        """Vectors in the given memory, or new ones."""
        block = memoryview(bytearray(layout.nbytes)) if memory is None else memory
        return {
            dtype: np.frombuffer(block, dtype, length, layout.starts[dtype]) for dtype, length in layout.lengths.items()
        }

    def leaves(self, work: Work, into: Mapping[int, Node]) -> Generator[tuple[int, Node], None, None]:
        """Computes shard after shard on each replica."""
        for replica, pieces in work.pieces.items():
            model = self._model(replica)
            for shard, piece in pieces.items():
                inputs, targets, weights = _parts(piece)
                generator = np.random.Generator(np.random.PCG64(seeds.shard(work.seed, work.step, shard)))
                values = model.forward(inputs, generator)
                sums, slope = self._weigh(values[-1], targets, weights, work)
                if not np.isfinite(sums[0]):
                    raise NonFiniteError.at(work.step, shard, float(sums[0]))
                self._write(into[shard], {**model.backward(values, slope), "sums": np.array(sums)})
                yield shard, into[shard]

    def add(self, left: Node, right: Node | None, out: Node | None) -> Node:
        """numpy's own addition."""
        if right is None:
            assert out is not None
            for dtype, vector in left.items():
                out[dtype][:] = vector
            return out
        if out is None:
            return {dtype: vector + right[dtype] for dtype, vector in left.items()}
        for dtype, vector in left.items():
            np.add(vector, right[dtype], out=out[dtype])
        return out

    def divide(self, total: Node, by: float) -> None:
        """numpy's own division."""
        for vector in total.values():
            vector /= by

    def finish(self, nodes: Mapping[Any, Node], num_shards: int) -> Node:
        """The root, added up in place."""
        total = tree.total(tree.root(num_shards), nodes, lambda left, right: self.add(left, right, left))
        assert total is not None
        return total

    def sums(self, node: Node, layout: Layout) -> Sums:
        """The field of sums."""
        place = layout.fields[-1]
        return np.array(node[place.dtype][place.offset : place.offset + place.size])

    def update(self, total: Node, work: Work) -> None:
        """The optimizer's step on every replica."""
        gradients = self._read(total)
        clip = self._recipe.options.clip_norm
        if clip is not None:
            factor = min(1.0, clip / (self.norm(total) + 1e-6))
            gradients = {name: value * value.dtype.type(factor) for name, value in gradients.items()}
        for model, optimizer in self._replicas:
            optimizer.step(model.parameters, gradients)
        self._seen = self._bytes()

    def norm(self, total: Node) -> float:
        """The norm over all parameters, tensor by tensor."""
        return float(np.sqrt(sum(float((value**2).sum()) for value in self._read(total).values())))

    @property
    def columns(self) -> Sequence[Column]:
        """One pair for each metric."""
        return [Column(metric.name, 2, metric.result) for metric in self._metrics]

    def _weigh(
        self, outputs: Floats, targets: Floats, weights: Floats | None, work: Work
    ) -> tuple[list[float], Floats]:
        """The sums of a shard and the slope of its outputs, before or after which the one division comes."""
        losses, own, slopes = self._loss(outputs, targets)
        divided = weights is not None or isinstance(self._loss, CrossEntropy)
        if weights is not None:
            losses, own, slopes = losses * weights, own * weights, slopes * weights[:, None]
        sums = [float(losses.sum()), float(own.sum()), float(divided)]
        if self._loss.reduction == "sum":
            sums[1:] = [0.0, 0.0]
        elif work.num_shards == 1 and own.sum():
            slopes, sums[2] = slopes / own.sum(), 0.0
        elif not divided:
            slopes = slopes / work.num_examples
        for metric in self._metrics:
            sums += _pair(metric.sums(outputs, targets), len(outputs))
        return sums, slopes.astype(outputs.dtype)

    def _write(self, node: Node, values: Mapping[str, Floats]) -> None:
        for place in self._layout.fields:
            node[place.dtype][place.offset : place.offset + place.size] = values[place.name].ravel()

    def _read(self, node: Node) -> dict[str, Floats]:
        return {
            place.name: node[place.dtype][place.offset : place.offset + place.size].reshape(place.shape)
            for place in self._layout.fields[:-1]
        }

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
                sums, _ = self._weigh(self._model(replica)(inputs), targets, weights, work)
                yield shard, np.array(sums)

    def forward(self, work: Work) -> Iterator[tuple[int, Any]]:
        """The outputs of each shard, without dropout."""
        for replica, pieces in work.pieces.items():
            for shard, piece in pieces.items():
                yield shard, self._model(replica)(np.array(piece))

    def native(self, outputs: Any) -> Any:
        """numpy's own arrays are numpy's."""
        return outputs

    # -- state

    def state(self) -> State:
        """Parameters and momentum of the first replica."""
        model, optimizer = self._replicas[0]
        named = [(f"model.{name}", value.copy()) for name, value in model.parameters.items()]
        named += [(f"optimizer.{name}.momentum", value.copy()) for name, value in optimizer.slots.items()]
        return arrays(named)

    def load(self, state: Mapping[str, Array]) -> None:
        """The same state on every replica."""
        for model, optimizer in self._replicas:
            for name, value in model.parameters.items():
                saved = state.get(f"model.{name}")
                if saved is None or saved.data.shape != value.shape:
                    there = "nothing" if saved is None else saved.data.shape
                    raise StateError(
                        f"The state does not fit this model. At {name!r} it has {there}, the model {value.shape}."
                    )
                value[...] = saved.data
            optimizer.slots = {
                name.removeprefix("optimizer.").removesuffix(".momentum"): value.data.copy()
                for name, value in state.items()
                if name.startswith("optimizer.")
            }

    def controls(self) -> Any:
        """The optimizer's numbers."""
        return self._recipe.optimizer.lr, self._recipe.optimizer.momentum

    def turn(self, controls: Any) -> None:
        """Takes over the script's numbers."""
        for _, optimizer in self._replicas:
            optimizer.lr, optimizer.momentum = controls

    def touched(self) -> bool:
        """Whether the script wrote to the parameters; numpy has no counters, so the bytes are compared."""
        seen, self._seen = self._seen, self._bytes()
        return seen != self._seen

    def _bytes(self) -> list[bytes]:
        return [value.data.tobytes() for value in self.state().values()]

    # -- data and processes

    def host(self, value: Any) -> Any:
        """numpy's own arrays travel as they are."""
        return value

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


def available() -> list[str]:
    """numpy has only the CPU."""
    return []


def variables(devices: Sequence[str]) -> dict[str, str]:
    """None."""
    return {}


def open(recipe: Recipe, devices: Sequence[str]) -> Backend:
    """A backend with one replica on each device."""
    return NumpyBackend(recipe, devices)


def processes(devices: Sequence[str]) -> list[list[str]]:
    """One process per device, as PyTorch has it, so that tests of processes need no framework."""
    return [[device] for device in devices]


def _parts(piece: Any) -> tuple[Floats, Floats, Floats | None]:
    """Fresh copies of inputs, targets and weights."""
    if not isinstance(piece, tuple) or len(piece) not in (2, 3):
        raise BatchError(
            f"A batch is (inputs, targets) or (inputs, targets, weights). Got {describe(piece)}. "
            f"Give one of these, or write an objective:\n{OBJECTIVE_EXAMPLE}"
        )
    count(piece)
    inputs, targets, *weights = (np.array(part) for part in piece)
    return inputs, targets, weights[0] if weights else None


def _pair(value: Any, examples: int) -> list[float]:
    if isinstance(value, tuple):
        return [float(value[0]), float(value[1])]
    return [float(np.sum(value)), float(examples)]
