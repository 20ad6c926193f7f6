"""Readers, which compute the examples to which the `Rows` of a pipeline refer, in one process.

With `.prefetch` a reader also starts to compute the rows that will probably be read next: the same shards of the next
batches. A wrong guess only costs time. Arrays are gathered in a thread; the script's code runs in this process or in
reader processes.
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
from lockstep.data.compiled_pipeline import CompiledPipeline
from lockstep.data.map_stage import MapStage
from lockstep.data.pipeline_inputs import Arrays
from lockstep.data.reader_processes import ReaderPool
from lockstep.errors import WorkerError

Indices = NDArray[np.int64]
Unit = tuple[Rows, ...]  # rows that are computed together


class PipelineReader:
    """Reads the examples of one pipeline. `place` is (index of this process on its host, number of processes there).

    `stage` is applied to each batch that is read, for example to copy it to a device.
    """

    def __init__(
        self,
        pipeline: CompiledPipeline,
        stage: Callable[[Any], Any] = lambda piece: piece,
        place: tuple[int, int] = (0, 1),
    ) -> None:
        index, count = place
        self._pipeline = pipeline
        self._stage = stage
        # The processes of a host share the number of reader processes given as `workers=`, with at least one each.
        self._num_workers = max(1, plan.sizes(pipeline.workers, count)[index]) if pipeline.workers else 0
        self._lock = threading.Lock()
        has_threads = self._num_workers or pipeline.num_prefetched
        self._threads = _Threads(max(1, self._num_workers)) if has_threads else None
        self._started: dict[Unit, Future[list[Any]]] = {}  # the prefetched units
        self._pool: ReaderPool | None = None
        self._finalizer = weakref.finalize(self, _Threads.close, self._threads) if self._threads else None

    def read(self, pieces: Sequence[Rows]) -> list[Any]:
        """Returns the batch of each piece, and starts to prefetch the next pieces."""
        keys = tuple(_remove_pipeline(piece) for piece in pieces)
        if self._threads is None:
            return self._compute(keys)
        # With several reader processes each piece is a separate unit, so that the processes work at the same time.
        units = [(key,) for key in keys] if self._num_workers > 1 else [keys]
        futures = [self._start(unit, self._started) for unit in units]
        self._prefetch(units)
        return [piece for future in futures for piece in future.result()]

    def close(self) -> None:
        """Ends the threads and reader processes. May be called again."""
        for future in self._started.values():
            future.cancel()
        self._started = {}
        try:
            if self._finalizer is not None:
                self._finalizer()
        finally:  # also if Ctrl-C ends the wait for the threads, which run the script's code
            if self._pool is not None:
                self._pool.close()
                self._pool = None

    def run(self, number: int, below: Any, indices: Indices, epochs: Indices) -> Any:
        """Runs the map stage with this number on the result of the stage below, in a reader process if possible."""
        if not self._num_workers:
            return self._pipeline.map_stages[number].run(below, indices, epochs)
        with self._lock:
            if self._pool is None:
                self._pool = ReaderPool(self._pipeline.map_stages, self._num_workers)
            pool = self._pool
        try:
            return pool.run(number, below, indices, epochs)
        except WorkerError:  # a reader process has died: the next read starts new ones
            with self._lock:
                if self._pool is pool:
                    self._pool = None
            pool.close()
            raise

    def submit(self, function: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        """Calls the function in a thread of this reader, and returns the future of its result."""
        assert self._threads is not None
        return self._threads.submit(function, *arguments)

    @property
    def has_threads(self) -> bool:
        """Whether `.prefetch` has given this reader threads, which `submit` needs."""
        return self._threads is not None

    def _start(self, unit: Unit, started: "dict[Unit, Future[list[Any]]]") -> "Future[list[Any]]":
        """Returns the future of a unit: takes it out of `started`, or, if it is not there, starts to compute it."""
        return started.pop(unit) if unit in started else self.submit(self._compute, unit)

    def _prefetch(self, units: Sequence[Unit]) -> None:
        """Starts to compute the units that come next, and cancels prefetched units that are not among these."""
        old, self._started = self._started, {}
        for _ in range(self._pipeline.num_prefetched):
            units = [tuple(self._pipeline.get_next(piece) for piece in unit) for unit in units]
            for guess in (tuple(piece for piece in unit if len(piece)) for unit in units):
                if guess:
                    self._started[guess] = self._start(guess, old)
        for future in old.values():
            future.cancel()

    def _compute(self, pieces: Unit) -> list[Any]:
        """Returns the batches of the pieces.

        The last map stage runs for each piece separately, because a function after `.batch` gets a whole shard. The
        stages before it run once for all pieces.
        """
        stages = self._pipeline.stages
        top = stages[-1] if stages and isinstance(stages[-1], MapStage) else None
        epochs, indices = self._pipeline.locate(pieces)
        together = self._compute_stages(len(stages) - (top is not None), epochs, indices)
        result = []
        start = 0
        for piece in pieces:
            own = slice(start, start + len(piece))
            batch = batches.select(together, own)
            if top is not None:
                batch = self.run(top.number, batch, indices[own], epochs[own])
            result.append(self._stage(batches.inputs(batch) if piece.only_inputs else batch))
            start = own.stop
        return result

    def _compute_stages(self, depth: int, epochs: Indices, indices: Indices) -> Any:
        """Returns the batch of these examples after the first `depth` stages."""
        if depth == 0:
            input = self._pipeline.input
            return input.gather(indices) if isinstance(input, Arrays) else None
        stage = self._pipeline.stages[depth - 1]
        if isinstance(stage, Cache):
            num_examples = self._pipeline.input.num_examples
            assert num_examples is not None

            def compute(missing: Indices) -> Any:
                return self._compute_stages(depth - 1, np.zeros_like(missing), missing)  # a cache stores epoch 0

            identity = "" if stage.path is None else self._pipeline.compute_identity(depth - 1)
            return stage.read(indices, Examples(num_examples, identity, compute))
        return self.run(stage.number, self._compute_stages(depth - 1, epochs, indices), indices, epochs)


_Open = weakref.WeakKeyDictionary[Any, tuple[PipelineReader, "weakref.finalize[..., Any]"]]


class Readers:
    """The readers of one process, one for each pipeline.

    A reader is created when the first rows of its pipeline are read. It is closed when the pipeline is
    garbage-collected, or by `close`.
    """

    def __init__(self, stage: Callable[[Any], Any] = lambda piece: piece, place: tuple[int, int] = (0, 1)) -> None:
        self._stage = stage
        self._place = place
        self._open: _Open = weakref.WeakKeyDictionary()
        weakref.finalize(self, _close_all, self._open)

    def read(self, pieces: Sequence[Rows]) -> list[Any]:
        """Returns the batch of each piece; all pieces must be of one pipeline."""
        pipeline = pieces[0].pipeline
        if pipeline not in self._open:
            reader = PipelineReader(pipeline.compiled, self._stage, self._place)
            self._open[pipeline] = reader, weakref.finalize(pipeline, reader.close)
        return self._open[pipeline][0].read(pieces)

    def close(self) -> None:
        """Closes every reader. May be called again; a later `read` creates a new reader."""
        _close_all(self._open)


def _close_all(readers: _Open) -> None:
    for _, finalizer in list(readers.values()):
        finalizer()
    readers.clear()


class _Threads:
    """A thread pool that any thread can close, including the threads of the pool."""

    def __init__(self, count: int) -> None:
        self._executor = ThreadPoolExecutor(count, thread_name_prefix="lockstep-reader")

    def submit(self, function: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        return self._executor.submit(function, *arguments)

    def close(self) -> None:
        # The garbage collector may call this in a thread of the pool, which cannot wait for itself.
        is_own = threading.current_thread() in self._executor._threads
        self._executor.shutdown(wait=not is_own, cancel_futures=True)


def _remove_pipeline(piece: Rows) -> Rows:
    """Returns the piece without its pipeline, because a reader that refers to its pipeline would keep it alive."""
    return Rows(None, piece.epoch, piece.batch, piece.num_examples, piece.shard, piece.num_shards, piece.only_inputs)
