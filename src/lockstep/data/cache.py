"""The cache of a pipeline, which stores computed examples in memory or in a file.

A cache stores the examples of epoch 0, so its content does not depend on when or by which process it was filled. A
cache in memory is shared by this process and its workers. A cache file is built under a temporary name: every process
that reads it stores the examples that the process computes, and the complete file is renamed. A later run continues an
incomplete file. A file that is damaged, or was computed from other data or code, is built again.
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
from lockstep.data.cache_table import CacheTable, Header, describe_structure, read_header, write_header
from lockstep.errors import BatchError, PlatformError
from lockstep.launch.shm import Region

Indices = NDArray[np.int64]


class Examples(NamedTuple):
    """The examples that a cache stores: their number, their identity, and the function that computes them."""

    num: int
    identity: str  # a hash of the data and code that the examples are computed from
    compute: Callable[[Indices], Any]


class Cache:
    """The `.cache` step of a pipeline. All pipelines that contain the same step share its memory or file."""

    def __init__(self, path: str | os.PathLike[str] | None, key: str | None = None) -> None:
        self.key = key  # the script's own version of the data and code before this step
        self.path = None if path is None else Path(os.path.abspath(path))
        self._lock = threading.RLock()
        self._region: Region | None = None
        self._table: CacheTable | None = None
        self._identity = ""
        self._building = False

    def read(self, indices: Indices, examples: Examples) -> Any:
        """Returns the examples with these indices; computes and stores those that the cache does not have yet."""
        with self._lock:
            if self._table is None or examples.identity != self._identity:
                self._open_table(examples)
            table = self._table
        missing = np.unique(indices) if table is None else table.find_missing(indices)
        if len(missing):
            computed = examples.compute(missing)
            with self._lock:
                if self._table is None:
                    assert self._region is not None
                    self._table = CacheTable.create(self._region, examples.num, examples.identity, computed)
            table = self._table
            table.put(missing, computed)
            self._rename_if_complete(table)
        assert table is not None
        return table.get(indices)

    def _open_table(self, examples: Examples) -> None:
        """Opens the table of the stored examples, or the memory or file in which a new table is to be created."""
        if self.path is None:
            region = self._region = self._region or _create_memory()
        else:
            try:
                if self.path.is_dir():
                    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
                region = self._region = self._open_file(self.path, examples)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
                raise BatchError(
                    f"The cache cannot be written to {self.path}: {error.strerror or error}. "
                    "Use another path, or .cache() to keep the examples in memory."
                ) from error
        self._identity = examples.identity
        opened = CacheTable.open(region, examples.num, examples.identity)
        self._table = opened[0] if opened else None
        if self._table is not None:
            self._rename_if_complete(self._table)  # the process that completed the file may have been killed before

    def _open_file(self, path: Path, examples: Examples) -> Region:
        """Opens the complete file if it has these examples, otherwise the temporary file, which may be incomplete."""
        self._building = False
        while True:
            with contextlib.suppress(FileNotFoundError):
                region = Region(os.open(path, os.O_RDONLY | os.O_CLOEXEC), writable=False)
                if _is_complete_and_equal(region, examples):
                    return region
                region.close()
            path.parent.mkdir(parents=True, exist_ok=True)
            region = Region(os.open(self._temporary_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666))
            is_joined = _join(region, examples)
            # Otherwise another process renamed the completed file before the lock was taken: start again.
            if file_lock.has_path(region.descriptor, self._temporary_path):
                if is_joined:
                    self._building = True
                    return region
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._temporary_path)  # a process that is still building this file keeps it open
            region.close()

    def _rename_if_complete(self, table: CacheTable) -> None:
        """Renames the temporary file to `path` if it has all examples.

        Two processes may do this at the same time, because they write the same bytes.
        """
        if not self._building or not table.is_complete:
            return
        with self._lock:
            assert self.path is not None
            assert self._region is not None
            table.write_checksum(self._identity)
            os.fsync(self._region.descriptor)
            if self._building and file_lock.has_path(self._region.descriptor, self._temporary_path):
                with contextlib.suppress(FileNotFoundError):
                    os.rename(self._temporary_path, self.path)
            self._building = False

    @property
    def _temporary_path(self) -> Path:
        assert self.path is not None
        return self.path.with_name(f"{self.path.name}.part")

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for a pickle: the path of a cache file, or the process id and descriptor of the memory."""
        if self.path is None:
            with self._lock:
                self._region = self._region or _create_memory()
            return {"path": None, "key": None, "memory": (os.getpid(), self._region.descriptor)}
        return {"path": self.path, "key": self.key, "memory": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Cache.__init__(self, state["path"], state["key"])
        self._region = None if state["memory"] is None else Region.open_from_process(*state["memory"])


def _create_memory() -> Region:
    try:
        return Region.create("cache")
    except PlatformError:  # without memfd there are no workers, and any memory that this process can map will do
        with tempfile.TemporaryFile() as file:
            return Region(os.dup(file.fileno()))


def _is_complete_and_equal(region: Region, examples: Examples) -> bool:
    """Returns whether the file is complete and undamaged, and a few of its examples equal newly computed examples."""
    opened = CacheTable.open(region, examples.num, examples.identity)
    if opened is None or opened[1] is None or opened[0].compute_checksum() != opened[1]:
        return False
    return _is_equal_to_samples(opened[0], np.arange(examples.num), examples)


def _join(region: Region, examples: Examples) -> bool:
    """Takes a shared lock on a temporary file; returns whether the file is for these examples.

    The first process that opens the file takes the exclusive lock for a moment, and decides whether the rows that an
    earlier run has left in it can be used. While processes have the shared lock, no other process can decide this.
    """
    if file_lock.lock_exclusive(region.descriptor):
        if not region.nbytes:
            write_header(region, Header(examples.num, examples.identity, None, None))
        elif not _has_usable_rows(region, examples):
            return False
    file_lock.lock_shared(region.descriptor)
    header = read_header(region)
    return header is not None and (header.num_examples, header.identity) == (examples.num, examples.identity)


def _has_usable_rows(region: Region, examples: Examples) -> bool:
    """Returns whether the temporary file of a killed run contains usable rows of these examples."""
    opened = CacheTable.open(region, examples.num, examples.identity)
    if opened is None:
        return False
    stored = opened[0].list_stored()
    return len(stored) > 0 and _is_equal_to_samples(opened[0], stored, examples)


def _is_equal_to_samples(table: CacheTable, stored: Indices, examples: Examples) -> bool:
    """Returns whether the first, middle and last stored examples are equal to the same examples computed now."""
    samples = np.unique(stored[[0, len(stored) // 2, -1]])
    computed = examples.compute(samples)
    return describe_structure(computed) == table.structure and batches.fingerprint(computed) == batches.fingerprint(
        table.get(samples)
    )
