"""Commands: the functions that every process runs on its part of a batch, which is a `Work`.

A command is a function, or a `functools.partial` of one, and is pickled to the workers by its name. A command without a
batch gets a `Work` without examples, which only has the threads, the seed and the step.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from lockstep.backends.base import KeepsOutputs
from lockstep.core import digest
from lockstep.core.attempt import Timing
from lockstep.core.batches import count, transform
from lockstep.core.fold import Fold
from lockstep.core.loss_reduction import Reduction, judge
from lockstep.core.plan import Plan
from lockstep.core.types import Array, Work
from lockstep.exchange.in_process import InProcessExchange
from lockstep.training.step import Member

Command = Callable[[Member, Work], Any]


def name_command(command: Command) -> str:
    """Returns a description of the command that is equal in all processes that make the same call.

    >>> name_command(evaluate), name_command(partial(copy_array, "model.w"))
    ('evaluate', "copy_array('model.w',)")
    """
    return f"{command.func.__name__}{command.args}" if isinstance(command, partial) else command.__name__


def step(plan: Plan | None, is_observed: bool, member: Member, work: Work) -> tuple[float, list[Timing]]:
    """Makes a training step on this worker's part of a batch; `plan` is None if it is that of the previous step.

    Returns the seconds in which the shards were computed, and the timings if the controller observes its attempts.
    """
    member.laps.collect_timings(is_observed)
    member.step(work, plan)
    return member.compute_seconds, member.laps.take_timings()


def prove(member: Member, work: Work) -> str:
    """Returns the digest of the gradient, buffers and sums of one shard, which must be equal in every process."""
    backend, work = member.backend, member.read(work)
    exchange = InProcessExchange(backend)
    (replica,) = work.pieces
    with member.computing(work):
        exchange.open(backend.layout())
        plan = Plan((replica,) * work.num_shards, (replica,))
        fold = Fold(plan, work.pieces, exchange.get_buffer, backend.add)
        partial_sums, shard_sums = backend.partial_sums(work, fold)
        if isinstance(backend, KeepsOutputs):
            backend.outputs.clear()  # they belong to no step of this process
        leaves = [backend.host(leaf[dtype]) for leaf in partial_sums.values() for dtype in sorted(leaf)]
        return digest.hash_vectors([*leaves, *shard_sums.read().values()])


def evaluate(member: Member, work: Work) -> dict[int, Any]:
    """Returns the sums of loss and metrics by shard, computed without training."""
    work = member.read(work)
    with member.computing(work):
        return dict(member.backend.evaluate(work))


def predict(member: Member, work: Work) -> dict[int, Any]:
    """Returns the outputs by shard, as numpy, computed without training."""
    work = member.read(work)
    with member.computing(work):
        return dict(member.backend.forward(work))


def judge_batch(member: Member, work: Work, shards: Sequence[Any]) -> Reduction | None:
    """Returns whether the loss is a mean or a sum, judged by the first of the shards whose loss is not 0."""
    first, *others = work.pieces
    for piece in shards:
        if piece is not None:
            pieces = {first: {0: piece}, **{replica: {} for replica in others}}
            found = judge_loss(member, replace(work, pieces=pieces))
            if found is not None:
                return found
    return None


def judge_loss(member: Member, work: Work) -> Reduction | None:
    """Returns whether the loss is a mean or a sum, judged by the first shard's outputs in evaluation mode.

    Returns None if the loss of this shard is 0, which fits both. With example weights the loss is a weighted mean. An
    error here is ignored, because the step will raise it.
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


def read_outputs(member: Member, work: Work) -> dict[int, Any]:
    """Returns the outputs and targets of the shards that were computed last; the backend must store them."""
    outputs: dict[int, Any] = member.backend.outputs.read()  # type: ignore[attr-defined]
    return outputs


def compute_digests(member: Member, work: Work) -> dict[int, dict[str, str]]:
    """Returns the digest of every array of the state, by replica."""
    return dict(zip(member.replicas, digest.hash_copies(member.backend.copies()), strict=True))


def copy_array(name: str, member: Member, work: Work) -> dict[int, Array]:
    """Returns one array of the state by replica."""
    return {replica: copy[name] for replica, copy in zip(member.replicas, member.backend.copies(), strict=True)}


def take_times(member: Member, work: Work) -> dict[int, dict[str, float]]:
    """Returns the seconds of each part of the steps since the last call, by the process's first replica."""
    return {member.replicas[0]: member.laps.take()}
