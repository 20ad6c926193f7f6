"""Passes: the shards of one command on their devices, all started before anybody waits for one.

Shards go in rounds, one on every device. A batch of one shard makes its whole step in
one program: there is nothing to add, and only one device that could compute it.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from lockstep.backends.base import Work
from lockstep.backends.jax import rng
from lockstep.backends.jax.batches import Place, rounds
from lockstep.backends.jax.lazy_sums import Lazy, Leaf, Round, Total
from lockstep.backends.jax.replicas import Replicas
from lockstep.backends.jax.shards import Found, Shards
from lockstep.backends.jax.sums import Reader
from lockstep.backends.jax.vector_fields import Fields
from lockstep.core.batches import leaves
from lockstep.core.metrics import Sums
from lockstep.core.outputs import ShardOutputs
from lockstep.core.target_kind import check_labels


class Passes:
    """Forward and backward passes of shards, from the state of the replicas."""

    def __init__(self, replicas: Replicas, shards: Shards, outputs: ShardOutputs | None = None) -> None:
        self.shards = shards
        self.reader = Reader(outputs)
        self.found: Found | None = None  # of the shard started last
        self._replicas = replicas
        self._last: Total | None = None  # of the step before, where it was one program

    def leaves(self, work: Work, fields: Fields, clip: float | None) -> dict[int, Lazy]:
        """The leaf of every shard."""
        self.reader.begin()
        if not self._replicas.sums_matter and work.num_shards == 1:
            ((_, only),) = self._places(work)
            return {only.shard: self._stepped(work, only, fields, clip)}
        executables = self._replicas.executables
        leaves: dict[int, Lazy] = {}
        for places in rounds(self._pieces(work)):
            vectors: list[Any] = [None] * len(places)
            one = Round({}, partial(self.reader.step, work, fields))
            for row, place in enumerate(places):
                if place is not None:
                    alone = work.num_shards == 1
                    run, found = executables.gradient(self.shards, place, alone, work.summed, fields)
                    share = self._replicas.scalar(place.examples / work.num_examples)
                    vectors[row], values = self._run(run, row, place, work, share, np.asarray(place.shard == 0))
                    _check_labels(found, place)
                    one.started[row] = place, values, found
                    self.found = found
                    leaves[place.shard] = Leaf(fields.layout, one, row, executables.total)
            one.vectors = executables.joined(vectors, fields.lengths)
        return leaves

    def _stepped(self, work: Work, place: Place, fields: Fields, clip: float | None) -> Total:
        """The only shard's total, with the state to which it leads; its gradient is computed where one asks for it."""
        executables = self._replicas.executables
        params, rest, state = self._replicas.copies[0]
        key = rng.of(work, place.shard)
        run, leaf, found = executables.step(self.shards, place, work.summed, fields, self._replicas.optimizer, clip)
        sums, arrays, *after = run(0, params, rest, state, place.arrays, key)
        _check_labels(found, place)
        if self._last is not None:
            self._last.forget()  # now, while the device is busy: a hundred arrays go, and nobody waits for that

        def gradient() -> Any:
            state = self._replicas.copies[0][2]  # a leaf needs none; that of then would only take memory
            return leaf(0, params, rest, state, arrays, key)

        total = Total(fields.layout, gradient, partial(self.reader.step, work, fields, place, sums, found))
        self._replicas.expect(total, [tuple(after)])
        self._last = total
        return total

    def evaluate(self, work: Work) -> Iterator[tuple[int, Sums]]:
        """Loss and metrics of each shard, without training."""
        started = []
        self.reader.begin()
        for row, place in self._places(work):
            run, found = self._replicas.executables.sums(self.shards, place, work.summed)
            share = self._replicas.scalar(place.examples / work.num_examples)
            started.append((place, self._run(run, row, place, work, share), found))
            _check_labels(found, place)
        for place, values, found in started:
            yield place.shard, self.reader.read(work, place, values, found)

    def forward(self, work: Work) -> Iterator[tuple[int, Any]]:
        """The outputs of each shard, without training."""
        started = []
        for row, place in self._places(work):
            outputs = self._run(self._replicas.executables.outputs(self.shards, place.form), row, place, work)
            started.append((place.shard, outputs))
        yield from started

    def _pieces(self, work: Work) -> list[dict[int, Any]]:
        """The shards of every device, those of its replicas together."""
        result: list[dict[int, Any]] = [{} for _ in set(self._replicas.rows)]
        for row, pieces in zip(self._replicas.rows, work.pieces.values(), strict=True):
            result[row].update(pieces)
        return result

    def _places(self, work: Work) -> Iterator[tuple[int, Place]]:
        """Every shard with the row of its device, the devices in turn."""
        for places in rounds(self._pieces(work)):
            yield from ((row, place) for row, place in enumerate(places) if place is not None)

    def _run(self, program: Any, row: int, place: Place, work: Work, *more: Any) -> Any:
        """One shard on the device of its row.

        Its arrays are the host's: the program itself brings them there, in a fraction of the time that `device_put`
        takes. It reads them in place or, where they are not aligned, from a copy; when a step ends it has read them.
        """
        params, rest, _ = self._replicas.copies[row]
        return program(row, params, rest, place.arrays, rng.of(work, place.shard), *more)


def _check_labels(found: Found, place: Place) -> None:
    """Refuses labels outside the classes, while the device computes: what it gives is not taken over then."""
    if found.labels is not None:
        _, labels, *weights = place.form.filled(place.arrays)
        for each in leaves(labels):
            check_labels(each, *found.labels, *weights)
