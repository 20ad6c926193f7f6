"""Advisory locks on open files. The kernel releases them when the process ends, in whatever way."""

import os
from pathlib import Path


def try_lock_exclusive(descriptor: int) -> bool:
    """Takes an exclusive lock if no other process has a lock; returns whether it was taken."""
    import fcntl  # imported here, because some platforms lack it and most scripts do not need it

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_shared(descriptor: int) -> None:
    """Takes a shared lock; blocks while another process holds the exclusive one."""
    import fcntl

    fcntl.flock(descriptor, fcntl.LOCK_SH)


def has_name(descriptor: int, path: Path) -> bool:
    """Returns whether the open file is still the one at `path`.

    Another process may have renamed or removed it before the lock was taken.
    """
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
