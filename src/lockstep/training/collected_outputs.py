"""Collects the outputs of one batch from the processes: those of metric objects, and the state for the next batch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from lockstep.backends.base import Backend, KeepsOutputs
from lockstep.checkpoint.autosave import print_notice
from lockstep.core.objective import Objective
from lockstep.core.outputs import CollectedOutputs, Outputs, explain_uncarried
from lockstep.core.plan import Plan
from lockstep.core.types import Work
from lockstep.errors import AttemptAborted
from lockstep.processes.base import Processes
from lockstep.processes.commands import read_outputs


def collect_outputs(
    processes: Processes, plan_question: Callable[[], list[Work]], plan: Plan, num_filled: int
) -> CollectedOutputs:
    """Returns the outputs of the first `num_filled` shards, each from the replica that computed it.

    A replica may still have outputs of an earlier batch, which are not taken. The outputs of a worker that has ended
    since are lost.
    """
    while True:
        works = plan_question()
        groups = processes.replicas()
        with suppress(AttemptAborted):  # else the others are asked again
            answers = processes.gather(read_outputs, works)
            break
    found: dict[int, Outputs] = {}
    for group, outputs in zip(groups, answers, strict=True):
        own = {shard for shard in range(num_filled) if plan.owners[shard] in group}
        found |= {shard: each for shard, each in outputs.items() if shard in own}
    return CollectedOutputs(found, num_filled)


def note_lost(found: CollectedOutputs) -> None:
    """Prints which shards are missing from the metric objects' values."""
    if found.lost:
        print_notice(
            f"The metric objects lack the outputs of shard {', '.join(map(str, found.lost))} of a batch: a worker "
            "ended between the step and their collection. Loss, gradients and named metrics lack nothing."
        )


class CarriedState:
    """Collects the state that an objective gives to the next batch (`lockstep.Carried`) after each step of the script.

    The first batch shows whether an objective gives state, and this holds from then on. Every process finds it out from
    all shards, even a process that computes no shard, so that all processes make the same calls.
    """

    def __init__(self, loss: Any, backend: Backend) -> None:
        self._outputs = backend.outputs if isinstance(backend, KeepsOutputs) else None
        self._is_carrying = None if isinstance(loss, Objective) and self._outputs is not None else False

    def collect(self, collect: Callable[[], CollectedOutputs]) -> CollectedOutputs | None:
        """Returns the outputs of the step that was just made, or None if its objective gives no state."""
        if self._is_carrying is False:
            return None
        found = collect()
        without = found.uncarried
        if self._is_carrying is None and len(without) == len(found.shards):
            if not found.lost:
                self._is_carrying = False
            return None
        if without:
            raise explain_uncarried(without)
        self._is_carrying = True
        return found

    @contextmanager
    def refuse(self, reason: str) -> Iterator[None]:
        """Opens a context in which a step whose objective gives state is refused before its update."""
        if self._outputs is None:
            yield
            return
        before, self._outputs.refusal = self._outputs.refusal, reason
        try:
            yield
        finally:
            self._outputs.refusal = before
