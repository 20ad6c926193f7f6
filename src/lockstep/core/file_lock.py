"""Locks on open files: they end with the process that has them, however it ends."""

import os
from pathlib import Path


def alone(descriptor: int) -> bool:
    """Locks a file where nobody else has; tells whether that was so."""
    import fcntl  # not on every platform, and only who shares files needs it

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def together(descriptor: int) -> None:
    """Locks a file against those who want it alone; waits for one who has it so."""
    import fcntl

    fcntl.flock(descriptor, fcntl.LOCK_SH)


def named(descriptor: int, path: Path) -> bool:
    """Whether the open file still has its name: another may have renamed or removed it before the lock was there."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
