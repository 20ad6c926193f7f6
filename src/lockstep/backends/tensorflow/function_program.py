"""A plain TensorFlow model, `(function, [tf.Variable, …])`, as a `TrainingProgram`.

The function may close over its variables or take them: a parameter called `params`, `variables` or `weights` gets the
list. A parameter called `training` gets whether the step trains, and a parameter called `seed` gets the shard's seed
for TensorFlow's stateless operations.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lockstep.backends.base import Recipe
from lockstep.backends.tensorflow import array_ops, losses
from lockstep.backends.tensorflow.training_program import ProgramResult, ReplicaVariables
from lockstep.backends.tensorflow.unsupported import check_function, check_optimizer
from lockstep.core.batch_entries import spread_inputs
from lockstep.core.metrics import resolve
from lockstep.core.named_metrics import NamedMetrics
from lockstep.core.outputs import select_outputs
from lockstep.core.shard_sums import find_room, measure
from lockstep.core.weighing import Share

_VARIABLE_PARAMETERS = ("params", "variables", "weights")


class FunctionProgram:
    """A model that is a function, with its variables, a loss, metrics and an optimizer."""

    num_seeds = 1
    trace_key = ()

    def __init__(self, recipe: Recipe) -> None:
        check_function(recipe)
        function, variables = recipe.model
        self.optimizer = check_optimizer(recipe.optimizer)
        # Of a tf.function the Python function is called, because its traces contain the script's own variables.
        self._function = getattr(function, "python_function", function)
        self._variables = _name_variables(variables)
        self._parameters = list(inspect.signature(self._function).parameters)
        self._compute_term, self.criterion = losses.choose_term(recipe.loss), losses.find_criterion(recipe.loss)
        named = NamedMetrics(array_ops, losses.find_traits(recipe.loss)).functions()
        self._metrics = resolve(recipe.metrics, named)
        self.room = find_room(self._metrics, recipe.loss)
        self._keeps_outputs = recipe.keeps_outputs
        self.optimizer.build(list(self.trainable.values()))

    @property
    def trainable(self) -> dict[str, Any]:
        """The variables that are trainable now, by name."""
        return {name: variable for name, variable in self._variables.items() if variable.trainable}

    @property
    def statistics(self) -> dict[str, Any]:
        """An empty dict: a model that is a function must not write to variables, so it has no running statistics."""
        return {}

    @property
    def frozen(self) -> dict[str, Any]:
        """The variables that are not trainable now, by name."""
        return {name: variable for name, variable in self._variables.items() if not variable.trainable}

    def build(self, piece: Any) -> None:
        """Does nothing, because the variables exist already."""

    def prepare(self, batch: Any) -> None:
        """Does nothing, because loss and metrics are functions, which need not be built."""

    def compute(self, own: ReplicaVariables, batch: Any, share: Share, seeds: Any, training: bool) -> ProgramResult:
        """Computes the loss and the metrics of one shard."""
        with self._replace_handles(own):
            term = self._compute_term(lambda inputs: self._call(inputs, seeds, training), batch, share)
            parts, columns = measure(array_ops, self._metrics, term, share.examples)
        outputs = select_outputs(term, self._keeps_outputs)
        return ProgramResult(term, parts, columns, own.statistics, outputs)

    def predict(self, own: ReplicaVariables, inputs: Any, seeds: Any) -> Any:
        """Computes the function's outputs in evaluation mode."""
        with self._replace_handles(own):
            return self._call(inputs, seeds, training=False)

    def _call(self, inputs: Any, seeds: Any, training: bool) -> Any:
        """Calls the function with a tuple's entries as positional arguments, or a dict's as keyword arguments."""
        given: dict[str, Any] = {"training": training, "seed": seeds[0]}
        given |= {name: list(self._variables.values()) for name in _VARIABLE_PARAMETERS}
        extra = {name: value for name, value in given.items() if name in self._parameters}
        arguments, more = spread_inputs(inputs)
        return self._function(*arguments, **more, **extra)

    @contextmanager
    def _replace_handles(self, own: ReplicaVariables) -> Iterator[None]:
        """Makes the script's variables read a replica's values inside this context.

        A closure refers to the variable objects, so the objects stay, and only the handles inside them are replaced.
        """
        variables = list(self.trainable.values())
        handles = [variable._handle for variable in variables]
        try:
            for variable, other in zip(variables, own.trainable, strict=True):
                variable._handle = other.handle
            yield
        finally:
            for variable, handle in zip(variables, handles, strict=True):
                variable._handle = handle


def _name_variables(variables: Sequence[Any]) -> dict[str, Any]:
    """Returns the variables by their own names, or by position if two names are equal."""
    names = [variable.name.partition(":")[0] for variable in variables]
    if len(set(names)) < len(names):
        names = [str(index) for index in range(len(names))]
    return dict(zip(names, variables, strict=True))
