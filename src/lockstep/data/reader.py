"""A reader: turns rows of one pipeline into arrays, in one process.

With `.prefetch` it also makes what will be asked for next, which it can tell: the
same shard of the next batch. A wrong guess costs time and nothing else. Gathering
happens on a thread; the script's own code runs in place or in reader processes.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.core import batches, plan
from lockstep.core.batches import Rows
from lockstep.data.cache import Cache, Examples
from lockstep.data.compiled_pipeline import Chain
from lockstep.data.inputs import Arrays
from lockstep.data.map_stage import Segment
from lockstep.data.reader_processes import Pool
from lockstep.errors import WorkerError

Indices = NDArray[np.int64]
Unit = tuple[Rows, ...]  # pieces that are made in one go


class Reader:
    """The open end of a chain. `place` is this process's number, and the count, of those on its host."""

    def __init__(
        self, chain: Chain, stage: Callable[[Any], Any] = lambda piece: piece, place: tuple[int, int] = (0, 1)
    ) -> None:
        index, count = place
        self._chain = chain
        self._stage = stage
        self._num_workers = max(1, plan.sizes(chain.workers, count)[index]) if chain.workers else 0
        self._lock = threading.Lock()
        self._hands = _Hands(max(1, self._num_workers)) if self._num_workers or chain.ahead else None
        self._ahead: dict[Unit, Future[list[Any]]] = {}  # what is being made
        self._pool: Pool | None = None
        self._finalizer = weakref.finalize(self, _Hands.close, self._hands) if self._hands else None

    def read(self, pieces: Sequence[Rows]) -> list[Any]:
        """The arrays of each piece."""
        keys = tuple(_key(piece) for piece in pieces)
        if self._hands is None:
            return self._made(keys)
        # Where several readers share the work, they share pieces.
        units = [(key,) for key in keys] if self._num_workers > 1 else [keys]
        wanted = [self._begun(unit, self._ahead) for unit in units]
        self._look_ahead(units)
        return [piece for future in wanted for piece in future.result()]

    def close(self) -> None:
        """Ends threads and reader processes. Idempotent."""
        for future in self._ahead.values():
            future.cancel()
        self._ahead = {}
        if self._finalizer is not None:
            self._finalizer()
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def run(self, number: int, below: Any, indices: Indices, epochs: Indices) -> Any:
        """What the numbered segment makes of what lies below, in a reader process where there are any."""
        if not self._num_workers:
            return self._chain.segments[number].run(below, indices, epochs)
        with self._lock:
            if self._pool is None:
                self._pool = Pool(self._chain.segments, self._num_workers)
            pool = self._pool
        try:
            return pool.run(number, below, indices, epochs)
        except WorkerError:  # a reader is lost: the next read starts new ones
            with self._lock:
                if self._pool is pool:
                    self._pool = None
            pool.close()
            raise

    def submit(self, function: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        """Has a thread of this reader call the function."""
        assert self._hands is not None
        return self._hands.submit(function, *arguments)

    @property
    def threaded(self) -> bool:
        """Whether there are threads to submit to."""
        return self._hands is not None

    def _begun(self, unit: Unit, ahead: "dict[Unit, Future[list[Any]]]") -> "Future[list[Any]]":
        """What was begun ahead of time, taken out; else begun now."""
        return ahead.pop(unit) if unit in ahead else self.submit(self._made, unit)

    def _look_ahead(self, units: Sequence[Unit]) -> None:
        """Begins what comes next, and forgets what was guessed wrong."""
        old, self._ahead = self._ahead, {}
        for _ in range(self._chain.ahead):
            units = [tuple(self._chain.next(piece) for piece in unit) for unit in units]
            for guess in (tuple(piece for piece in unit if len(piece)) for unit in units):
                if guess:
                    self._ahead[guess] = self._begun(guess, old)
        for future in old.values():
            future.cancel()

    def _made(self, pieces: Unit) -> list[Any]:
        """The pieces; what does not see whole shards is done for all of them at once."""
        stages = self._chain.stages
        top = stages[-1] if stages and isinstance(stages[-1], Segment) else None
        epochs, indices = self._chain.places(pieces)
        whole = self._value(len(stages) - (top is not None), epochs, indices)
        result = []
        start = 0
        for piece in pieces:
            own = slice(start, start + len(piece))
            batch = batches.select(whole, own)
            if top is not None:
                batch = self.run(top.number, batch, indices[own], epochs[own])
            result.append(self._stage(batches.inputs(batch) if piece.only_inputs else batch))
            start = own.stop
        return result

    def _value(self, depth: int, epochs: Indices, indices: Indices) -> Any:
        """The batch after so many stages."""
        if depth == 0:
            base = self._chain.base
            return base.gather(indices) if isinstance(base, Arrays) else None
        stage = self._chain.stages[depth - 1]
        if isinstance(stage, Cache):
            num_examples = self._chain.base.num_examples
            assert num_examples is not None

            def compute(missing: Indices) -> Any:
                return self._value(depth - 1, np.zeros_like(missing), missing)

            known = "" if stage.path is None else self._chain.identity(depth - 1)
            return stage.read(indices, Examples(num_examples, known, compute))
        return self.run(stage.number, self._value(depth - 1, epochs, indices), indices, epochs)


class _Hands:
    """Threads that end when told to, also by one of themselves."""

    def __init__(self, count: int) -> None:
        self._executor = ThreadPoolExecutor(count, thread_name_prefix="lockstep-reader")

    def submit(self, function: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        return self._executor.submit(function, *arguments)

    def close(self) -> None:
        own = threading.current_thread() in self._executor._threads  # the collector of garbage may run in any thread
        self._executor.shutdown(wait=not own, cancel_futures=True)


def _key(piece: Rows) -> Rows:
    """The piece without its pipeline, which a reader must not keep alive."""
    return Rows(None, piece.epoch, piece.batch, piece.num_examples, piece.shard, piece.num_shards, piece.only_inputs)
