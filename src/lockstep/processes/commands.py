"""Commands: what a process can be asked to do, pickled to the workers as they are."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

from lockstep.backends.base import Work
from lockstep.core import digest
from lockstep.core.batches import count, transform
from lockstep.core.plan import Plan
from lockstep.core.reduction import Reduction, judge
from lockstep.training.step import Member


@dataclass(frozen=True)
class Command(ABC):
    """Something to do for one process.

    `work` holds the process's part of a batch, and the threads, seed and step to compute with. A question about the
    process itself has a work without examples.
    """

    work: Work

    @property
    def name(self) -> str:
        """What is done, in one word; equal in all processes that make the same call."""
        return type(self).__name__.lower()

    @abstractmethod
    def run(self, member: Member) -> Any:
        """Do it, and return the answer: a dict by shard, or by replica."""


@dataclass(frozen=True)
class Step(Command):
    """Make a step; `plan` is None if it is that of the step before. The controller has the sums itself: no answer."""

    plan: Plan | None

    def run(self, member: Member) -> None:
        """Make the step together with the other processes."""
        member.step(self.work, self.plan)


class Evaluate(Command):
    """Compute the sums of loss and metrics of each shard, without training."""

    def run(self, member: Member) -> dict[int, Any]:
        """Return the sums by shard."""
        work = member.read(self.work)
        with member.computing(work):
            return dict(member.backend.evaluate(work))


class Predict(Command):
    """Compute the outputs of each shard, without training."""

    def run(self, member: Member) -> dict[int, Any]:
        """Return the outputs by shard, as numpy."""
        work = member.read(self.work)
        with member.computing(work):
            return dict(member.backend.forward(work))


class JudgeLoss(Command):
    """Find out from the outputs of the first shard, in evaluation mode, whether the loss is a mean or a sum."""

    def run(self, member: Member) -> Reduction | None:
        """Return how the loss is taken; None if it is 0 for this shard, which tells nothing.

        With example weights the loss is a mean by them. What raises here is left for the step to raise.
        """
        backend, criterion, work = member.backend, member.backend.criterion, member.read(self.work)
        piece = work.shards[0]
        if criterion is None or not (isinstance(piece, tuple) and len(piece) == 2):
            return Reduction.MEAN
        inputs, targets = piece
        pieces = {replica: {0: inputs} if 0 in own else {} for replica, own in work.pieces.items()}
        try:
            with member.computing(ahead := replace(work, pieces=pieces)):
                outputs = dict(backend.forward(ahead))[0]
                return judge(criterion, outputs, transform(targets, backend.host), count(inputs))
        except Exception:
            return Reduction.ASSUMED


class Outputs(Command):
    """Hand over the outputs and targets of the shards that were computed last, for metric objects."""

    def run(self, member: Member) -> dict[int, Any]:
        """Return them by shard. Only a backend that keeps outputs is asked."""
        outputs: dict[int, Any] = member.backend.outputs.take()  # type: ignore[attr-defined]
        return outputs


class Digests(Command):
    """Compute the digest of every array of the state."""

    def run(self, member: Member) -> dict[int, dict[str, str]]:
        """Return the digests by replica."""
        return dict(zip(member.replicas, digest.of_copies(member.backend.copies()), strict=True))


@dataclass(frozen=True)
class Copies(Command):
    """Copy one array of the state."""

    array: str

    @property
    def name(self) -> str:
        """The call with the array's name: all processes have to ask for the same one."""
        return f"copies of {self.array}"

    def run(self, member: Member) -> dict[int, Any]:
        """Return the array by replica."""
        copies = member.backend.copies()
        return {replica: copy[self.array] for replica, copy in zip(member.replicas, copies, strict=True)}


class Times(Command):
    """Report the seconds that each part of the steps has taken since the last report."""

    def run(self, member: Member) -> dict[int, dict[str, float]]:
        """Return the seconds by part, under the process's first replica."""
        return {member.replicas[0]: member.laps.take()}
