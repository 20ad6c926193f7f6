"""glibc's malloc: memory that a step frees is kept for the next.

glibc gives large blocks back to the kernel as soon as they are free, and the next
step pays for them again in page faults. A process that trains will want the same
memory in a moment.
"""

import ctypes

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_LARGEST = 1 << 30


def keep_freed() -> None:
    """Lets this process keep the memory it frees; nothing happens where the C library cannot be told so."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(_M_MMAP_THRESHOLD, _LARGEST)
    mallopt(_M_TRIM_THRESHOLD, _LARGEST)
    mallopt(_M_TOP_PAD, 1 << 26)
