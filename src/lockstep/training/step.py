"""One step in one process: cut, compute, weigh, add, commit, update.

Every process runs this code over its own shards. What it computes follows from the shards alone; the exchange only
brings the partial sums of the processes together. So the result is the same for any number of processes and devices.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from lockstep.backends.base import AveragesState, Backend
from lockstep.core import host_vectors
from lockstep.core.attempt import TimedFold
from lockstep.core.averaged_state import QueueGuard
from lockstep.core.batches import Rows
from lockstep.core.fold import Fold
from lockstep.core.metrics import DIVIDED, WEIGHT, Sums
from lockstep.core.plan import Plan
from lockstep.core.shard_sums import ShardSums
from lockstep.core.time_breakdown import Stopwatch
from lockstep.core.tree import Span
from lockstep.core.types import GivenGradient, PartialSum, Phases, Work
from lockstep.errors import AttemptAborted, NonFiniteError, PeerFailed
from lockstep.exchange.base import Exchange
from lockstep.launch.deferred_signals import defer_interrupts

ReadRows = Callable[[Sequence[Rows]], Sequence[Any]]
TURN = threading.RLock()  # random number generators and switches are the process's: one trainer computes at a time


@dataclass
class StepResult:
    """The result of a step that was committed."""

    step: int
    sums: Sums
    total: PartialSum | None  # the summed gradient; None once the next step has begun, so that its memory is free


class Member:
    """One process of a training run: its backend, the replicas it holds, and its exchange with the other processes.

    `read_rows` gives the examples for rows of a pipeline; without it, batches arrive whole. `turn` is a lock that is
    held while the process computes, and not while it reads: the code that makes the examples may be waiting for it.
    """

    def __init__(
        self,
        backend: Backend,
        open_exchange: Callable[[Plan], Exchange],
        replicas: Sequence[int],
        read_rows: ReadRows | None = None,
        turn: AbstractContextManager[Any] = TURN,
    ) -> None:
        self.backend = backend
        self.replicas = tuple(replicas)  # their numbers among those of all processes
        self.laps = Stopwatch(time.perf_counter)
        self.compute_seconds = 0.0  # of the last step
        self._open_exchange = open_exchange
        self._exchange: Exchange | None = None
        self._plan: Plan | None = None
        self._read_rows = read_rows
        self._turn = turn
        self._queue_guard = QueueGuard()

    def step(self, work: Work, plan: Plan | None, count_step: Callable[[], None] = lambda: None) -> StepResult:
        """Makes one step; if `plan` is None, it is the plan of the step before.

        Until the commit nothing of the state has changed, so a failure anywhere leaves every replica as it was. From
        the commit on every replica applies the update. `count_step` is called once it is applied, before an interrupt
        that came meanwhile is raised: the step counts, although this method does not return. If the work asks for the
        gradient only, it ends with the commit. An update that raises in
        one process leaves its replica behind the others; the step does not count there, and the processes bring their
        replicas together before the next.
        """
        backend = self.backend
        exchange = self._choose_exchange(plan)

        # 1. Cut: the session has cut the batch and chosen this process's shards. Of a pipeline they are references
        # until now, so that each process reads the examples of its own shards alone.
        self.laps.start()
        try:
            work = self.read(work)
        except BaseException:
            exchange.fail()
            raise
        self.laps.lap("input")

        with self._turn, ExitStack() as computing:
            try:
                computing.enter_context(backend.computing(work))
                # 2. Compute: each shard alone, from the same parameters, with random numbers of its own. Shards are
                # never merged into one call, because kernels give other bits for other shapes.
                # 3. Weigh: the backend multiplies a shard's loss by its part of the batch's examples; a loss with a
                # denominator of its own is summed, and the exchange divides the gradient once, after the tree.
                # 4. Add: a partial sum is merged with its neighbour as soon as both are there, which needs about
                # log2(shards) of them in memory. The order is the tree's, whoever computed which shard.
                compute = backend.partial_sums if work.phases is not Phases.UPDATE else self._take_given
                partial_sums, shard_sums = compute(work, self._open_fold(exchange, work))
                self.compute_seconds = self.laps.lap("compute")
                with defer_interrupts():  # else the others might have the sums without `fail` knowing of it
                    total, sums = exchange.reduce(partial_sums, shard_sums, work)
                if sums[DIVIDED] and not sums[WEIGHT]:
                    raise NonFiniteError(
                        f"The weights of the batch of step {work.step} sum to 0, so its loss has no weighted mean: "
                        "every target is ignored or has weight 0, or positive and negative weights cancel. Leave such "
                        "batches out."
                    )
            except (PeerFailed, AttemptAborted):  # the others know already
                raise
            except BaseException:
                exchange.fail()
                raise

            # An interrupt waits from the commit to the end of the update: half an update would be another state.
            with defer_interrupts():
                # 5. Commit: returns once every process has the sums. From here on the step counts, so it comes before
                # the update, which all then apply side by side without waiting for one another.
                exchange.commit()
                self.laps.lap("exchange")

                # 6. Update: the same on every replica, from the summed gradient alone.
                if work.phases is not Phases.GRADIENT:
                    backend.update(total, sums, work)
                count_step()
                self.laps.lap("update")
        return StepResult(work.step, sums, total)

    def _take_given(self, work: Work, fold: Fold) -> tuple[Mapping[Span, PartialSum], ShardSums]:
        """Returns the given gradient as a partial sum of this process; nothing if another process has the gradient."""
        given: dict[int, GivenGradient] = work.shards
        for shard, (vectors, _) in given.items():
            layout = self.backend.layout()
            memory = memoryview(bytearray(layout.nbytes))
            host_vectors.add(vectors, None, host_vectors.create_buffer(layout, memory))
            leaf = self.backend.create_buffer(layout, memory)
            fold.push(shard, self.backend.add(leaf, None, fold.get_buffer(shard)))
        return fold.partial_sums(), ShardSums(lambda: {shard: sums for shard, (_, sums) in given.items()})

    @contextmanager
    def computing(self, work: Work) -> Iterator[None]:
        """Returns a context for computations that are no step, such as an evaluation."""
        with self._turn, self.backend.computing(work):
            yield

    def read(self, work: Work) -> Work:
        """Returns the work with the examples of its rows."""
        return work if self._read_rows is None else read_examples(work, self._read_rows)

    def close(self) -> None:
        """Frees the memory of partial sums."""
        if self._exchange is not None:
            self._exchange.close()

    def _open_fold(self, exchange: Exchange, work: Work) -> Fold:
        """Returns the fold of this process's shards, in the buffers of the exchange."""
        backend = self.backend
        layout = backend.layout()
        exchange.open(layout)
        assert self._plan is not None
        check = None
        # With one shard nothing is averaged.
        if work.num_shards > 1 and self._queue_guard.is_due() and isinstance(backend, AveragesState):
            averaged = backend.averaged

            def check(shard: int, leaf: PartialSum) -> None:
                fraction = work.count(shard) / work.num_examples
                self._queue_guard.check(leaf, fraction, layout, averaged, backend.host)

        if self.laps.timings is None:
            return Fold(self._plan, work.pieces, exchange.get_buffer, backend.add, check)
        fold = TimedFold(self._plan, work.pieces, exchange.get_buffer, backend.add, check)
        fold.set_clock(self.laps.clock, self.laps.timings)
        return fold

    def _choose_exchange(self, plan: Plan | None) -> Exchange:
        """Returns the exchange; opens it in the first step and whenever the plan changes."""
        if plan is not None and plan != self._plan:
            self._exchange, self._plan = self._open_exchange(plan), plan
        assert self._exchange is not None
        return self._exchange


def read_examples(work: Work, read_rows: ReadRows) -> Work:
    """Returns the work with the examples of its rows, if its shards are those of a pipeline's batch."""
    rows = {shard: piece for own in work.pieces.values() for shard, piece in own.items() if isinstance(piece, Rows)}
    if not rows:
        return work
    examples = dict(zip(rows, read_rows(list(rows.values())), strict=True))
    pieces = {
        replica: {shard: examples.get(shard, piece) for shard, piece in own.items()}
        for replica, own in work.pieces.items()
    }
    return replace(work, pieces=pieces)
