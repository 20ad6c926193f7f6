"""Keras on TensorFlow: the compiled model as a program of the TensorFlow backend."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from lockstep.backends.base import Array, Backend, Recipe, Work
from lockstep.backends.keras import loaders, losses
from lockstep.backends.keras.compiled import Compiled, Values, parts
from lockstep.backends.keras.unsupported import RESTORED, check_built
from lockstep.backends.tensorflow import TensorflowBackend, array_ops, unsupported
from lockstep.backends.tensorflow.losses import WEIGHING
from lockstep.backends.tensorflow.program import Copy, Outcome
from lockstep.core.batches import inputs
from lockstep.core.layout import Layout
from lockstep.core.shard_sums import CUSTOM_SUMS, Summand, list_loss_parts, measure
from lockstep.core.weighing import Share


def open(recipe: Recipe, devices: Any) -> Backend:
    """The TensorFlow backend over the model."""
    unsupported.check_precision(recipe)
    return KerasOnTensorflow(Program(recipe), recipe, devices)


class KerasOnTensorflow(TensorflowBackend):
    """Replicas of a Keras model on the devices of this process."""

    def __init__(self, program: "Program", recipe: Recipe, devices: Sequence[str]) -> None:
        super().__init__(program, recipe, devices)
        self._keras = program

    def layout(self) -> Layout:
        """The layout; it comes before a step, whose piece is a batch."""
        self._keras.start(inputs)
        return super().layout()

    def forward(self, work: Work) -> Iterator[tuple[int, Any]]:
        """The outputs; here a piece is what the model is called with."""
        self._keras.start(lambda piece: piece)
        yield from super().forward(work)

    def load(self, saved: Mapping[str, Array]) -> None:
        """Takes over a whole state, where there are variables for it."""
        check_built(self._keras.model, RESTORED)
        super().load(saved)

    def waits_for_batch(self) -> bool:
        """Whether the model has no variables yet."""
        return self._keras.waits

    def source(self, data: Any, batch_size: int, shuffle: bool, seed: int) -> Any:
        """A source for the data containers that Keras takes."""
        return loaders.of(data, batch_size, shuffle, seed)


class Program:
    """A compiled Keras model."""

    def __init__(self, recipe: Recipe) -> None:
        self._compiled = Compiled(recipe.model, recipe.loss)
        self.optimizer = unsupported.check_optimizer(recipe.optimizer)
        self.room = self._compiled.room + (CUSTOM_SUMS if self._compiled.objective else 0)
        self._piece: Any = None
        if recipe.model.built and not self.optimizer.built:
            self.optimizer.build(recipe.model.trainable_variables)

    @property
    def num_seeds(self) -> int:
        """One for every seed generator."""
        return len(self._compiled.generators())

    @property
    def form(self) -> tuple[bool, ...]:
        """Which layers are frozen: one may compute otherwise then, and need not have variables that show it."""
        return self._compiled.form

    def trained(self) -> dict[str, Any]:
        """The model's trainable variables."""
        return self._compiled.trained()

    def kept(self) -> dict[str, Any]:
        """The running statistics."""
        return self._compiled.kept()

    def others(self) -> dict[str, Any]:
        """Frozen weights."""
        return self._compiled.others()

    @property
    def model(self) -> Any:
        """The Keras model."""
        return self._compiled.model

    def build(self, piece: Any) -> None:
        """Looks at the model; one that waits for its first examples has them now."""
        self._piece = piece if self._compiled.waits else None
        self._compiled.look()

    @property
    def waits(self) -> bool:
        """Whether the model or its optimizer has no variables yet."""
        return self._compiled.waits

    def start(self, inputs: Callable[[Any], Any]) -> None:
        """Makes the variables of a model that waits for its first examples; `inputs` takes these from a piece."""
        if self._compiled.waits and self._piece is not None:
            self._compiled.build(inputs(self._piece))

    def prepare(self, batch: Any) -> None:
        """Lets Keras build losses and metrics."""
        self.start(inputs)
        self._compiled.prepare(batch)

    def compute(self, own: Copy, batch: Any, share: Share, seeds: Any, training: bool) -> Outcome:
        """The loss of one shard and its metrics."""
        values = self._values(own, seeds)
        compiled = self._compiled
        if compiled.objective is not None:
            return self._compute_objective(values, own, batch, share, training)
        found = compiled.run(values, batch, training)
        share = share._replace(summed=share.summed and parts(batch)[2] is None)
        loss = found.value, found.extra, found.counted
        term = losses.weigh(WEIGHING, compiled.model, *loss, share, labels=found.labels)
        sums = [*list_loss_parts(term), *map(Summand, found.sums)]
        return Outcome(term, sums, compiled.measures.columns(), _unchanged(own, values, found.kept))

    @property
    def criterion(self) -> Callable[[Any, Any], Any] | None:
        """The compiled loss, if it does not say how the examples count."""
        return self._compiled.criterion

    def outputs(self, own: Copy, inputs: Any, seeds: Any) -> Any:
        """The model's outputs."""
        return self._compiled.outputs(self._values(own, seeds), inputs)

    def _compute_objective(self, values: Values, own: Copy, batch: Any, share: Share, training: bool) -> Outcome:
        """What the script's own function says of the model."""
        compiled = self._compiled
        assert compiled.objective is not None
        with compiled.scope(values) as scope:
            term = WEIGHING.weigh_objective(compiled.objective, lambda x: compiled._call(x, training), batch, share)
            compiled.model._clear_losses()
            sums, columns = measure(array_ops, (), term, share.examples)
        return Outcome(term, sums, columns, _unchanged(own, values, compiled.after(scope)))

    def _values(self, own: Copy, seeds: Any) -> Values:
        generators = self._compiled.generators()
        states = [tf.cast(seeds[index], state.dtype) for index, state in enumerate(generators)]
        trained, kept = ([tf.convert_to_tensor(variable) for variable in part] for part in own)
        return Values(trained, kept, states)


def _unchanged(own: Copy, values: Values, after: Any) -> list[Any]:
    """The statistics afterwards; the variable itself where nothing was written."""
    return [
        variable if now is before else now for variable, before, now in zip(own.kept, values.kept, after, strict=True)
    ]
