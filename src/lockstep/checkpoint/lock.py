"""A file lock that one process holds at a time; it is released when the process ends, however it ends."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.core.file_lock import has_name, try_lock_exclusive

if sys.platform != "win32":
    import fcntl

AVAILABLE = sys.platform != "win32"


@contextmanager
def held(path: Path) -> Iterator[bool]:
    """Holds the lock of a file, made where there is none; says False where somebody else has it, or it is gone.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as home, held(Path(home, ".lock")) as mine, held(Path(home, ".lock")) as two:
    ...     mine, two
    (True, False)
    """
    # Open for writing: over NFS, only such a file can be locked.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        mine = (not AVAILABLE or try_lock_exclusive(descriptor)) and has_name(descriptor, path)
        try:
            yield mine
        finally:
            if mine:
                _release(descriptor)
    finally:
        os.close(descriptor)


def _release(descriptor: int) -> None:
    """Also for a child that was forked meanwhile and holds the same open file."""
    if sys.platform != "win32":
        fcntl.flock(descriptor, fcntl.LOCK_UN)
