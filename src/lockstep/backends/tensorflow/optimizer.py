"""The update of the script's own variables, once per step: by the optimizer, and with the averaged statistics.

Every replica reads the script's own variables, or copies of them that get the current values before it computes. So an
update of these variables, and what the script writes to them, reaches every replica.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from lockstep.backends import keras_optimizer_state
from lockstep.backends.tensorflow.training_program import TrainingProgram
from lockstep.core.layout import Field, Layout
from lockstep.core.types import PartialSum


class UpdatedVariable(NamedTuple):
    """A variable that an update changes."""

    field: Field  # where its gradient or its new value is
    variable: Any
    is_trainable: bool  # if so, the field has its gradient


class OptimizerUpdate:
    """Applies the summed gradients and the averaged running statistics of a step to the script's variables."""

    def __init__(self, program: TrainingProgram, clip_norm: float | None) -> None:
        self._program = program
        self._optimizer = program.optimizer
        self._clip_norm = clip_norm
        self._updates: dict[Any, Any] = {}  # traced functions, by all that a trace depends on

    def apply(self, total: PartialSum, layout: Layout, present: Sequence[bool]) -> None:
        """Updates the variables for which at least one shard has a gradient or a running statistic."""
        trainable, statistics = self._program.trainable, self._program.statistics
        variables = [*trainable.values(), *statistics.values()]
        updated = [
            UpdatedVariable(field, variable, index < len(trainable))
            for index, (field, variable, is_present) in enumerate(zip(layout.fields, variables, present, strict=True))
            if is_present
        ]
        vectors = {dtype: tf.convert_to_tensor(total[dtype]) for dtype in {each.field.dtype: None for each in updated}}
        lengths = (vector.shape[0] for vector in vectors.values())
        constants = keras_optimizer_state.read_constants(self._optimizer)
        key = *map(id, variables), *present, *lengths, *constants.items(), len(trainable)
        if key not in self._updates:
            update = tf.function(lambda vectors: self._update(vectors, updated), autograph=False)
            # The variables are stored, too, so that no other variables get their ids.
            self._updates[key] = update.get_concrete_function(vectors), variables
        self._updates[key][0](vectors)

    def _update(self, vectors: Mapping[str, Any], updated: Sequence[UpdatedVariable]) -> None:
        """Makes the optimizer's step and assigns the statistics; called in a traced function."""

        def read(each: UpdatedVariable) -> Any:
            flat = vectors[each.field.dtype][each.field.offset : each.field.offset + each.field.size]
            return tf.cast(tf.reshape(flat, each.field.shape), each.variable.dtype)

        gradients = [read(each) for each in updated if each.is_trainable]
        variables = [each.variable for each in updated if each.is_trainable]
        if self._clip_norm is not None:
            norm = tf.linalg.global_norm(gradients)
            factor = tf.minimum(tf.ones_like(norm), self._clip_norm / (norm + 1e-6))  # as torch's clip_grad_norm_
            gradients = [gradient * tf.cast(factor, gradient.dtype) for gradient in gradients]
        if variables:
            self._optimizer.apply(gradients, variables)
        for each in updated:
            if not each.is_trainable:
                each.variable.assign(read(each))

    def read_loss_scale(self) -> float:
        """Returns the factor by which the optimizer multiplies a loss before the backward pass."""
        has_scale = getattr(self._optimizer, "loss_scale_factor", None) or hasattr(self._optimizer, "dynamic_scale")
        return float(self._optimizer.scale_loss(tf.constant(1.0))) if has_scale else 1.0

    def name_variables(self) -> dict[str, Any]:
        """Returns the optimizer's variables by name, without the learning rate, which is a hyperparameter."""
        weights = {**self._program.trainable, **self._program.frozen}
        return keras_optimizer_state.name_variables(self._optimizer, weights)
