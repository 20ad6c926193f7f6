"""Collects the outputs and targets of one batch from the processes, for metric objects."""

from collections.abc import Callable
from contextlib import suppress

from lockstep.checkpoint.autosave import print_notice
from lockstep.core.outputs import Pair
from lockstep.core.plan import Plan
from lockstep.core.types import Work
from lockstep.errors import AttemptAborted
from lockstep.processes.base import Processes
from lockstep.processes.commands import read_outputs


def collect_outputs(
    processes: Processes, plan_question: Callable[[], list[Work]], plan: Plan, num_filled: int
) -> dict[int, Pair]:
    """Returns the outputs and targets of the first `num_filled` shards, each from the replica that computed it.

    A replica may still have outputs of an earlier batch, which are not taken. The outputs of a worker that
    has ended since are lost: a line says so, and the metric objects do without them.
    """
    while True:
        works = plan_question()
        groups = processes.replicas()
        with suppress(AttemptAborted):  # else the others are asked again
            answers = processes.gather(read_outputs, works)
            break
    found: dict[int, Pair] = {}
    for group, outputs in zip(groups, answers, strict=True):
        own = {shard for shard in range(num_filled) if plan.owners[shard] in group}
        found |= {shard: pair for shard, pair in outputs.items() if shard in own}
    lost = [str(shard) for shard in range(num_filled) if shard not in found]
    if lost and processes.first:
        print_notice(
            f"The metric objects lack the outputs of shard {', '.join(lost)} of a batch: a worker ended between the "
            "step and their collection. Loss, gradients and named metrics lack nothing."
        )
    return found
