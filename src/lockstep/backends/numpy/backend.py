"""The numpy backend: replicas of a dense network, each with its own parameters.

It is written as plainly as possible, to be read beside the other backends.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import cloudpickle
import numpy as np

from lockstep.backends.base import Recipe
from lockstep.backends.change_detector import ChangeDetector
from lockstep.backends.numpy import array_ops
from lockstep.backends.numpy.network import LOSSES, SGD, Dense, DenseCrossEntropy, DenseSquaredError, Floats, read_array
from lockstep.core import host_vectors, seeds
from lockstep.core.batch_entries import check_example_weights, split_batch
from lockstep.core.batches import count
from lockstep.core.fold import Fold
from lockstep.core.layout import Layout
from lockstep.core.metrics import FIRST_METRIC, Column, Sums, resolve
from lockstep.core.named_metrics import LossTraits, NamedMetrics
from lockstep.core.outputs import Outputs, ShardOutputs
from lockstep.core.shard_sums import ShardSums, check_loss, find_room, measure, pad
from lockstep.core.state import MODEL, OPTIMIZER, ArraySpec, check_state
from lockstep.core.tree import Span
from lockstep.core.types import Array, LazyState, PartialSum, State, Work, to_array
from lockstep.core.weighing import Term
from lockstep.errors import ModelError, OptimizerError

_MOMENTUM = ".momentum"


class NumpyBackend:
    """Replicas of a `Dense`, each with its own parameters."""

    name = "numpy"
    versions: Mapping[str, str] = {"numpy": np.__version__}
    recipe_version = 0  # the script can change nothing of it that the state and the controls do not contain
    criterion = None  # the reduction of every loss is known

    def __init__(self, recipe: Recipe, devices: Sequence[str]) -> None:
        if not isinstance(recipe.optimizer, SGD):
            raise OptimizerError(
                f"The optimizer of a Dense must be a lockstep.backends.numpy.SGD. Got {recipe.optimizer!r}. Use for "
                "example SGD(0.1)."
            )
        loss = LOSSES.get(recipe.loss, recipe.loss) if isinstance(recipe.loss, str) else recipe.loss
        if not isinstance(loss, DenseCrossEntropy | DenseSquaredError):
            raise ModelError(
                f"loss={recipe.loss!r} is not a loss of a Dense. Use 'cross_entropy', 'mse', or a DenseCrossEntropy or "
                "DenseSquaredError of lockstep.backends.numpy."
            )
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
            [],
            FIRST_METRIC + find_room(self._metrics, loss),
        )
        self._writes = ChangeDetector(self._read_bytes)

    def spread(self, devices: Sequence[str]) -> None:
        """Does nothing, because each process has one device."""

    def computing(self, work: Work) -> AbstractContextManager[None]:
        """Returns an empty context, because numpy has no global settings that change the results."""
        return nullcontext()

    # -- one step

    def layout(self) -> Layout:
        """Returns the layout of a partial sum: the gradients of all parameters."""
        return self._layout

    def partial_sums(self, work: Work, fold: Fold) -> tuple[Mapping[Span, PartialSum], ShardSums]:
        """Computes the shards of each replica one after the other; returns their partial sums and sums."""
        vectors = {}
        for replica, pieces in work.pieces.items():
            model = self._get_model(replica)
            for shard, piece in pieces.items():
                leaf = fold.get_buffer(shard)  # first, because it notes which shard a process is computing
                inputs, targets, weights = _read_piece(piece)
                rng = np.random.Generator(np.random.PCG64(seeds.shard(work.seed, work.step, shard)))
                values = model.forward(inputs, rng)
                self._keep_outputs(work, shard, values[-1], targets)
                sums, output_gradient = self._weigh(values[-1], targets, weights, work)
                check_loss(sums, work.step, shard)
                vectors[shard] = pad(sums, self._layout.num_sums)
                gradients = model.backward(values, output_gradient)
                for name, view in self._view_gradients(leaf).items():
                    view[...] = gradients[name]
                fold.push(shard, leaf)
        return fold.partial_sums(), ShardSums(lambda: vectors)

    def create_buffer(self, layout: Layout, memory: memoryview | None) -> PartialSum:
        """Creates the vectors of a partial sum in the given memory, or in new memory."""
        return host_vectors.create_buffer(layout, memory)

    def add(self, left: PartialSum, right: PartialSum | None, out: PartialSum | None) -> PartialSum:
        """Returns left + right, in `out` if given; copies `left` if `right` is None."""
        return host_vectors.add(left, right, out)

    def divide(self, total: PartialSum, by: float) -> None:
        """Divides every element of the sum in place."""
        host_vectors.divide(total, by)

    def update(self, total: PartialSum, sums: Sums, work: Work) -> None:
        """Makes the optimizer's step on every replica."""
        gradients = self._view_gradients(total)
        clip = self._recipe.options.clip_norm
        if clip is not None:
            factor = min(1.0, clip / (self.norm(total) + 1e-6))
            gradients = {name: value * value.dtype.type(factor) for name, value in gradients.items()}
        for model, optimizer in self._replicas:
            optimizer.step(model.parameters, gradients)
        self._writes.accept()

    def norm(self, total: PartialSum) -> float:
        """Returns the norm of all gradients together, before clipping."""
        return float(np.sqrt(sum(float((value**2).sum()) for value in self._view_gradients(total).values())))

    @property
    def columns(self) -> Sequence[Column]:
        """The metrics of the last shard that was computed."""
        return self._columns

    def _weigh(self, outputs: Floats, targets: Floats, weights: Floats | None, work: Work) -> tuple[Sums, Floats]:
        """Returns a shard's sums and the gradient of its outputs.

        The gradient is not yet divided if the sum over all shards will be divided by the batch's weight.
        """
        losses, own, output_gradients = self._loss(outputs, targets)
        divided = weights is not None or isinstance(self._loss, DenseCrossEntropy)
        if weights is not None:
            losses, own, output_gradients = losses * weights, own * weights, output_gradients * weights[:, None]
        loss, weight = losses.sum(), own.sum()
        if self._loss.reduction == "sum":
            weight, divided = 0.0, False
        elif work.num_shards == 1 and weight:
            output_gradients, divided = output_gradients / weight, False
        elif not divided:
            output_gradients = output_gradients / work.num_examples
        term = Term(None, loss, weight, float(divided), outputs=outputs, targets=targets)
        parts, self._columns = measure(array_ops, self._metrics, term, len(outputs))
        return array_ops.join(parts), output_gradients.astype(outputs.dtype)

    def _view_gradients(self, node: PartialSum) -> dict[str, Floats]:
        return {field.name: host_vectors.view(node, field) for field in self._layout.fields}

    def _get_model(self, replica: int) -> Dense:
        """Returns the model of a replica; replica numbers count the replicas of all processes."""
        model: Dense = self._replicas[replica % len(self._replicas)][0]
        return model

    def _keep_outputs(self, work: Work, shard: int, outputs: Any, targets: Any) -> None:
        if self.outputs.wanted:
            self.outputs.keep(work, shard, Outputs(outputs, targets), len(outputs))

    # -- forward only

    def evaluate(self, work: Work) -> Iterator[tuple[int, Sums]]:
        """Yields each shard's loss and metrics, computed without dropout."""
        for replica, pieces in work.pieces.items():
            for shard, piece in pieces.items():
                inputs, targets, weights = _read_piece(piece)
                outputs = self._get_model(replica)(inputs)
                self._keep_outputs(work, shard, outputs, targets)
                yield shard, self._weigh(outputs, targets, weights, work)[0]

    def forward(self, work: Work) -> Iterator[tuple[int, Any]]:
        """Yields each shard's outputs, computed without dropout."""
        for replica, pieces in work.pieces.items():
            for shard, piece in pieces.items():
                yield shard, self._get_model(replica)(read_array(piece))

    def native(self, outputs: Any) -> Any:
        """Returns the outputs as they are, because they are numpy arrays already."""
        return outputs

    # -- state

    def state(self) -> State:
        """Returns a copy of the first replica's parameters and momentum."""
        return dict(self._read_state(0))

    def copies(self) -> Iterator[LazyState]:
        """Yields every replica's state."""
        yield from map(self._read_state, range(len(self._replicas)))

    def model_arrays(self) -> Mapping[str, Any]:
        """Returns the parameters of the first replica, by name."""
        return {f"model.{name}": value for name, value in self._recipe.model.parameters.items()}

    def _read_state(self, replica: int) -> LazyState:
        model, optimizer = self._replicas[replica]
        arrays = {f"{MODEL}{name}": value for name, value in model.parameters.items()}
        arrays |= {f"{OPTIMIZER}{name}{_MOMENTUM}": value for name, value in optimizer.velocities.items()}
        return LazyState(arrays, to_array)

    def load(self, state: Mapping[str, Array]) -> None:
        """Writes a state to every replica; raises StateError, and changes nothing, if it does not fit."""
        check_state(state, self._describe_state(state))
        for model, optimizer in self._replicas:
            for name, value in model.parameters.items():
                value[...] = state[f"{MODEL}{name}"].data
            optimizer.velocities = {
                name.removeprefix(OPTIMIZER).removesuffix(_MOMENTUM): value.data.copy()
                for name, value in state.items()
                if name.startswith(OPTIMIZER)
            }

    def _describe_state(self, state: Mapping[str, Array]) -> dict[str, ArraySpec]:
        """Returns the specs that the arrays of a state must have; before the first step a state has no momentum."""
        own = self._recipe.model.parameters.items()
        specs = {f"{MODEL}{name}": ArraySpec(value.shape, str(value.dtype)) for name, value in own}
        if any(name.startswith(OPTIMIZER) for name in state):
            specs |= {f"{OPTIMIZER}{name}{_MOMENTUM}": specs[f"{MODEL}{name}"] for name, _ in own}
        return specs

    def numbers(self) -> list[dict[str, Any]]:
        """Returns the optimizer's hyperparameters as a list of one group."""
        return [{"lr": self._recipe.optimizer.lr, "momentum": self._recipe.optimizer.momentum}]

    def set_numbers(self, numbers: Sequence[Mapping[str, Any]]) -> None:
        """Sets hyperparameters of every replica's optimizer."""
        for _, optimizer in self._replicas:
            for name, value in numbers[0].items():
                setattr(optimizer, name, value)

    def controls(self) -> Any:
        """Returns the optimizer's learning rate and momentum."""
        return self._recipe.optimizer.lr, self._recipe.optimizer.momentum

    def turn(self, controls: Any) -> None:
        """Sets the learning rate and momentum of every replica to the values from the script's process."""
        for _, optimizer in self._replicas:
            optimizer.lr, optimizer.momentum = controls

    def touched(self) -> bool:
        """Returns whether the script wrote to the parameters since the last call."""
        return self._writes.has_changed()

    def _read_bytes(self) -> list[bytes]:
        """Copies the bytes of every array, because numpy does not count writes."""
        return [value.data.tobytes() for value in self._read_state(0).values()]

    # -- data and processes

    def host(self, value: Any) -> Any:
        """Returns the value as it is, because arrays are numpy arrays already."""
        return value

    def stage(self, piece: Any) -> Any:
        """Returns the shard's examples as they are, because there is no device to prepare them for."""
        return piece

    def source(self, data: Any, batch_size: int, shuffle: bool, seed: int) -> Any:
        """Returns None, because numpy has no data sets or loaders of its own."""
        return None

    def num_threads(self) -> int:
        """Returns 1, because Lockstep does not set numpy's threads."""
        return 1

    def dump(self) -> bytes:
        """Returns a pickle of the recipe, for a worker."""
        data: bytes = cloudpickle.dumps(self._recipe)
        return data


def _read_piece(piece: Any) -> tuple[Floats, Floats, Floats | None]:
    """Returns copies of a shard's inputs, targets and example weights; None if it has no weights."""
    inputs, targets, given = split_batch(piece, 'weights.astype("float32")')
    count(piece)
    inputs, targets = read_array(inputs), read_array(targets)
    if given is None:
        return inputs, targets, None
    weights: Floats = check_example_weights(array_ops, read_array(given), len(inputs))
    return inputs, targets, weights.reshape(-1)
