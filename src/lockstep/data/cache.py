"""A cache: examples that are worked out once, in memory or in a file.

What it keeps of an example is epoch 0's answer, so what a run reads does not depend
on when the cache was filled, or by whom. In memory this process and its workers share it.
A file is built under another name by everyone who wants it, and gets its own once it
is whole; who comes later goes on with what is there. One that is damaged, or was made
from other data or by other code, is built anew.
"""

import contextlib
import errno
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.core import batches, file_lock
from lockstep.data.cache_table import Head, Table, form_of, read_head, write_head
from lockstep.errors import BatchError, PlatformError
from lockstep.exchange.region import Region

Indices = NDArray[np.int64]


class Examples(NamedTuple):
    """What lies below a cache, in epoch 0."""

    num: int
    identity: str  # tells it from other data and other code
    compute: Callable[[Indices], Any]


class Cache:
    """The place in a pipeline where examples are kept; pipelines that were built on it share it."""

    def __init__(self, path: str | os.PathLike[str] | None, key: str | None = None) -> None:
        self.key = key  # the script's own name for what lies below
        self.path = None if path is None else Path(os.path.abspath(path))
        self._lock = threading.RLock()
        self._region: Region | None = None
        self._table: Table | None = None
        self._identity = ""
        self._building = False

    def read(self, indices: Indices, examples: Examples) -> Any:
        """These examples, of which only the missing ones are computed."""
        with self._lock:
            if self._table is None or examples.identity != self._identity:
                self._find(examples)
            table = self._table
        missing = np.unique(indices) if table is None else table.missing(indices)
        if len(missing):
            fresh = examples.compute(missing)
            with self._lock:
                if self._table is None:
                    assert self._region is not None
                    self._table = Table.begin(self._region, examples.num, examples.identity, fresh)
            table = self._table
            table.put(missing, fresh)
            self._finish(table)
        assert table is not None
        return table.get(indices)

    def _find(self, examples: Examples) -> None:
        """Opens what is there already, else a place to build."""
        if self.path is None:
            region = self._region = self._region or _memory()
        else:
            try:
                if self.path.is_dir():
                    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
                region = self._region = self._opened(self.path, examples)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
                raise BatchError(
                    f"A cache is a file in a folder that can be written to. Got {self.path}: {error.strerror}. "
                    "Use another path, or .cache() to keep the examples in memory."
                ) from error
        self._identity = examples.identity
        found = Table.find(region, examples.num, examples.identity)
        self._table = found[0] if found else None
        if self._table is not None:
            self._finish(self._table)  # the last one who built it may not have come to that

    def _opened(self, path: Path, examples: Examples) -> Region:
        """The whole file where it is one of these examples, else the part that is being built."""
        self._building = False
        while True:
            with contextlib.suppress(FileNotFoundError):
                region = Region(os.open(path, os.O_RDONLY | os.O_CLOEXEC), writable=False)
                if _is_whole(region, examples):
                    return region
                region.close()
            path.parent.mkdir(parents=True, exist_ok=True)
            region = Region(os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666))
            joined = _join(region, examples)
            if file_lock.has_path(
                region.descriptor, self._part
            ):  # else it was finished meanwhile, and has its own name now
                if joined:
                    self._building = True
                    return region
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._part)  # who still builds it keeps it, without its name
            region.close()

    def _finish(self, table: Table) -> None:
        """Gives a file that has become whole its own name. Two may do so at once, and write the same."""
        if not self._building or not table.whole:
            return
        with self._lock:
            assert self.path is not None
            assert self._region is not None
            table.seal(self._identity)
            os.fsync(self._region.descriptor)
            if self._building and file_lock.has_path(self._region.descriptor, self._part):
                with contextlib.suppress(FileNotFoundError):
                    os.rename(self._part, self.path)
            self._building = False

    @property
    def _part(self) -> Path:
        assert self.path is not None
        return self.path.with_name(f"{self.path.name}.part")

    def __getstate__(self) -> dict[str, Any]:
        """A file by its name; memory by who holds it."""
        if self.path is None:
            with self._lock:
                self._region = self._region or _memory()
            return {"path": None, "key": None, "held": (os.getpid(), self._region.descriptor)}
        return {"path": self.path, "key": self.key, "held": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Cache.__init__(self, state["path"], state["key"])
        self._region = None if state["held"] is None else Region.of_process(*state["held"])


def _memory() -> Region:
    try:
        return Region.create("cache")
    except PlatformError:  # one process needs no memfd
        with tempfile.TemporaryFile() as file:
            return Region(os.dup(file.fileno()))


def _is_whole(region: Region, examples: Examples) -> bool:
    """Whether the file is whole and undamaged, and holds what is computed for a few examples now."""
    found = Table.find(region, examples.num, examples.identity)
    if found is None or found[1] is None or found[0].checksum() != found[1]:
        return False
    return _agrees(found[0], np.arange(examples.num), examples)


def _join(region: Region, examples: Examples) -> bool:
    """Whether a part, new or old, is one of these examples; it is locked against those who would begin anew."""
    if file_lock.lock_exclusive(region.descriptor):
        if not region.nbytes:
            write_head(region, Head(examples.num, examples.identity, None, None))
        elif not _goes_on(region, examples):
            return False
    file_lock.lock_shared(region.descriptor)
    head = read_head(region)
    return head is not None and (head.num_examples, head.identity) == (examples.num, examples.identity)


def _goes_on(region: Region, examples: Examples) -> bool:
    """Whether a part that was left holds rows of these examples."""
    found = Table.find(region, examples.num, examples.identity)
    if found is None:
        return False
    there = found[0].marked()
    return len(there) > 0 and _agrees(found[0], there, examples)


def _agrees(table: Table, there: Indices, examples: Examples) -> bool:
    """Whether a few of the rows that are there hold what is computed for them now."""
    samples = np.unique(there[[0, len(there) // 2, -1]])
    fresh = examples.compute(samples)
    return form_of(fresh) == table.form and batches.fingerprint(fresh) == batches.fingerprint(table.get(samples))
