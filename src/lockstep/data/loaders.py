"""Loaders: iterables of whole batches, read in the script's own process.

A loader with `state_dict` and `load_state_dict` is resumed with these; of any other iterable, the batches before the
resumed one are read and dropped.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import numpy as np

from lockstep.core import batches, global_rng, huggingface, plain_values
from lockstep.errors import BatchError, ExactError

BY_DROPPING = "by reading and dropping"
BY_STATE = "by its state_dict"
_END = object()
_BACKEND_PACKAGES = ("numpy", "torch", "jax", "jaxlib")  # backends convert these packages' arrays themselves


class IterableSource:
    """Batches of any iterable. A generator can be read only once.

    >>> list(IterableSource([np.zeros(2), np.ones(2)]).epoch(0))
    [array([0., 0.]), array([1., 1.])]
    """

    num_examples: int | None = None
    batch_size: int | None = None
    endless = False
    resumes = BY_DROPPING

    def __init__(self, iterable: Iterable[Any]) -> None:
        self._iterable = iterable
        self.once = iter(iterable) is iterable
        length = getattr(iterable, "__len__", None)
        self.num_steps: int | None = length() if length is not None else None

    def epoch(self, index: int, start: int = 0, state: Any = None) -> Iterator[Any]:
        """Yields the iterable's batches; a generator continues where it stopped."""
        batches = map(convert_batch, islice(iter(self._iterable), start, None))
        return check_not_empty(batches, self.once and index > 0, index)

    def state(self) -> Any:
        """Returns None: an iterable has no state."""
        return None


