"""Functions: a from-scratch network, `(function, [tf.Variable, …])`, as a program.

The function may close over its variables or take them: a parameter called `params`,
`variables` or `weights` gets the list. One called `training` is told whether this is
training, and one called `seed` gets the shard's seed for TensorFlow's stateless draws.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from lockstep.backends.base import Recipe
from lockstep.backends.tensorflow import losses, metrics
from lockstep.backends.tensorflow.program import Copy, Share, Term
from lockstep.backends.tensorflow.unsupported import check_function, check_optimizer
from lockstep.core.metrics import ratio, resolve
from lockstep.core.objective import Objective

_LISTS = ("params", "variables", "weights")


class Function:
    """A function and its variables."""

    num_seeds = 1
    form = ()

    def __init__(self, recipe: Recipe) -> None:
        check_function(recipe)
        function, variables = recipe.model
        self.optimizer = check_optimizer(recipe.optimizer)
        self._function = getattr(function, "python_function", function)  # a tf.function holds on to its variables
        self._names = _names(variables)
        self._keywords = list(inspect.signature(self._function).parameters)
        self._loss, self.criterion = losses.of(recipe.loss), losses.criterion_of(recipe.loss)
        self._metrics = resolve(recipe.metrics, metrics.named(recipe.loss))
        self.room = sum(2 if metric.result is ratio else metrics.ROOM for metric in self._metrics)
        self.room += metrics.ROOM if isinstance(recipe.loss, Objective) else 0
        self._keeps_outputs = recipe.keeps_outputs
        self.optimizer.build(_trainable(recipe.model))

    def trained(self) -> dict[str, Any]:
        """The variables that are trainable."""
        return {name: variable for name, variable in self._names.items() if variable.trainable}

    def kept(self) -> dict[str, Any]:
        """None: a function that writes to its variables is refused."""
        return {}

    def others(self) -> dict[str, Any]:
        """The variables that are not trainable."""
        return {name: variable for name, variable in self._names.items() if not variable.trainable}

    def build(self, piece: Any) -> None:
        """The variables are there."""

    def prepare(self, batch: Any) -> None:
        """Nothing to prepare."""

    def term(self, own: Copy, batch: Any, share: Share, seeds: Any, training: bool) -> Term:
        """The loss of one shard and its metrics."""
        with self._standing_in(own):
            weighed = self._loss(lambda inputs: self._call(inputs, seeds, training), batch, share)
            sums, columns = metrics.measure(self._metrics, weighed, share.examples)
        term = weighed.term(own.kept, sums, columns)
        return replace(term, pair=(weighed.outputs, weighed.targets)) if self._keeps_outputs else term

    def outputs(self, own: Copy, inputs: Any, seeds: Any) -> Any:
        """The function's outputs."""
        with self._standing_in(own):
            return self._call(inputs, seeds, training=False)

    def _call(self, inputs: Any, seeds: Any, training: bool) -> Any:
        """A tuple of inputs is spread, a dict goes in by name."""
        given: dict[str, Any] = {"training": training, "seed": seeds[0]}
        given |= {name: list(self._names.values()) for name in _LISTS}
        extra = {name: value for name, value in given.items() if name in self._keywords}
        if isinstance(inputs, Mapping):
            return self._function(**inputs, **extra)
        return self._function(*(inputs if isinstance(inputs, tuple) else (inputs,)), **extra)

    @contextmanager
    def _standing_in(self, own: Copy) -> Iterator[None]:
        """Inside, the script's variables are those of a replica: whoever reads one reads the replica's."""
        variables = list(self.trained().values())
        handles = [variable._handle for variable in variables]
        try:
            for variable, other in zip(variables, own.trained, strict=True):
                variable._handle = other.handle
            yield
        finally:
            for variable, handle in zip(variables, handles, strict=True):
                variable._handle = handle


def _trainable(model: Any) -> list[Any]:
    return [variable for variable in model[1] if variable.trainable]


def _names(variables: Sequence[Any]) -> dict[str, Any]:
    """The variables by their own names, or by number where these are not different."""
    names = [variable.name.partition(":")[0] for variable in variables]
    if len(set(names)) < len(names):
        names = [str(index) for index in range(len(names))]
    return dict(zip(names, variables, strict=True))
