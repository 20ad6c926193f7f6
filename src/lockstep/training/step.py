"""One step in one process: cut, compute, weigh, add, commit, update.

Every process runs this code over its own shards. What it computes follows from the shards alone; the exchange only
brings the partial sums of the processes together. So the result is the same for any number of processes and devices.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from lockstep.backends.base import AveragesState, Backend, Node, Work
from lockstep.core import tree
from lockstep.core.averaged_state import QueueGuard
from lockstep.core.batches import Rows, count
from lockstep.core.layout import Layout
from lockstep.core.metrics import DIVIDED, WEIGHT, Sums
from lockstep.core.plan import Plan
from lockstep.core.time_breakdown import Stopwatch
from lockstep.errors import NonFiniteError, PeerFailed
from lockstep.exchange.base import Exchange
from lockstep.launch.signals import defer_interrupts

ReadRows = Callable[[Sequence[Rows]], Sequence[Any]]
TURN = threading.RLock()  # random number generators and switches are the process's: one trainer computes at a time


@dataclass
class StepResult:
    """The result of a step that was committed."""

    step: int
    sums: Sums
    total: Node | None  # the summed gradient; None once the next step has begun, so that its memory is free


class Member:
    """One process of a training: its backend, the replicas it holds, and its exchange with the other processes.

    `read_rows` gives the examples of rows of a pipeline; without it, batches arrive whole. `turn` is held while the
    process computes, and never while it reads: the code that makes the examples may be waiting for it.
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
        self._open_exchange = open_exchange
        self._exchange: Exchange | None = None
        self._plan: Plan | None = None
        self._read_rows = read_rows
        self._turn = turn
        self._queue_guard = QueueGuard()

    def step(self, work: Work, plan: Plan | None, count_step: Callable[[], None] = lambda: None) -> StepResult:
        """Make one step; `plan` is that of the step before if it is None.

        Until the commit nothing of the state has changed, so a failure anywhere leaves every replica as it was. From
        the commit on every replica applies the update. `count_step` is called once it is applied, before an interrupt
        that came meanwhile is raised: the step counts, although this method does not return. An update that raises in
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

        with self._turn:
            try:
                with backend.computing(work):
                    # 2. Compute: each shard alone, from the same parameters, with random numbers of its own. Shards
                    # are never merged into one call, because kernels give other bits for other shapes.
                    # 3. Weigh: the backend multiplies a shard's loss by its part of the batch's examples; a loss with
                    # a denominator of its own is summed, and the exchange divides the gradient once, after the tree.
                    # 4. Add: a partial sum is merged with its neighbour as soon as both are there, which needs about
                    # log2(shards) of them in memory. The order is the tree's, whoever computed which shard.
                    layout = backend.layout()
                    folds = []
                    fold_of_shard = {}
                    into: dict[int, Node] = {}
                    for replica, pieces in work.pieces.items():
                        program = tree.program(pieces, work.num_shards)
                        fold = _Fold(program, exchange.slots(replica, program.slots, layout), backend)
                        folds.append(fold)
                        fold_of_shard.update(dict.fromkeys(pieces, fold))
                        into.update(fold.leaf_slots())
                    with closing(backend.leaves(work, into)) as leaves:  # what it borrowed is given back, come what may
                        check_leaf = self._begin_check(work, layout)
                        for shard, leaf in leaves:
                            if check_leaf is not None:
                                check_leaf(shard, leaf)
                            fold_of_shard[shard].push(shard, leaf)
                    self.laps.lap("compute")
                    nodes = {node: value for fold in folds for node, value in fold.nodes()}
                    total, sums = exchange.reduce(nodes, work)
                    if sums[DIVIDED] and not sums[WEIGHT]:
                        raise NonFiniteError(
                            f"The weights of a batch do not sum to 0. Got 0 in step {work.step}: every target is "
                            "ignored or has weight 0, or weights of both signs cancel. Leave such batches out."
                        )
            except PeerFailed:  # this process has met the others already
                raise
            except BaseException:
                exchange.fail()
                raise

            # An interrupt waits from the commit to the end of the update: half an update would be another state.
            # `computing` is entered again because the check above must be able to fail outside of this block.
            with defer_interrupts(), backend.computing(work):
                # 5. Commit: returns once every process has the sums. From here on the step counts, so it comes before
                # the update, which all then apply side by side without waiting for one another.
                exchange.commit()
                self.laps.lap("exchange")

                # 6. Update: the same on every replica, from the summed gradient alone.
                backend.update(total, work)
                count_step()
                self.laps.lap("update")
        return StepResult(work.step, sums, total)

    @contextmanager
    def computing(self, work: Work) -> Iterator[None]:
        """Inside, this process computes outside of a step, e.g. an evaluation."""
        with self._turn, self.backend.computing(work):
            yield

    def read(self, work: Work) -> Work:
        """Return the work with the examples of its rows."""
        return work if self._read_rows is None else read_examples(work, self._read_rows)

    def close(self) -> None:
        """Let go of the memory for partial sums."""
        if self._exchange is not None:
            self._exchange.close()

    def _begin_check(self, work: Work, layout: Layout) -> Callable[[int, Node], None] | None:
        """Return what refuses queues in the leaves of this step; None if no check is due."""
        backend = self.backend
        # With one shard nothing is averaged.
        if work.num_shards == 1 or not self._queue_guard.is_due() or not isinstance(backend, AveragesState):
            return None
        shards, averaged = work.shards, backend.averaged

        def check(shard: int, leaf: Node) -> None:
            fraction = count(shards[shard]) / work.num_examples
            self._queue_guard.check(leaf, fraction, layout, averaged, backend.host)

        return check

    def _choose_exchange(self, plan: Plan | None) -> Exchange:
        """Return the exchange; it is opened here alone, with the first step and whenever the plan changes."""
        if plan is not None and plan != self._plan:
            self._exchange, self._plan = self._open_exchange(plan), plan
        assert self._exchange is not None
        return self._exchange


def read_examples(work: Work, read_rows: ReadRows) -> Work:
    """Return the work with the examples of its rows, if its shards are those of a pipeline's batch."""
    rows = {shard: piece for shard, piece in work.shards.items() if isinstance(piece, Rows)}
    if not rows:
        return work
    examples = dict(zip(rows, read_rows(list(rows.values())), strict=True))
    pieces = {
        replica: {shard: examples.get(shard, piece) for shard, piece in own.items()}
        for replica, own in work.pieces.items()
    }
    return replace(work, pieces=pieces)


