"""The C library's heap of a server process.

glibc returns freed memory to the system and faults it in again, page by page: for gradients that come every step that
is a quarter of a server's time. https://man7.org/linux/man-pages/man3/mallopt.3.html
"""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
#: The largest that glibc accepts: blocks beyond it are returned when they are freed, whatever we say.
_LARGEST_KEPT_BYTES = 32 << 20
_NEVER = (1 << 31) - 1

_libc = ctypes.CDLL(None)


def keep_freed_memory() -> None:
    """From now on freed memory stays with the process, to be used again. Only glibc can be told so."""
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)
        _libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)


def return_freed_memory() -> None:
    """Returns to the system what is free now."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)
