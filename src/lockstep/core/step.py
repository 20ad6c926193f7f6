"""One step: leaves, tree, update.

Every process runs this same code over its own shards. What it computes follows
from the shards; the exchange only brings the partial sums together.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lockstep.core import digest, tree
from lockstep.core.batches import Rows, count, transform
from lockstep.core.metrics import DIVIDED, WEIGHT, Sums
from lockstep.core.reduction import Reduction, judge
from lockstep.core.time_breakdown import Stopwatch
from lockstep.errors import NonFiniteError, PeerFailed

if TYPE_CHECKING:
    from lockstep.backends.base import Array, Backend, Node, Work
    from lockstep.exchange.base import Exchange


Read = Callable[[Sequence[Rows]], Sequence[Any]]
TURN = threading.RLock()  # a framework's generators and switches belong to the process: one trainer computes at a time


class Member:
    """This process's part in the world: its replicas, and the exchange with the others, which may be replaced.

    `read` gives the examples of rows; without it, batches arrive whole. `turn` is held while it computes, never while
    it reads: whoever makes the examples may be waiting for it.
    """

    def __init__(
        self,
        backend: "Backend",
        exchange: "Exchange",
        uninterrupted: Callable[[], AbstractContextManager[Any]],
        clock: Callable[[], float],
        read: Read | None = None,
        turn: AbstractContextManager[Any] = TURN,
    ) -> None:
        self.backend = backend
        self.exchange = exchange
        self.laps = Stopwatch(clock)
        self._uninterrupted = uninterrupted
        self._read = read
        self._turn = turn
        self.total: Node = {}
        self.committed = False  # whether the last step was

    def step(self, work: "Work") -> Sums:
        """Makes one step and gives the sums of the whole batch.

        Until the commit nothing of the state has changed, so a failure anywhere
        leaves every replica as it was. From the commit on every replica applies
        the update, and an interrupt waits until it is done. An update that raises
        in one process leaves that replica behind the others; the step does not
        count there, and the team brings the replicas together before the next.
        """
        self.committed = False
        self.laps.start()
        try:
            work = self._filled(work)
            self.laps.lap("input")
        except BaseException:
            self.exchange.fail()
            raise
        with self._turn:
            return self._made(work)

    def _made(self, work: "Work") -> Sums:
        try:
            with self.backend.computing(work):
                total, sums = self._reduced(work)
        except PeerFailed:
            raise
        except BaseException:
            self.exchange.fail()
            raise
        with self._uninterrupted(), self.backend.computing(work):
            self.exchange.commit()
            self.laps.lap("exchange")
            self.backend.update(total, work)
            self.total, self.committed = total, True
            self.laps.lap("update")
        return sums

    def _reduced(self, work: "Work") -> "tuple[Node, Sums]":
        """The gradient and the sums of the whole batch."""
        nodes = self._nodes(work)
        self.laps.lap("compute")
        total, sums = self.exchange.reduce(nodes, work)
        if sums[DIVIDED] and not sums[WEIGHT]:
            raise NonFiniteError(
                f"The weights of a batch do not sum to 0. Got 0 in step {work.step}: every target is ignored or has "
                "weight 0, or weights of both signs cancel. Leave such batches out."
            )
        return total, sums

    def _nodes(self, work: "Work") -> "dict[tree.Span, Node]":
        """The partial sums of this process: every leaf computed, every merge made that the tree allows."""
        layout = self.backend.layout(work.phase)
        folds = {}
        into = {}
        for replica, pieces in work.pieces.items():
            program = tree.program(pieces, work.num_shards)
            slots = self.exchange.slots(replica, program.slots, layout)
            folds.update(dict.fromkeys(pieces, _Fold(program, slots, self.backend.add)))
            into.update({action.shard: slots[action.slot] for action in _writes(program)})
        with closing(self.backend.leaves(work, into)) as leaves:  # gives back what it borrowed, whatever happens
            for shard, leaf in leaves:
                folds[shard].push(leaf)
        return {node: value for fold in folds.values() for node, value in fold.nodes.items()}

    def evaluate(self, work: "Work") -> dict[int, Sums]:
        """The sums of this process's shards, without training."""
        work = self._filled(work)
        with self._turn, self.backend.computing(work):
            return dict(self.backend.evaluate(work))

    def forward(self, work: "Work") -> dict[int, Any]:
        """The outputs of this process's shards, without training."""
        work = self._filled(work)
        with self._turn, self.backend.computing(work):
            return dict(self.backend.forward(work))

    def read_reduction(self, work: "Work") -> Reduction | None:
        """Judges the loss by the outputs of the first shard, in evaluation mode; the state stays as it is.

        None if this batch's loss is 0, which tells nothing.

        With example weights the loss is a mean by them. What raises here is left for the step to raise.
        """
        backend, criterion = self.backend, self.backend.criterion
        piece = self._filled(work).shards[0]
        if criterion is None or not (isinstance(piece, tuple) and len(piece) == 2):
            return Reduction.MEAN
        inputs, targets = piece
        ahead = replace(work, pieces={replica: {0: inputs} if 0 in own else {} for replica, own in work.pieces.items()})
        with self._turn:
            try:
                with backend.computing(ahead):
                    outputs = dict(backend.forward(ahead))[0]
                    return judge(criterion, outputs, transform(targets, backend.host), count(inputs))
            except Exception:
                return Reduction.ASSUMED

    def outputs(self, work: "Work") -> dict[int, Any]:
        """The outputs and targets of the shards that this process computed last, where the backend keeps them."""
        kept: dict[int, Any] = self.backend.outputs.take()  # type: ignore[attr-defined]  # only a KeepsOutputs is asked
        return kept

    def digests(self, work: "Work") -> dict[int, dict[str, str]]:
        """The digest of every array of the state, as each of this process's replicas has it."""
        return dict(zip(work.pieces, digest.hash_copies(self.backend.copies()), strict=True))

    def copies(self, work: "Work") -> "dict[int, Array]":
        """The array that a batch names, as each of this process's replicas has it."""
        name = next(iter(work.shards.values()))[1]
        return {replica: copy[name] for replica, copy in zip(work.pieces, self.backend.copies(), strict=True)}

    def times(self, work: "Work") -> dict[int, dict[str, float]]:
        """Where the time of the steps since the last question went."""
        return {min(work.pieces): self.laps.take()}

    def _filled(self, work: "Work") -> "Work":
        """The work with the examples of its rows."""
        return work if self._read is None else filled(work, self._read)


