"""Loaders: iterables of whole batches, read in the script's own process as they are.

A loader that has `state_dict` and `load_state_dict` is brought to a batch by these;
of any other, what comes before is read and dropped.
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
_OWN = ("numpy", "torch", "jax", "jaxlib")  # whose arrays go to a backend as they are


class IterableSource:
    """Any iterable of batches, as it is. A generator can be read once.

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
        """The iterable's batches; a generator goes on where it stopped."""
        found = map(own, islice(iter(self._iterable), start, None))
        return checked(found, self.once and index > 0, index)

    def state(self) -> Any:
        """An iterable says nothing."""
        return None


class StatefulSource:
    """A loader that can be asked where it stands, and be brought there."""

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
        self._was_loaded = False  # whether the next whole epoch is the first one after a state was loaded
        self._unread: tuple[Any] | None = None  # the state before that
        self._resumed: tuple[Any] | None = None  # the state after the first batch of the resumed epoch
        self._saved = False  # whether a run is saved: then the state is kept while a batch is read
        self._before: Any = None
        self._reading = False

    def epoch(self, index: int, start: int = 0, state: Any = None) -> Iterator[Any]:
        """The loader's batches, its generators seeded from (seed, epoch) and kept apart from the script's."""
        apart = global_rng.of_loader(self._loader, self._seed, index)
        if state is None:
            begun = self._read(apart, self._begin(apart))
            return map(own, islice(self._check(apart, begun) if self._was_loaded else begun, start, None))
        with apart:
            with suppress(Exception):  # some cannot say it before they have been read
                self._unread = (self._loader.state_dict(),)
            self._loader.load_state_dict(plain_values.restore_tensors(state))
        if not start:  # it may hold the loader's generators as the last epoch left them
            apart = global_rng.of_loader(self._loader, self._seed, index)
        self._was_loaded, self._resumed = True, None
        begun = self._read(apart, self._begin(apart))
        return map(own, self._note(begun) if start else self._check(apart, begun))

    def state(self) -> Any:
        """What the loader's own `state_dict` says, tensors as numpy; of the moment before, if reading was broken off.

        None if that is not known: then what comes before is read and dropped.
        """
        self._saved = True
        return self._before if self._reading else self._asked()

    def _begin(self, apart: global_rng.Apart) -> Iterator[Any]:
        with apart:
            return iter(self._loader)

    def _asked(self) -> Any:
        return plain_values.to_plain(self._loader.state_dict(), "state_dict()", plain_values.mark_tensor)

    def _read(self, apart: global_rng.Apart, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields the batches."""
        found = apart.over(batches)
        while True:
            self._before = self._asked() if self._saved else None
            self._reading = True
            batch = next(found, _END)
            self._reading = False
            if batch is _END:
                return
            yield batch

    def _note(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields the rest of a resumed epoch, and notes the state after its first batch."""
        for number, batch in enumerate(batches):
            if not number:
                self._resumed = (self._asked(),)
            yield batch

    def _check(self, apart: global_rng.Apart, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields the first whole epoch after a state was loaded.

        Some loaders begin every epoch with that state, and not the next one alone: they are brought back before.
        """
        self._was_loaded = False
        first = next(batches, _END)
        if self._is_behind(first) and self._unread is not None:
            with apart:
                self._loader.load_state_dict(self._unread[0])
            batches = self._read(apart, self._begin(apart))
            first = next(batches, _END)
        if self._is_behind(first):
            raise ExactError(
                "A loader begins each epoch anew. This one began again where the checkpoint stood, also after "
                "load_state_dict() with the state that it had before: epochs after a resumed one would be short. "
                "Let its __iter__ use a loaded state once, or give a DataLoader."
            )
        yield first
        yield from batches

    def _is_behind(self, first: Any) -> bool:
        """Returns whether an epoch whose first batch was just read begins where the resumed one began."""
        return first is _END or (self._resumed is not None and _is_equal(self._asked(), self._resumed[0]))


class ForgetfulSource(StatefulSource):
    """A loader whose `state_dict` is not enough to go on exactly: what comes before is read and dropped."""

    resumes = BY_DROPPING

    def epoch(self, index: int, start: int = 0, state: Any = None) -> Iterator[Any]:
        """The loader's batches."""
        return super().epoch(index, start)

    def state(self) -> Any:
        """Nothing of use."""
        return None

    def _asked(self) -> Any:
        return None


def of(data: Any, seed: int) -> IterableSource | StatefulSource | None:
    """The source for an iterable of batches; None for anything else."""
    if not isinstance(data, Iterable) or isinstance(data, str | bytes):
        return None
    if not hasattr(data, "state_dict") or not hasattr(data, "load_state_dict"):
        return IterableSource(data)
    if not huggingface.is_stream(data):
        return StatefulSource(data, seed)
    if not huggingface.is_batched(data):
        raise BatchError(
            "An iterable gives whole batches. A Hugging Face IterableDataset gives single examples, unless .batch(n) "
            "is its last step. Use fit(dataset.batch(32)), or lockstep.data.stream(dataset).batch(32)."
        )
    # Its state leaves out what lies in a shuffle buffer, and once loaded it is in force for every later epoch.
    return ForgetfulSource(data, seed)


def own(batch: Any) -> Any:
    """The batch in tuples and dicts, arrays of frameworks that are no backend's as numpy."""

    def leaf(value: Any) -> Any:
        if not hasattr(value, "__array__") or any(
            kind.__module__.split(".")[0] in _OWN for kind in type(value).__mro__
        ):
            return value
        return np.asarray(value)

    return batches.transform(batches.top(batch), leaf)


def _is_equal(one: Any, other: Any) -> bool:
    """Returns whether two plain states are equal, arrays included."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_equal(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return bool(np.array_equal(one, other))
    return bool(one == other)


def checked(found: Iterator[Any], used: bool, epoch: int) -> Iterator[Any]:
    """The same batches; raises where there are none and the iterable was `used` in an earlier epoch."""
    empty = True
    for batch in found:
        empty = False
        yield batch
    if empty and used:
        raise BatchError(
            f"An epoch holds at least one batch. The generator was used up before epoch {epoch + 1}. "
            "Give a list, a loader or arrays, or use epochs=1 or steps_per_epoch."
        )
