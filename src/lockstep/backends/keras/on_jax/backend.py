"""The JAX backend over a Keras model."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import keras
import numpy as np

from lockstep.backends.base import Array, Node, Recipe, State, Work
from lockstep.backends.jax import JaxBackend
from lockstep.backends.jax.vector_fields import Fields
from lockstep.backends.keras import loaders
from lockstep.backends.keras.compiled import Compiled, parts
from lockstep.backends.keras.on_jax.net import Net
from lockstep.backends.keras.on_jax.shards import KerasShards
from lockstep.backends.keras.on_jax.stepper import Stepper
from lockstep.backends.keras.unsupported import RESTORED, check_built
from lockstep.backends.keras_optimizer_state import RATE
from lockstep.core.metrics import Sums
from lockstep.core.reduction import Criterion
from lockstep.core.shard_sums import CUSTOM_SUMS


class KerasOnJax(JaxBackend):
    """Replicas of a Keras model on the devices of this process."""

    def __init__(self, recipe: Recipe, names: Sequence[str]) -> None:
        self._compiled = compiled = Compiled(recipe.model, recipe.loss)
        if recipe.model.built and not recipe.optimizer.built:
            recipe.optimizer.build(recipe.model.trainable_variables)
        net = Net(compiled)
        super().__init__(
            replace(recipe, model=net, optimizer=Stepper(compiled), loss=compiled.objective, metrics=()), names
        )
        if compiled.objective is None:
            self._passes.shards = KerasShards(net, compiled)
        self.versions = {**self.versions, "keras": keras.__version__}

    def leaves(self, work: Work, into: Mapping[int, Node]) -> Generator[tuple[int, Node], None, None]:
        """Lets Keras build losses and metrics before the first of their executables is traced."""
        self._prepare(work)
        yield from super().leaves(work, into)

    @property
    def criterion(self) -> Criterion | None:
        """The compiled loss, if it does not say how the examples count."""
        found = self._compiled.criterion
        return None if found is None else partial(self._judged, found)

    def evaluate(self, work: Work) -> Iterator[tuple[int, Sums]]:
        """As for leaves."""
        self._start(self._inputs)
        self._prepare(work)
        yield from super().evaluate(work)

    def _prepare(self, work: Work) -> None:
        self._compiled.prepare(next(iter(work.shards.values())))

    def _inputs(self, piece: Any) -> Any:
        return super()._inputs(piece) if self._compiled.objective is not None else parts(piece)[0]

    @property
    def _fields(self) -> Fields:
        return self._replicas.fields(self._compiled.room + CUSTOM_SUMS * (self._compiled.objective is not None))

    def state(self) -> State:
        """The model's variables and the optimizer's; the learning rate is one of the numbers."""
        return {name: array for name, array in super().state().items() if name != f"optimizer.{RATE}"}

    def copies(self) -> Iterator[State]:
        """The same of every replica."""
        for state in super().copies():
            yield {name: array for name, array in state.items() if name != f"optimizer.{RATE}"}

    def load(self, state: Mapping[str, Array]) -> None:
        """Takes over a whole state; the learning rate stays."""
        check_built(self._compiled.model, RESTORED)
        own = super().state()
        super().load({**state, **{name: own[name] for name in own if name == f"optimizer.{RATE}"}})

    def waits_for_batch(self) -> bool:
        """Whether the model has no variables yet."""
        return self._compiled.waits

    def host(self, value: Any) -> Any:
        """An array or a Keras variable as numpy."""
        return np.array(value.numpy()) if isinstance(value, keras.Variable) else super().host(value)

    def source(self, data: Any, batch_size: int, shuffle: bool, seed: int) -> Any:
        """A source for the data containers that Keras takes."""
        return loaders.of(data, batch_size, shuffle, seed)
