"""Stepping: the optimizer's update of the script's own variables, and its plain numbers.

The script's own variables take the step. Every replica reads them, or takes their values
over before it computes, so whatever the script writes between two steps reaches them all.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from lockstep.backends.base import Node
from lockstep.backends.tensorflow.program import Program
from lockstep.core.layout import Field, Layout
from lockstep.errors import StateError

_NUMBERS = (bool, int, float)


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

    def rate(self) -> float:
        """The learning rate of the next step."""
        return float(self._optimizer.learning_rate)

    def numbers(self) -> list[dict[str, Any]]:
        """One group: the learning rate, and every number that the optimizer was made with."""
        return [{"lr": self.rate(), **self._constants()}]

    def _constants(self) -> dict[str, Any]:
        """The numbers that a traced update holds as constants."""
        return {
            name: value
            for name, value in vars(self._optimizer).items()
            if not name.startswith("_") and name != "built" and (type(value) in _NUMBERS or value is None)
        }

    def set_numbers(self, numbers: Sequence[Mapping[str, Any]]) -> None:
        """Writes them; a schedule keeps its say over the learning rate."""
        if len(numbers) != 1:
            raise StateError(
                f"A Keras optimizer has one group of parameters. Got numbers for {len(numbers)}. Give one."
            )
        for name, value in numbers[0].items():
            if name != "lr":
                setattr(self._optimizer, name, value)
            elif value != self.rate():
                self._optimizer.learning_rate = value

    def slots(self) -> dict[str, Any]:
        """The optimizer's variables by name, less the learning rate, which is a plain number."""
        references: dict[str, list[str]] = {}
        for name, variable in {**self._program.trained(), **self._program.others()}.items():
            references.setdefault(_flat(variable), []).append(name)
        seen: dict[str, int] = {}
        result = {}
        for variable in self._optimizer.variables:
            if variable.name == "learning_rate":
                continue
            number = seen[variable.name] = seen.get(variable.name, -1) + 1
            result[_slot(variable.name, number, references)] = variable
        return result


def _flat(variable: Any) -> str:
    """A variable's name as Keras makes it the beginning of its slots' names."""
    path = variable.path if hasattr(variable, "path") else variable.name
    return str(path).replace("/", "_").replace(":", "_")


def _slot(name: str, number: int, references: Mapping[str, Sequence[str]]) -> str:
    """The slot's name: its variable's and its own."""
    for flat in sorted(references, key=len, reverse=True):
        if name.startswith(f"{flat}_") and number < len(references[flat]):
            return f"{references[flat][number]}.{name[len(flat) + 1 :]}"
    return f"{name}.{number}" if number else name
