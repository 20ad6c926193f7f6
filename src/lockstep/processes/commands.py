"""Commands: what a process can be asked to do with its part of a batch, which is a `Work`.

A command is a function, or a `functools.partial` of one, and is pickled to the workers by its name. A question about
the process itself gets a work without examples: only the threads, seed and step to compute with.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from lockstep.backends.base import Array, Work
from lockstep.core import digest
from lockstep.core.batches import count, transform
from lockstep.core.plan import Plan
from lockstep.core.reduction import Reduction, judge
from lockstep.training.step import Member

Command = Callable[[Member, Work], Any]


def name_command(command: Command) -> str:
    """Return what is done, in words that are equal in all processes that make the same call.

    >>> name_command(evaluate), name_command(partial(copy_array, "model.w"))
    ('evaluate', "copy_array('model.w',)")
    """
    return f"{command.func.__name__}{command.args}" if isinstance(command, partial) else command.__name__


def step(plan: Plan | None, member: Member, work: Work) -> None:
    """Make a step with the other processes; `plan` is None if it is that of the step before. Only workers get this."""
    member.step(work, plan)


def evaluate(member: Member, work: Work) -> dict[int, Any]:
    """Return the sums of loss and metrics by shard, without training."""
    work = member.read(work)
    with member.computing(work):
        return dict(member.backend.evaluate(work))


def predict(member: Member, work: Work) -> dict[int, Any]:
    """Return the outputs by shard, as numpy, without training."""
    work = member.read(work)
    with member.computing(work):
        return dict(member.backend.forward(work))


def judge_loss(member: Member, work: Work) -> Reduction | None:
    """Find out from the outputs of the first shard, in evaluation mode, whether the loss is a mean or a sum.

    Returns None if the loss of this shard is 0, which tells nothing. With example weights the loss is a mean by them.
    What raises here is left for the step to raise.
    """
    backend, criterion, work = member.backend, member.backend.criterion, member.read(work)
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


def take_outputs(member: Member, work: Work) -> dict[int, Any]:
    """Return outputs and targets of the shards that were computed last; only a backend that keeps them is asked."""
    outputs: dict[int, Any] = member.backend.outputs.take()  # type: ignore[attr-defined]
    return outputs


def compute_digests(member: Member, work: Work) -> dict[int, dict[str, str]]:
    """Return the digest of every array of the state, by replica."""
    return dict(zip(member.replicas, digest.hash_copies(member.backend.copies()), strict=True))


def copy_array(name: str, member: Member, work: Work) -> dict[int, Array]:
    """Return one array of the state by replica."""
    return {replica: copy[name] for replica, copy in zip(member.replicas, member.backend.copies(), strict=True)}


def take_times(member: Member, work: Work) -> dict[int, dict[str, float]]:
    """Return the seconds of each part of the steps since the last call, under the process's first replica."""
    return {member.replicas[0]: member.laps.take()}
