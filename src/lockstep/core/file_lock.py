"""Locks on open files. The operating system releases a lock when its process ends, even if the process is killed.

`docs/design/dependencies.md` says why the package `filelock` is not used.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

if sys.platform != "win32":
    import fcntl

IS_AVAILABLE = sys.platform != "win32"


def lock_exclusive(descriptor: int) -> bool:
    """Tries to take the exclusive lock of a file without waiting; returns whether this process has the lock now.

    It fails if the file is locked, shared or exclusively, through another open descriptor.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_shared(descriptor: int) -> None:
    """Takes a shared lock on an open file; blocks while another process has the exclusive lock.

    If this process has the exclusive lock, it becomes a shared lock.
    """
    fcntl.flock(descriptor, fcntl.LOCK_SH)


def has_path(descriptor: int, path: Path) -> bool:
    """Returns whether `path` still leads to this open file, which may have been renamed or removed since."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


@contextmanager
def hold_lock(path: Path) -> Iterator[bool]:
    """Opens or creates a file and tries to lock it for the duration of the block; yields whether it was locked.

    On a platform without file locks it always yields True.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with hold_lock(Path(folder, ".lock")) as first, hold_lock(Path(folder, ".lock")) as second:
    ...         first, second
    (True, False)
    """
    # Open for writing: over NFS, only such a file can be locked.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        is_locked = (not IS_AVAILABLE or lock_exclusive(descriptor)) and has_path(descriptor, path)
        try:
            yield is_locked
        finally:
            if is_locked and IS_AVAILABLE:
                # Closing the file is not enough: a child process that was forked meanwhile has the same open file.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)
