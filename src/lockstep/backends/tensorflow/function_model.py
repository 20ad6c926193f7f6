"""Functions: a from-scratch network, `(function, [tf.Variable, …])`, as a program.

The function may close over its variables or take them: a parameter called `params`,
`variables` or `weights` gets the list. One called `training` is told whether this is
training, and one called `seed` gets the shard's seed for TensorFlow's stateless draws.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lockstep.backends.base import Recipe
from lockstep.backends.tensorflow import array_ops, losses
from lockstep.backends.tensorflow.program import Copy, Outcome
from lockstep.backends.tensorflow.unsupported import check_function, check_optimizer
from lockstep.core.batch_entries import spread_inputs
from lockstep.core.metrics import resolve
from lockstep.core.named_metrics import NamedMetrics
from lockstep.core.shard_sums import find_room, measure
from lockstep.core.weighing import Share

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
        self._loss, self.criterion = losses.choose_term(recipe.loss), losses.find_unknown(recipe.loss)
        named = NamedMetrics(array_ops, losses.find_traits(recipe.loss)).functions()
        self._metrics = resolve(recipe.metrics, named)
        self.room = find_room(self._metrics, recipe.loss)
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

    def compute(self, own: Copy, batch: Any, share: Share, seeds: Any, training: bool) -> Outcome:
        """The loss of one shard and its metrics."""
        with self._standing_in(own):
            term = self._loss(lambda inputs: self._call(inputs, seeds, training), batch, share)
            parts, columns = measure(array_ops, self._metrics, term, share.examples)
        pair = (term.outputs, term.targets) if self._keeps_outputs else None
        return Outcome(term, parts, columns, own.kept, pair)

    def outputs(self, own: Copy, inputs: Any, seeds: Any) -> Any:
        """The function's outputs."""
        with self._standing_in(own):
            return self._call(inputs, seeds, training=False)

    def _call(self, inputs: Any, seeds: Any, training: bool) -> Any:
        """A tuple of inputs is spread, a dict goes in by name."""
        given: dict[str, Any] = {"training": training, "seed": seeds[0]}
        given |= {name: list(self._names.values()) for name in _LISTS}
        extra = {name: value for name, value in given.items() if name in self._keywords}
        arguments, more = spread_inputs(inputs)
        return self._function(*arguments, **more, **extra)

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