class StatefulSource:
    """Batches of a loader that can save and load its state."""

    num_examples: int | None = None
    endless = once = False
    resumes = BY_STATE

    def __init__(self, loader: Any, seed: int) -> None:
        self._loader = loader
        self._seed = seed
        self.batch_size: int | None = getattr(loader, "batch_size", None)
        try:
            self.num_steps: int | None = len(loader)
        except TypeError:
            self.num_steps = None
        self._was_loaded = False  # a state was loaded, and no whole epoch has been read since
        self._state_before_load: tuple[Any] | None = None
        self._state_in_resumed: tuple[Any] | None = None  # after the first batch of the resumed epoch
        self._is_saved = False  # checkpoints are written: then the state is read before each batch
        self._before: Any = None
        self._reading = False

    def epoch(self, index: int, start: int = 0, state: Any = None) -> Iterator[Any]:
        """Yields the loader's batches. Its random number generators are seeded from (seed, epoch)."""
        generators = global_rng.seed_loader(self._loader, self._seed, index)
        if state is None:
            batches = self._read(generators, self._begin(generators))
            return map(
                convert_batch, islice(self._check(generators, batches) if self._was_loaded else batches, start, None)
            )
        with generators:
            with suppress(Exception):  # some loaders have no state before they have been read
                self._state_before_load = (self._loader.state_dict(),)
            self._loader.load_state_dict(plain_values.restore_arrays(state))
        if not start:  # the state may contain the loader's generators as the last epoch left them: seed them again
            generators = global_rng.seed_loader(self._loader, self._seed, index)
        self._was_loaded, self._state_in_resumed = True, None
        batches = self._read(generators, self._begin(generators))
        return map(convert_batch, self._store_first_state(batches) if start else self._check(generators, batches))

    def state(self) -> Any:
        """Returns the loader's `state_dict`, with tensors as numpy; after a failed read, the one before it.

        None if that is not known: then the batches before are read and dropped.
        """
        self._is_saved = True
        return self._before if self._reading else self._read_state()

    def _begin(self, generators: global_rng.SeparateGenerators) -> Iterator[Any]:
        with generators:
            return iter(self._loader)

    def _read_state(self) -> Any:
        return plain_values.to_plain(self._loader.state_dict(), "state_dict()", plain_values.mark_array)

    def _read(self, generators: global_rng.SeparateGenerators, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields the batches."""
        iterator = generators.iterate(batches)
        while True:
            self._before = self._read_state() if self._is_saved else None
            self._reading = True
            batch = next(iterator, _END)
            self._reading = False
            if batch is _END:
                return
            yield batch

    def _store_first_state(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields the rest of a resumed epoch, and stores the state after its first batch."""
        for number, batch in enumerate(batches):
            if not number:
                self._state_in_resumed = (self._read_state(),)
            yield batch

    def _check(self, generators: global_rng.SeparateGenerators, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields the first whole epoch after a state was loaded.

        Some loaders start every epoch from the loaded state, not only the next one. For these the state before it is
        loaded again.
        """
        self._was_loaded = False
        first = next(batches, _END)
        if self._is_behind(first) and self._state_before_load is not None:
            with generators:
                self._loader.load_state_dict(self._state_before_load[0])
            batches = self._read(generators, self._begin(generators))
            first = next(batches, _END)
        if self._is_behind(first):
            raise ExactError(
                "Epochs after the resumed one would be short: the loader starts each of them where the checkpoint was "
                "saved, even after load_state_dict() with the state from before. "
                "Let its __iter__ use a loaded state only once, or use a DataLoader."
            )
        yield first
        yield from batches

    def _is_behind(self, first: Any) -> bool:
        """Returns whether an epoch, of which the first batch was just read, starts where the resumed one started."""
        return first is _END or (
            self._state_in_resumed is not None and _is_equal(self._read_state(), self._state_in_resumed[0])
        )


class ForgetfulSource(StatefulSource):
    """Batches of a loader whose `state_dict` is incomplete, so the batches before are read and dropped."""

    resumes = BY_DROPPING

    def epoch(self, index: int, start: int = 0, state: Any = None) -> Iterator[Any]:
        """Yields the loader's batches."""
        return super().epoch(index, start)

    def state(self) -> Any:
        """Returns None: the state is incomplete."""
        return None

    def _read_state(self) -> Any:
        return None


def open_loader(data: Any, seed: int) -> IterableSource | StatefulSource | None:
    """Returns the source for an iterable of batches; None for anything else."""
    if not isinstance(data, Iterable) or isinstance(data, str | bytes):
        return None
    if not hasattr(data, "state_dict") or not hasattr(data, "load_state_dict"):
        return IterableSource(data)
    if not huggingface.is_stream(data):
        return StatefulSource(data, seed)
    if not huggingface.is_batched(data):
        raise BatchError(
            "This Hugging Face IterableDataset yields single examples, and an iterable must yield batches. "
            "Use fit(dataset.batch(32)), or lockstep.data.stream(dataset).batch(32)."
        )
    # Its state leaves out the examples in a shuffle buffer, and applies to every epoch after it was loaded.
    return ForgetfulSource(data, seed)


def convert_batch(batch: Any) -> Any:
    """Returns the batch in tuples and dicts, with arrays that no backend converts as numpy."""

    def convert(value: Any) -> Any:
        if not hasattr(value, "__array__") or any(
            kind.__module__.split(".")[0] in _BACKEND_PACKAGES for kind in type(value).__mro__
        ):
            return value
        return np.asarray(value)

    return batches.transform(batches.top(batch), convert)


def _is_equal(one: Any, other: Any) -> bool:
    """Returns whether two plain states are equal, arrays included."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_equal(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return bool(np.array_equal(one, other))
    return bool(one == other)


def check_not_empty(batches: Iterator[Any], is_second_pass: bool, epoch: int) -> Iterator[Any]:
    """Yields the batches; raises if there are none because the iterable was read in an earlier epoch."""
    is_empty = True
    for batch in batches:
        is_empty = False
        yield batch
    if is_empty and is_second_pass:
        raise BatchError(
            f"Epoch {epoch + 1} has no batch, because a generator can be read only once. "
            "Use a list, a loader or arrays, or epochs=1 or steps_per_epoch."
        )