def filled(work: "Work", read: Read) -> "Work":
    """The work with the examples of its rows, where these are the shards of a pipeline's batch."""
    rows = {shard: piece for shard, piece in work.shards.items() if isinstance(piece, Rows)}
    if not rows:
        return work
    found = dict(zip(rows, read(list(rows.values())), strict=True))
    pieces = {
        replica: {shard: found.get(shard, piece) for shard, piece in own.items()}
        for replica, own in work.pieces.items()
    }
    return replace(work, pieces=pieces)


class _Fold:
    """A program being run: leaves come in, merges are made as soon as both sides are there."""

    def __init__(
        self, program: tree.MergeProgram, slots: "list[Node]", add: "Callable[[Node, Node, Node], Node]"
    ) -> None:
        self._actions = list(program.actions)
        self._slots = list(slots)
        self._add = add
        self._nodes = program.spans

    def push(self, leaf: "Node") -> None:
        write = self._actions.pop(0)
        assert isinstance(write, tree.Write)
        self._slots[write.slot] = leaf
        while self._actions and isinstance(merge := self._actions[0], tree.Merge):
            left = self._slots[merge.left]
            self._slots[merge.left] = self._add(left, self._slots[merge.right], left)
            self._actions.pop(0)

    @property
    def nodes(self) -> "Mapping[tree.Span, Node]":
        return {node: self._slots[slot] for node, slot in self._nodes.items()}


def _writes(program: tree.MergeProgram) -> Iterator[tree.Write]:
    return (action for action in program.actions if isinstance(action, tree.Write))
