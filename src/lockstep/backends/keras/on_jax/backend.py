"""The JAX backend for a Keras model."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import keras
import numpy as np

from lockstep.backends.base import Recipe
from lockstep.backends.jax import JaxBackend
from lockstep.backends.jax.flat_vectors import VectorFields
from lockstep.backends.keras import loaders
from lockstep.backends.keras.on_jax.model import KerasJaxModel
from lockstep.backends.keras.on_jax.optimizer import KerasJaxOptimizer
from lockstep.backends.keras.on_jax.shard_pass import KerasShardPasses
from lockstep.backends.keras.stateless_model import CompiledModel, split_batch
from lockstep.backends.keras.unsupported import RESTORING, check_built
from lockstep.backends.keras_optimizer_state import RATE
from lockstep.core.fold import Fold
from lockstep.core.loss_reduction import Criterion
from lockstep.core.metrics import Sums
from lockstep.core.shard_sums import CUSTOM_SUMS, ShardSums
from lockstep.core.tree import Span
from lockstep.core.types import Array, LazyState, PartialSum, State, Work

_RATE = f"optimizer.{RATE}"  # the learning rate among the optimizer's variables


class KerasOnJax(JaxBackend):
    """Replicas of a Keras model on the devices of this process."""

    def __init__(self, recipe: Recipe, names: Sequence[str]) -> None:
        self._compiled = compiled = CompiledModel(recipe.model, recipe.loss)
        if recipe.model.built and not recipe.optimizer.built:
            recipe.optimizer.build(recipe.model.trainable_variables)
        model, optimizer = KerasJaxModel(compiled), KerasJaxOptimizer(compiled)
        super().__init__(replace(recipe, model=model, optimizer=optimizer, loss=compiled.objective, metrics=()), names)
        if compiled.objective is None:
            self._runner.passes = KerasShardPasses(model, compiled)
        self.versions = {**self.versions, "keras": keras.__version__}

    def partial_sums(self, work: Work, fold: Fold) -> tuple[Mapping[Span, PartialSum], ShardSums]:
        """Builds losses and metrics, which traced functions need to exist, and then starts every shard."""
        self._prepare(work)
        return super().partial_sums(work, fold)

    @property
    def criterion(self) -> Criterion | None:
        """The compiled loss as a function of (outputs, targets); None if its reduction is known."""
        criterion = self._compiled.criterion
        return None if criterion is None else partial(self._compute_loss, criterion)

    def evaluate(self, work: Work) -> Iterator[tuple[int, Sums]]:
        """Yields each shard's loss and metrics, computed in evaluation mode."""
        self._create_variables(self._find_inputs)
        self._prepare(work)
        yield from super().evaluate(work)

    def _prepare(self, work: Work) -> None:
        """Lets Keras build losses and metrics from one shard of the batch."""
        self._compiled.prepare(next(iter(work.shards.values())))

    def _find_inputs(self, piece: Any) -> Any:
        return super()._find_inputs(piece) if self._compiled.objective is not None else split_batch(piece)[0]

    @property
    def _fields(self) -> VectorFields:
        return self._replicas.make_fields(self._compiled.room + CUSTOM_SUMS * (self._compiled.objective is not None))

    def state(self) -> State:
        """Returns a copy of the first replica's variables."""
        return dict(next(self.copies()))

    def copies(self) -> Iterator[Mapping[str, Array]]:
        """Yields each replica's variables, without the learning rate, which is a hyperparameter."""
        for own in super().copies():
            yield LazyState({name: name for name in own if name != _RATE}, own.__getitem__)

    def load(self, state: Mapping[str, Array]) -> None:
        """Writes a state into the variables; raises ModelError if the variables do not exist yet."""
        check_built(self._compiled.model, RESTORING)
        # A saved state has no learning rate, but the optimizer state needs one: the present rate.
        present = next(super().copies())
        super().load({**state, **{name: present[name] for name in present if name == _RATE}})

    def waits_for_batch(self) -> bool:
        """Returns whether the model or its optimizer has no variables yet, because the first batch creates them."""
        return self._compiled.waits_for_batch

    def host(self, value: Any) -> Any:
        """Returns an array or a Keras variable as numpy, and any other value as it is."""
        return np.array(value.numpy()) if isinstance(value, keras.Variable) else super().host(value)

    def source(self, data: Any, batch_size: int, shuffle: bool, seed: int) -> Any:
        """Returns a source that reads a dataset of Keras or TensorFlow; None for any other data."""
        return loaders.make_source(data, batch_size, shuffle, seed)
