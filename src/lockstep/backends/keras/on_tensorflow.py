"""Keras on TensorFlow: a compiled model as a `TrainingProgram` of the TensorFlow backend."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from lockstep.backends.base import Backend, Recipe
from lockstep.backends.keras import loaders, losses
from lockstep.backends.keras.stateless_model import CompiledModel, VariableValues, split_batch
from lockstep.backends.keras.unsupported import RESTORING, check_built, check_precision
from lockstep.backends.tensorflow import TensorflowBackend, array_ops, unsupported
from lockstep.backends.tensorflow.losses import WEIGHING
from lockstep.backends.tensorflow.training_program import ProgramResult, ReplicaVariables
from lockstep.core.batches import inputs
from lockstep.core.layout import Layout
from lockstep.core.outputs import select_outputs
from lockstep.core.shard_sums import CUSTOM_SUMS, Summand, list_loss_parts, measure
from lockstep.core.types import Array, Work
from lockstep.core.weighing import Share


def open(recipe: Recipe, devices: Any) -> Backend:
    """Returns the backend that trains a Keras model on TensorFlow."""
    check_precision(recipe)
    return KerasOnTensorflow(KerasProgram(recipe), recipe, devices)


class KerasOnTensorflow(TensorflowBackend):
    """Replicas of a Keras model on the devices of this process."""

    def __init__(self, program: "KerasProgram", recipe: Recipe, devices: Sequence[str]) -> None:
        super().__init__(program, recipe, devices)
        self._keras_program = program

    def layout(self) -> Layout:
        """Returns the layout of a partial sum; called before a step, so missing variables are built from a batch."""
        self._keras_program.build_variables(inputs)
        return super().layout()

    def forward(self, work: Work) -> Iterator[tuple[int, Any]]:
        """Yields each shard's outputs in evaluation mode; its examples are the model's inputs, without targets."""
        self._keras_program.build_variables(lambda piece: piece)
        yield from super().forward(work)

    def load(self, saved: Mapping[str, Array]) -> None:
        """Writes a state into the variables; raises ModelError if the variables do not exist yet."""
        check_built(self._keras_program.model, RESTORING)
        super().load(saved)

    def waits_for_batch(self) -> bool:
        """Returns whether the model or its optimizer has no variables yet, because the first batch creates them."""
        return self._keras_program.waits_for_batch

    def source(self, data: Any, batch_size: int, shuffle: bool, seed: int) -> Any:
        """Returns a source that reads a dataset of Keras or TensorFlow; None for any other data."""
        return loaders.make_source(data, batch_size, shuffle, seed)


class KerasProgram:
    """A compiled Keras model as a `TrainingProgram`."""

    def __init__(self, recipe: Recipe) -> None:
        self._compiled = CompiledModel(recipe.model, recipe.loss)
        self.optimizer = unsupported.check_optimizer(recipe.optimizer)
        self.room = self._compiled.room + (CUSTOM_SUMS if self._compiled.objective else 0)
        self._piece: Any = None  # a shard's examples, while variables are missing
        if recipe.model.built and not self.optimizer.built:
            self.optimizer.build(recipe.model.trainable_variables)

    @property
    def num_seeds(self) -> int:
        """The number of seeds that a shard needs: one for each random number generator of the model."""
        return len(self._compiled.generators)

    @property
    def trace_key(self) -> tuple[bool, ...]:
        """Which layers are trainable, because a frozen layer may compute differently, even one without variables."""
        return self._compiled.trace_key

    @property
    def trainable(self) -> dict[str, Any]:
        """The model's trainable variables, by name."""
        return self._compiled.trainable

    @property
    def statistics(self) -> dict[str, Any]:
        """The running statistics, by name."""
        return self._compiled.statistics

    @property
    def frozen(self) -> dict[str, Any]:
        """The frozen weights, by name."""
        return self._compiled.frozen

    @property
    def model(self) -> Any:
        """The Keras model."""
        return self._compiled.model

    @property
    def waits_for_batch(self) -> bool:
        """Whether the model or its optimizer has no variables yet, because the first batch creates them."""
        return self._compiled.waits_for_batch

    def build(self, piece: Any) -> None:
        """Finds which variables are trainable now; stores a shard's examples if variables must be built from them."""
        self._piece = piece if self._compiled.waits_for_batch else None
        self._compiled.refresh()

    def build_variables(self, find_inputs: Callable[[Any], Any]) -> None:
        """Builds missing variables from the inputs in the shard's examples that `build` was given."""
        if self._compiled.waits_for_batch and self._piece is not None:
            self._compiled.build(find_inputs(self._piece))

    def prepare(self, batch: Any) -> None:
        """Lets Keras build losses and metrics for batches of this form."""
        self.build_variables(inputs)
        self._compiled.prepare(batch)

    def compute(self, own: ReplicaVariables, batch: Any, share: Share, seeds: Any, training: bool) -> ProgramResult:
        """Computes the loss and the metrics of one shard."""
        values = self._read_values(own, seeds)
        compiled = self._compiled
        if compiled.objective is not None:
            return self._compute_objective(values, own, batch, share, training)
        result = compiled.compute(values, batch, training)
        share = share._replace(summed=share.summed and split_batch(batch)[2] is None)
        loss = result.loss, result.extra_loss, result.counted
        term = losses.weigh(WEIGHING, compiled.model, *loss, share, labels=result.labels)
        sums = [*list_loss_parts(term), *map(Summand, result.sums)]
        return ProgramResult(
            term, sums, compiled.metrics.list_columns(), _mark_unchanged(own, values, result.statistics)
        )

    @property
    def criterion(self) -> Callable[[Any, Any], Any] | None:
        """The compiled loss as a function of (outputs, targets); None if its reduction is known."""
        return self._compiled.criterion

    def predict(self, own: ReplicaVariables, inputs: Any, seeds: Any) -> Any:
        """Computes the model's outputs in evaluation mode."""
        return self._compiled.call_with(self._read_values(own, seeds), inputs, training=False)[0]

    def _compute_objective(
        self, values: VariableValues, own: ReplicaVariables, batch: Any, share: Share, training: bool
    ) -> ProgramResult:
        """Computes the loss and the metrics that the script's objective returns."""
        compiled = self._compiled
        assert compiled.objective is not None
        with compiled.replace_variables(values) as scope:
            term = WEIGHING.weigh_objective(compiled.objective, lambda x: compiled.call(x, training), batch, share)
            compiled.model._clear_losses()
            sums, columns = measure(array_ops, (), term, share.examples)
        statistics = _mark_unchanged(own, values, compiled.read_statistics(scope))
        return ProgramResult(term, sums, columns, statistics, select_outputs(term, wanted=False))

    def _read_values(self, own: ReplicaVariables, seeds: Any) -> VariableValues:
        """Returns the values of a replica's variables as tensors, and the shard's seeds."""
        states = [tf.cast(seeds[index], state.dtype) for index, state in enumerate(self._compiled.generators)]
        trainable, statistics = ([tf.convert_to_tensor(variable) for variable in part] for part in own)
        return VariableValues(trainable, statistics, states)


def _mark_unchanged(own: ReplicaVariables, values: VariableValues, after: Any) -> list[Any]:
    """Returns the running statistics after a shard; the variable itself for a statistic that it did not write to."""
    return [
        variable if now is before else now
        for variable, before, now in zip(own.statistics, values.statistics, after, strict=True)
    ]
