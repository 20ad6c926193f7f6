"""glibc's malloc: keeps the memory that a step frees for the next step.

By default glibc returns large blocks to the kernel as soon as they are freed, and the next step pays for them again in
page faults. A training process needs the same memory again at once.
"""

import ctypes

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_LARGEST = 1 << 30


def keep_freed_memory() -> None:
    """Makes malloc keep freed memory in this process; does nothing if the C library has no `mallopt`."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(_M_MMAP_THRESHOLD, _LARGEST)
    mallopt(_M_TRIM_THRESHOLD, _LARGEST)
    mallopt(_M_TOP_PAD, 1 << 26)
