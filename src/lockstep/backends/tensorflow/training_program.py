"""The protocol of what this backend trains: a model with its loss and metrics, as a function of variables.

A program never writes to a variable. It returns the running statistics that a shard computes. One program is used for
every replica, because it gets the variables as arguments.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from lockstep.core.metrics import Column
from lockstep.core.outputs import Outputs
from lockstep.core.shard_sums import Summand
from lockstep.core.weighing import Share, Term


class ReplicaVariables(NamedTuple):
    """The variables that one replica reads."""

    trainable: Sequence[Any]
    statistics: Sequence[Any]

    @property
    def all(self) -> list[Any]:
        """The trainable variables, then the running statistics."""
        return [*self.trainable, *self.statistics]


class ProgramResult(NamedTuple):
    """The loss, the metrics and the running statistics that a program computes for one shard."""

    term: Term
    parts: Sequence[Summand]
    columns: Sequence[Column]
    statistics: Sequence[Any]  # after this shard; the variable itself for a statistic that the shard did not change
    outputs: Outputs = Outputs()  # for metric objects and the next batch


class TrainingProgram(Protocol):
    """A model, its loss and its metrics; the optimizer is a Keras optimizer."""

    optimizer: Any
    room: int  # the largest number of sums that the metrics can give

    @property
    def num_seeds(self) -> int:
        """The number of seeds that a shard needs."""

    @property
    def trace_key(self) -> Hashable:
        """What a trace depends on besides shapes and variables, e.g. which layers are frozen."""

    @property
    def trainable(self) -> Mapping[str, Any]:
        """The script's variables that the next update may change with a gradient, by name."""

    @property
    def statistics(self) -> Mapping[str, Any]:
        """The script's running statistics, by name."""

    @property
    def frozen(self) -> Mapping[str, Any]:
        """The script's variables that belong to the state and that no step changes, by name."""

    @property
    def criterion(self) -> Callable[[Any, Any], Any] | None:
        """The loss as a function of (outputs, targets); None if its reduction is known."""

    def build(self, piece: Any) -> None:
        """Creates missing variables from a shard's batch or its inputs alone; called before variables are read."""

    def prepare(self, batch: Any) -> None:
        """Builds losses and metrics for batches of this form; called before a shard is computed."""

    def compute(self, own: ReplicaVariables, batch: Any, share: Share, seeds: Any, training: bool) -> ProgramResult:
        """Computes the loss and the metrics of one shard."""

    def predict(self, own: ReplicaVariables, inputs: Any, seeds: Any) -> Any:
        """Computes the outputs for one shard's inputs, in evaluation mode."""
