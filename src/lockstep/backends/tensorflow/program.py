"""Programs: what TensorFlow trains, as a pure function of variables, one shard's batch and seeds.

A program never writes to a variable. What a shard makes of running statistics it
gives back, and the same program serves every replica: the variables are handed in.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol

from lockstep.core.metrics import Column
from lockstep.core.shard_sums import Summand
from lockstep.core.weighing import Share, Term


class Copy(NamedTuple):
    """The variables of one replica: those that are trained, and the running statistics."""

    trained: Sequence[Any]
    kept: Sequence[Any]

    @property
    def all(self) -> list[Any]:
        """Both, one after the other."""
        return [*self.trained, *self.kept]


class Outcome(NamedTuple):
    """What a shard gives: its loss, the parts of its sums, and its running statistics."""

    term: Term
    parts: Sequence[Summand]
    columns: Sequence[Column]
    kept: Sequence[Any]  # after this shard; the variables handed in if nothing has changed
    pair: Any = None  # outputs and targets, if metric objects need them


class Program(Protocol):
    """A model, its loss and its metrics; the optimizer is a Keras optimizer."""

    optimizer: Any
    room: int  # the most sums that its metrics give

    @property
    def num_seeds(self) -> int:
        """How many seeds a shard draws from."""

    @property
    def form(self) -> Hashable:
        """What a trace holds beside the shapes and the variables: which layers are frozen, say."""

    def trained(self) -> dict[str, Any]:
        """The script's own variables that the next update may change, by name."""

    def kept(self) -> dict[str, Any]:
        """The script's own running statistics, by name."""

    def others(self) -> dict[str, Any]:
        """The script's own variables that belong to the state and that no step changes, by name."""

    def build(self, piece: Any) -> None:
        """Called with a shard's batch, or its inputs alone, before the variables are asked for."""

    def prepare(self, batch: Any) -> None:
        """Called with a shard's batch before losses and metrics are computed from such batches."""

    def compute(self, own: Copy, batch: Any, share: Share, seeds: Any, training: bool) -> Outcome:
        """The loss of one shard and its metrics."""

    @property
    def criterion(self) -> Callable[[Any, Any], Any] | None:
        """The loss as a function of (outputs, targets), if it does not say itself how the examples count."""

    def outputs(self, own: Copy, inputs: Any, seeds: Any) -> Any:
        """The outputs for one shard's inputs, without training."""