class _Fold:
    """The partial sums of one replica: leaves come in, and are merged as far as the tree allows."""

    def __init__(self, program: tree.MergeProgram, slots: Sequence[Node], backend: Backend) -> None:
        self._program = program
        self._actions = iter(program.actions)
        self._slots = list(slots)
        self._backend = backend
        self._next: tree.Write | tree.Merge | None = next(self._actions, None)

    def leaf_slots(self) -> Iterator[tuple[int, Node]]:
        """Yield each shard with the memory that its leaf may be written into."""
        for action in self._program.actions:
            if isinstance(action, tree.Write):
                yield action.shard, self._slots[action.slot]

    def push(self, shard: int, leaf: Node) -> None:
        """Take the leaf of a shard, and make the merges that follow it."""
        write = self._next
        assert isinstance(write, tree.Write)
        assert write.shard == shard, f"shard {shard} came in the place of shard {write.shard}"
        self._slots[write.slot] = leaf
        self._next = next(self._actions, None)
        while isinstance(merge := self._next, tree.Merge):
            left = self._slots[merge.left]
            self._slots[merge.left] = self._backend.add(left, self._slots[merge.right], left)
            self._next = next(self._actions, None)

    def nodes(self) -> Iterator[tuple[tree.Span, Node]]:
        """Yield the partial sums that are left, each with the range of shards it covers."""
        for node, slot in self._program.spans.items():
            yield node, self._slots[slot]
