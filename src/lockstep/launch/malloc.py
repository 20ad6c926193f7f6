"""Makes glibc's malloc keep the memory that a step frees, for the next step.

By default glibc returns large blocks to the kernel as soon as they are freed, and the next step, which needs the same
memory again, pays for it in page faults. The largest blocks are still returned: if they were kept, they would leave
holes in the heap into which the next gradient of the same size does not fit, because malloc adds some bytes to align a
block.
"""

import ctypes

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_LARGEST_KEPT = 1 << 25  # where glibc's own threshold, which follows what a program frees, ends too
_MOST_KEPT = 1 << 30  # at the end of the heap


def keep_freed_memory() -> None:
    """Makes malloc keep freed blocks of up to 32 MB in this process; does nothing if the C library has no `mallopt`."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT)
    mallopt(_M_TRIM_THRESHOLD, _MOST_KEPT)
    mallopt(_M_TOP_PAD, 1 << 26)
