"""Sources that read a loader, which is an iterable of whole batches, in the script's process.

A resumed run restores the state of a loader that has `state_dict` and `load_state_dict`, or whose iterators have
`get_state` and `set_state`, as those of grain have. For any other loader it reads and drops the batches before the one
at which it resumes.
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
BY_ITERATOR = "by its iterator's state"
BY_DROPPING_REFUSED = "by reading and dropping, because its iterator refused the saved state"
_END = object()
_BYTES = "lockstep.bytes"  # the key of a state that is bytes, which a checkpoint stores as an array
_BACKEND_PACKAGES = ("numpy", "torch", "jax", "jaxlib")  # backends convert these packages' arrays themselves


class IterableSource:
    """A source that reads the batches of any iterable; a generator can be read only once.

    >>> list(IterableSource([np.zeros(2), np.ones(2)]).epoch(0))
    [array([0., 0.]), array([1., 1.])]
    """

    num_examples: int | None = None
    batch_size: int | None = None
    endless = False
    resumes = BY_DROPPING

    def __init__(self, iterable: Iterable[Any], iterator: Any = None) -> None:
        """Takes an iterator that was opened already: a loader that shuffles draws whenever one is opened."""
        self._iterable = iterable
        self.once = (iter(iterable) if iterator is None else iterator) is iterable
        length = getattr(iterable, "__len__", None)
        self.num_steps: int | None = length() if length is not None else None

    def epoch(self, index: int, start: int = 0, state: Any = None) -> Iterator[Any]:
        """Yields the batches of the iterable. A generator continues after the last batch of the previous epoch."""
        batches = map(convert_batch, islice(iter(self._iterable), start, None))
        return check_not_empty(batches, self.once and index > 0, index)

    def state(self) -> Any:
        """Returns None, because an iterable has no state."""
        return None


class IteratorStateSource(IterableSource):
    """A source that reads a loader whose iterators can save and load their state, as those of grain can.

    Every epoch has an iterator of its own, so a loaded state affects no later epoch.
    """

    resumes = BY_ITERATOR

    def __init__(self, iterable: Iterable[Any], iterator: Any = None) -> None:
        super().__init__(iterable, iterator)
        self._iterator: Any = None  # of the epoch that is being read
        self._is_reading = False

    def epoch(self, index: int, start: int = 0, state: Any = None) -> Iterator[Any]:
        """Yields the batches of one epoch; continues from the saved state, or else drops the first `start` batches."""
        iterator = iter(self._iterable)
        if start and state is not None:
            try:
                iterator.set_state(_restore_bytes(state))  # type: ignore[attr-defined]
                start = 0
            except Exception:  # grain compares reprs, which may have an address; reading and dropping is exact, too
                iterator, self.resumes = iter(self._iterable), BY_DROPPING_REFUSED
        self._iterator = iterator
        return check_not_empty(map(convert_batch, islice(self._read(iterator), start, None)), False, index)

    def _read(self, iterator: Iterator[Any]) -> Iterator[Any]:
        while True:
            self._is_reading = True
            batch = next(iterator, _END)
            self._is_reading = False
            if batch is _END:
                return
            yield batch

    def state(self) -> Any:
        """Returns the state of the iterator; None if the last read failed, so that a resumed run reads and drops."""
        if self._iterator is None or self._is_reading:
            return None
        state = self._iterator.get_state()
        if isinstance(state, bytes):
            return {_BYTES: np.frombuffer(state, np.uint8)}
        return plain_values.to_plain(state, "get_state()", plain_values.mark_array)


def _restore_bytes(state: Any) -> Any:
    if isinstance(state, dict) and _BYTES in state:
        return state[_BYTES].tobytes()
    return plain_values.restore_arrays(state)


class StatefulSource:
    """A source that reads the batches of a loader which can save and load its state."""

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
        self._was_loaded = False  # whether a state was loaded and no complete epoch has been read since
        self._state_before_load: tuple[Any] | None = None
        self._state_in_resumed: tuple[Any] | None = None  # the state after the first batch of the resumed epoch
        self._is_saved = False  # whether checkpoints are written, so that the state is read before each batch
        self._before: Any = None
        self._reading = False

    def epoch(self, index: int, start: int = 0, state: Any = None) -> Iterator[Any]:
        """Yields the loader's batches, with its random number generators seeded from (seed, epoch)."""
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
        """Returns the loader's `state_dict` with tensors as numpy arrays.

        If the last read failed, this is the state before the read, or None if that state is not known. A run that
        resumes with None reads and drops the batches before the one at which it resumes.
        """
        self._is_saved = True
        return self._before if self._reading else self._read_state()

    def _begin(self, generators: global_rng.SeparateGenerators) -> Iterator[Any]:
        with generators:
            return iter(self._loader)

    def _read_state(self) -> Any:
        return plain_values.to_plain(self._loader.state_dict(), "state_dict()", plain_values.mark_array)

    def _read(self, generators: global_rng.SeparateGenerators, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields the batches, reading each with the random number generators `generators`.

        If checkpoints are written, stores the loader's state before each read, which `state` returns if the read fails.
        """
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
        """Yields the remaining batches of a resumed epoch; stores the loader's state after the first of them."""
        for number, batch in enumerate(batches):
            if not number:
                self._state_in_resumed = (self._read_state(),)
            yield batch

    def _check(self, generators: global_rng.SeparateGenerators, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields the batches of the first complete epoch after a state was loaded.

        Some loaders start every later epoch from the loaded state too. Then the state from before it is loaded again,
        and ExactError is raised if the epoch still does not start at its beginning.
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
                "The epochs after the resumed epoch would be incomplete, because this loader starts each of them at "
                "the batch where the checkpoint was saved. Change the loader's __iter__ so that a state from "
                "load_state_dict() is used only once, or use a DataLoader."
            )
        yield first
        yield from batches

    def _is_behind(self, first: Any) -> bool:
        """Returns whether this epoch, of which `first` has been read, starts at the batch of the resumed epoch."""
        return first is _END or (
            self._state_in_resumed is not None and _is_equal(self._read_state(), self._state_in_resumed[0])
        )


class ForgetfulSource(StatefulSource):
    """A source for a loader whose `state_dict` is incomplete; a resumed run reads and drops the earlier batches."""

    resumes = BY_DROPPING

    def epoch(self, index: int, start: int = 0, state: Any = None) -> Iterator[Any]:
        """Yields the loader's batches."""
        return super().epoch(index, start)

    def state(self) -> Any:
        """Returns None, because the loader's state is incomplete."""
        return None

    def _read_state(self) -> Any:
        return None


def open_loader(data: Any, seed: int) -> IterableSource | StatefulSource | None:
    """Returns the source for an iterable of batches; None if `data` is not iterable."""
    if not isinstance(data, Iterable) or isinstance(data, str | bytes):
        return None
    if not hasattr(data, "state_dict") or not hasattr(data, "load_state_dict"):
        iterator = iter(data)
        has_state = iterator is not data and hasattr(iterator, "get_state") and hasattr(iterator, "set_state")
        return (IteratorStateSource if has_state else IterableSource)(data, iterator)
    if not huggingface.is_stream(data):
        return StatefulSource(data, seed)
    if not huggingface.is_batched(data):
        raise BatchError(
            "This Hugging Face IterableDataset yields single examples, and fit needs batches. Use "
            "fit(dataset.batch(32)), or lockstep.data.stream(dataset).batch(32)."
        )
    # The state of an IterableDataset lacks the examples in a shuffle buffer, and a loaded state affects later epochs.
    return ForgetfulSource(data, seed)


def convert_batch(batch: Any) -> Any:
    """Returns the batch with lists converted to tuples, and arrays that no backend can convert as numpy arrays."""

    def convert(value: Any) -> Any:
        if not hasattr(value, "__array__") or any(
            kind.__module__.split(".")[0] in _BACKEND_PACKAGES for kind in type(value).__mro__
        ):
            return value
        return np.asarray(value)

    return batches.transform(batches.restore_tuples(batch), convert)


def _is_equal(one: Any, other: Any) -> bool:
    """Returns whether two states, which may contain numpy arrays, are equal."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_equal(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return bool(np.array_equal(one, other))
    return bool(one == other)


def check_not_empty(batches: Iterator[Any], is_second_pass: bool, epoch: int) -> Iterator[Any]:
    """Yields the batches; raises BatchError if there are none because an earlier epoch has exhausted the iterable."""
    is_empty = True
    for batch in batches:
        is_empty = False
        yield batch
    if is_empty and is_second_pass:
        raise BatchError(
            f"Epoch {epoch + 1} has no batch, because a generator can be read only once. "
            "Use a list, a loader or arrays, or epochs=1 or steps_per_epoch."
        )
