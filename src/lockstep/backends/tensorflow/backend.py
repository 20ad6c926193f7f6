"""The TensorFlow backend: one process drives all of its devices, each of which has a replica."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from lockstep.backends import keras_optimizer_state
from lockstep.backends.base import Recipe
from lockstep.backends.change_detector import ChangeDetector
from lockstep.backends.tensorflow import flat_vectors, loaders, settings, state
from lockstep.backends.tensorflow.optimizer import OptimizerUpdate
from lockstep.backends.tensorflow.shard_pass import TensorflowShardRunner
from lockstep.backends.tensorflow.training_program import ReplicaVariables, TrainingProgram
from lockstep.core import host_vectors
from lockstep.core.averaged_state import AveragedArray
from lockstep.core.batches import transform
from lockstep.core.fold import Fold
from lockstep.core.layout import Layout
from lockstep.core.loss_reduction import Criterion
from lockstep.core.metrics import Column, Sums
from lockstep.core.outputs import Outputs, ShardOutputs
from lockstep.core.shard_sums import ShardSums, check_loss, pad
from lockstep.core.tree import Span
from lockstep.core.types import Array, LazyState, PartialSum, Phases, State, Work
from lockstep.errors import ModelError


class TensorflowBackend:
    """Replicas of a `TrainingProgram`: a step computes on every device, and updates the script's own variables."""

    name = "tensorflow"

    def __init__(self, program: TrainingProgram, recipe: Recipe, devices: Sequence[str]) -> None:
        self.devices: tuple[str, ...] = tuple(devices)
        self.versions: Mapping[str, str] = settings.read_versions(devices[0])
        self._program = program
        self._exact = recipe.options.exact
        self.outputs = ShardOutputs(recipe.keeps_outputs, _to_numpy, _copy_to_cpu)
        self._optimizer_update = OptimizerUpdate(program, recipe.options.clip_norm)
        self._shards = TensorflowShardRunner(program, devices, self._exact)
        self._layout: Layout | None = None
        self._layout_key: Any = None
        self._last_loss_scale = 1.0  # of the last update, which multiplied the gradient
        self._writes = ChangeDetector(lambda: state.sum_bytes(self._name_variables()))

    def spread(self, devices: Sequence[str]) -> None:
        """Puts replicas on other devices; the script's own variables stay where they are."""
        self.devices = tuple(devices)
        self._shards.spread(devices)

    def computing(self, work: Work) -> AbstractContextManager[None]:
        """Returns a context in which operations are deterministic; raises PlanError if threads cannot be set."""
        for piece in work.shards.values():  # one shard is enough
            self._program.build(piece)
            break
        return settings.make_deterministic(work, self._exact)

    # -- one step

    def layout(self) -> Layout:
        """Returns the layout of a partial sum; another object after the script has frozen or unfrozen a layer."""
        trainable, statistics = self._program.trainable, self._program.statistics
        key = [*map(id, trainable.values()), *map(id, statistics.values())]
        if self._layout is None or key != self._layout_key:
            if not trainable:
                raise ModelError(
                    "Training needs a trainable variable, but all variables of the model are frozen. "
                    "Set trainable=True on a layer or a variable."
                )
            self._layout, self._layout_key = flat_vectors.build_layout(trainable, statistics, self._program.room), key
        return self._layout

    def create_buffer(self, layout: Layout, memory: memoryview | None) -> PartialSum:
        """Creates the vectors of a partial sum in the given memory, or in new memory."""
        return host_vectors.create_buffer(layout, memory)

    def partial_sums(self, work: Work, fold: Fold) -> tuple[Mapping[Span, PartialSum], ShardSums]:
        """Computes the shards of all replicas in one call, then copies one shard after the other to the host."""
        self._prepare(work)
        layout, names = self.layout(), self._shards.names
        rows = {}
        for shard, computed in self._shards.compute_gradients(work, self._list_variables()):
            self._store_outputs(work, shard, computed.outputs)
            check_loss(computed.sums, work.step, shard)
            is_present = [array is not None for array in computed.arrays]
            rows[shard] = pad(computed.sums, layout.num_sums, [*is_present, *names.checks()])
            leaf = fold.get_buffer(shard)
            flat_vectors.write_arrays(leaf, layout, computed.arrays)
            fold.push(shard, leaf)
        return fold.partial_sums(), ShardSums(lambda: rows, names.check)

    def add(self, left: PartialSum, right: PartialSum | None, out: PartialSum | None) -> PartialSum:
        """Returns left + right, added by numpy in one thread."""
        return host_vectors.add(left, right, out)

    def divide(self, total: PartialSum, by: float) -> None:
        """Divides the sum in place, with numpy in one thread."""
        host_vectors.divide(total, by)

    def update(self, total: PartialSum, sums: Sums, work: Work) -> None:
        """Makes the optimizer's step on the script's own variables, and writes the averaged statistics."""
        layout = self.layout()
        # Before the update, which may change the scale for the next step.
        self._last_loss_scale = self._optimizer_update.read_loss_scale()
        present = flat_vectors.read_present(layout, sums)
        # The script may have given a gradient for a variable for which no shard had one.
        if work.phases is Phases.UPDATE:
            present = [
                is_present or bool(host_vectors.view(total, field).any())
                for is_present, field in zip(present, layout.fields, strict=True)
            ]
        self._optimizer_update.apply(total, layout, present)
        self._writes.accept()

    def averaged(self) -> list[AveragedArray]:
        """Returns copies of the running statistics that are floats."""
        statistics = {name: _find_tf_variable(each) for name, each in self._program.statistics.items()}
        return [
            AveragedArray(name, name, each.numpy())
            for name, each in statistics.items()
            if tf.as_dtype(each.dtype).is_floating
        ]

    def norm(self, total: PartialSum) -> float:
        """Returns the norm of all gradients together, before clipping."""
        assert self._layout is not None
        fields = self._layout.fields[: len(self._program.trainable)]
        squares = [float(np.square(host_vectors.view(total, field), dtype=np.float64).sum()) for field in fields]
        return math.sqrt(sum(squares)) / self._last_loss_scale

    @property
    def columns(self) -> Sequence[Column]:
        """The metrics of the last shard that was computed."""
        return self._shards.names.columns

    # -- forward only

    @property
    def criterion(self) -> Criterion | None:
        """The loss as a function of (outputs, targets), called eagerly; None if its reduction is known."""
        criterion = self._program.criterion
        return None if criterion is None else partial(_call_criterion, criterion)

    def evaluate(self, work: Work) -> Iterator[tuple[int, Sums]]:
        """Yields each shard's loss and metrics, computed in evaluation mode."""
        self._prepare(work)
        for shard, (sums, outputs) in self._shards.evaluate(work, self._list_variables()):
            self._store_outputs(work, shard, outputs)
            yield shard, sums

    def _store_outputs(self, work: Work, shard: int, outputs: Outputs) -> None:
        """Copies to the host those outputs of a shard that metric objects or the next batch need."""
        found = tf.nest.map_structure(lambda each: _to_numpy(each) if tf.is_tensor(each) else each, outputs)
        self.outputs.keep(work, shard, found, work.count(shard))

    def forward(self, work: Work) -> Iterator[tuple[int, Any]]:
        """Yields each shard's outputs, computed in evaluation mode."""
        for shard, outputs in self._shards.predict(work, self._list_variables()):
            yield shard, tf.nest.map_structure(_to_numpy, outputs)

    def native(self, outputs: Any) -> Any:
        """Returns numpy outputs as tensors."""
        return transform(outputs, _to_tensor)

    def _prepare(self, work: Work) -> None:
        """Builds the program's losses and metrics from one shard of the batch."""
        for piece in work.shards.values():
            self._program.prepare(piece)
            break

    def _list_variables(self) -> ReplicaVariables:
        """Returns the script's variables that a step changes: the trainable variables and the running statistics."""
        parts = self._program.trainable, self._program.statistics
        return ReplicaVariables(*([*map(_find_tf_variable, part.values())] for part in parts))

    # -- state

    def _name_model_variables(self) -> dict[str, Any]:
        """Returns the variables of the script's model by their names in a state."""
        program = self._program
        variables = {**program.trainable, **program.statistics, **program.frozen}
        return {f"model.{name}": variable for name, variable in variables.items()}

    def _name_variables(self) -> dict[str, Any]:
        """Returns the variables of the script's model and optimizer by their names in a state."""
        variables = self._optimizer_update.name_variables().items()
        return self._name_model_variables() | {f"optimizer.{name}": variable for name, variable in variables}

    def state(self) -> State:
        """Returns a copy of every variable of the script's model and optimizer, by name."""
        return dict(LazyState(self._name_variables(), state.to_array))

    def copies(self) -> Iterator[LazyState]:
        """Yields each replica's state, as its next shard reads it; replicas share variables that no step changes."""
        columns = zip(*(read.all for read in self._shards.variables.synchronize(self._list_variables())), strict=True)
        copies = {id(column[0]): column for column in columns}  # by the first replica's, the script's own variable
        variables = {name: _find_tf_variable(each) for name, each in self._name_variables().items()}
        for replica in range(len(self.devices)):
            read = {name: copies[id(own)][replica] if id(own) in copies else own for name, own in variables.items()}
            yield LazyState(read, state.to_array)

    def model_arrays(self) -> Mapping[str, Any]:
        """Returns the variables of the script's own model, by name."""
        return {name: _find_tf_variable(variable) for name, variable in self._name_model_variables().items()}

    def load(self, saved: Mapping[str, Array]) -> None:
        """Writes a state into the script's variables; raises StateError, and writes nothing, if it does not fit."""
        state.write_variables(self._name_variables(), saved)

    def numbers(self) -> list[dict[str, Any]]:
        """Returns the optimizer's hyperparameters as a list of one group."""
        return keras_optimizer_state.read_hyperparameters(self._program.optimizer)

    def set_numbers(self, numbers: Sequence[Mapping[str, Any]]) -> None:
        """Sets the hyperparameters; with a learning-rate schedule, `lr` must be the schedule's present value."""
        keras_optimizer_state.write_hyperparameters(self._program.optimizer, numbers)

    def controls(self) -> Any:
        """Returns the optimizer's hyperparameters."""
        return self.numbers()

    def turn(self, controls: Any) -> None:
        """Sets the optimizer's hyperparameters to those of the script's process."""
        self.set_numbers(controls)

    def touched(self) -> bool:
        """Returns whether the script wrote to the state; TensorFlow counts no writes, so checksums are compared."""
        return self._writes.has_changed()

    # -- data and processes

    def host(self, value: Any) -> Any:
        """Returns a tensor or a variable as numpy, and any other value as it is."""
        return value.numpy() if tf.is_tensor(value) or isinstance(value, tf.Variable) else value

    def stage(self, piece: Any) -> Any:
        """Returns the shard's examples as they are, because TensorFlow copies them when it computes."""
        return piece

    def source(self, data: Any, batch_size: int, shuffle: bool, seed: int) -> Any:
        """Returns a source that reads a `tf.data.Dataset`; None for any other data."""
        return loaders.make_source(data, batch_size)

    def num_threads(self) -> int:
        """Returns the number of TensorFlow's intra-op threads."""
        return settings.count_threads()


def _call_criterion(criterion: Any, outputs: Any, targets: Any) -> float | None:
    """Returns the loss of numpy outputs and targets; None if it is not a scalar."""
    value = criterion(*(transform(each, _to_tensor) for each in (outputs, targets)))
    return float(value) if tf.is_tensor(value) and not value.shape.rank else None


def _to_tensor(value: Any) -> Any:
    return tf.convert_to_tensor(value) if isinstance(value, np.ndarray) else value


def _find_tf_variable(variable: Any) -> Any:
    """Returns a tf.Variable itself, or the tf.Variable inside a Keras variable."""
    return variable if isinstance(variable, tf.Variable) else variable.value


def _copy_to_cpu(value: Any) -> Any:
    with tf.device("/CPU:0"):
        return tf.convert_to_tensor(value)


def _to_numpy(value: Any) -> Any:
    """Returns a copy of an array in numpy; converts bfloat16, which numpy does not have, to float32."""
    is_bfloat16 = tf.is_tensor(value) and value.dtype == tf.bfloat16
    return np.array(tf.cast(value, tf.float32) if is_bfloat16 else value)
