"""Locks on open files. The operating system releases a lock when its process ends, however it ends.

`docs/design/dependencies.md` says why these are not `filelock`'s.
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
    """Take the exclusive lock of an open file if no other open file has a lock; return whether it was taken."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_shared(descriptor: int) -> None:
    """Take a shared lock on an open file, also in exchange for one's own exclusive lock; wait for that of another."""
    fcntl.flock(descriptor, fcntl.LOCK_SH)


def has_path(descriptor: int, path: Path) -> bool:
    """Whether an open file is still the one at `path`: it may have been renamed or removed before it was locked."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


@contextmanager
def hold_lock(path: Path) -> Iterator[bool]:
    """Try to lock a file, made if there is none, until the block ends; give whether that succeeded.

    On a platform without such locks it always succeeds.

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
                # Closing is not enough: a child that was forked meanwhile still has the same open file.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)
