"""Stepping: the optimizer's update of the script's own variables, and its plain numbers.

The script's own variables take the step. Every replica reads them, or takes their values
over before it computes, so whatever the script writes between two steps reaches them all.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from lockstep.backends import keras_optimizer_state
from lockstep.backends.base import Node
from lockstep.backends.tensorflow.program import Program
from lockstep.core.layout import Field, Layout


class Used(NamedTuple):
    """A variable that takes part in an update, where its values lie, and whether they are a gradient."""

    field: Field
    variable: Any
    trained: bool


class Stepping:
    """Applies summed gradients."""

    def __init__(self, program: Program, clip_norm: float | None) -> None:
        self._program = program
        self._optimizer = program.optimizer
        self._clip_norm = clip_norm
        self._updates: dict[Any, Any] = {}

    def apply(self, total: Node, layout: Layout, there: Sequence[bool]) -> None:
        """The step with those gradients, and those running statistics, that some shard had."""
        trained, kept = self._program.trained(), self._program.kept()
        variables = [*trained.values(), *kept.values()]
        used = [
            Used(field, variable, index < len(trained))
            for index, (field, variable, flag) in enumerate(zip(layout.fields, variables, there, strict=False))
            if flag
        ]
        vectors = {dtype: tf.convert_to_tensor(total[dtype]) for dtype in {each.field.dtype: None for each in used}}
        lengths = (vector.shape[0] for vector in vectors.values())
        key = *map(id, variables), *there, *lengths, *self._constants().items(), len(trained)
        if key not in self._updates:
            update = tf.function(lambda vectors: self._update(vectors, used), autograph=False)
            self._updates[key] = update.get_concrete_function(vectors), variables  # held, so that their ids stay theirs
        self._updates[key][0](vectors)

    def _update(self, vectors: Mapping[str, Any], used: Sequence[Used]) -> None:
        def read(field: Field, variable: Any) -> Any:
            flat = vectors[field.dtype][field.offset : field.offset + field.size]
            return tf.cast(tf.reshape(flat, field.shape), variable.dtype)

        gradients = [read(each.field, each.variable) for each in used if each.trained]
        variables = [each.variable for each in used if each.trained]
        if self._clip_norm is not None:
            norm = tf.linalg.global_norm(gradients)
            factor = tf.minimum(tf.ones_like(norm), self._clip_norm / (norm + 1e-6))
            gradients = [gradient * tf.cast(factor, gradient.dtype) for gradient in gradients]
        if variables:
            self._optimizer.apply(gradients, variables)
        for each in used:
            if not each.trained:
                each.variable.assign(read(each.field, each.variable))

    def scale(self) -> float:
        """By what the optimizer multiplies a loss before the backward pass."""
        scales = getattr(self._optimizer, "loss_scale_factor", None) or hasattr(self._optimizer, "dynamic_scale")
        return float(self._optimizer.scale_loss(tf.constant(1.0))) if scales else 1.0

    # -- plain numbers

    def numbers(self) -> list[dict[str, Any]]:
        """One group: the learning rate, and every number that the optimizer was made with."""
        return keras_optimizer_state.read_numbers(self._optimizer)

    def _constants(self) -> dict[str, Any]:
        """The numbers that a traced update holds as constants."""
        return keras_optimizer_state.read_constants(self._optimizer)

    def set_numbers(self, numbers: Sequence[Mapping[str, Any]]) -> None:
        """Writes them; a schedule keeps its say over the learning rate."""
        keras_optimizer_state.set_numbers(self._optimizer, numbers)

    def optimizer_variables(self) -> dict[str, Any]:
        """Return the optimizer's variables by name, without the learning rate, which is a plain number."""
        weights = {**self._program.trained(), **self._program.others()}
        return keras_optimizer_state.name_variables(self._optimizer, weights)
