"""Segments of shared memory: made so that they cannot end in SIGBUS, and gone when their owner is.

A segment is a file on the memory file system /dev/shm. Its owner makes it without a name, takes every page of it,
locks it, and only then gives it one; the kernel drops the lock with the owner, however that ends, so whoever can take
the lock of a named segment may remove it (`sweep`). Locks work between containers
that share /dev/shm; process ids would not.
https://man7.org/linux/man-pages/man2/open.2.html (O_TMPFILE), https://man7.org/linux/man-pages/man2/flock.2.html
"""

import fcntl
import mmap
import os
import platform
import secrets
import sys
from contextlib import suppress
from pathlib import Path

from pserver.errors import SharedMemoryUnavailable

DIRECTORY = Path("/dev/shm")
_PREFIX = "pserver-"
#: Processors that let no store overtake an earlier one, so that a version word written later is seen later.
_ORDERED = frozenset({"x86_64", "AMD64"})


def why_not() -> str:
    """Why this machine cannot share memory; empty if it can."""
    if sys.platform != "linux":
        return f"shared memory needs Linux, but this is {sys.platform}"
    if platform.machine() not in _ORDERED:
        return f"shared memory needs a processor that keeps stores in order (x86-64), but this is {platform.machine()}"
    if not DIRECTORY.is_dir():
        return f"{DIRECTORY} is missing"
    return ""


class Segment:
    """A segment of this process; other processes of the same user may map it by name. Close it to remove it.

    Args:
        num_bytes: its size, at least 1; all of it is taken now, zeroed.

    Raises:
        SharedMemoryUnavailable: there is no such memory, or not enough.
    """

    def __init__(self, num_bytes: int) -> None:
        if reason := why_not():
            raise SharedMemoryUnavailable(reason)
        self._closed = False
        self.name = _PREFIX + secrets.token_hex(16)
        try:
            self._file = os.open(DIRECTORY, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SharedMemoryUnavailable(f"{DIRECTORY} cannot be written: {error.strerror}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _take_pages(self._file, num_bytes)
            # MAP_SHARED. It has a copy of the descriptor, and so the lock, until the memory goes.
            self.memory = memoryview(mmap.mmap(self._file, num_bytes))
            descriptors = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.link(str(self._file), DIRECTORY / self.name, src_dir_fd=descriptors, follow_symlinks=True)
            finally:
                os.close(descriptors)
        except OSError as error:
            os.close(self._file)
            raise SharedMemoryUnavailable(f"{DIRECTORY} cannot be used: {error.strerror}") from None
        except SharedMemoryUnavailable:
            os.close(self._file)
            raise

    def close(self) -> None:
        """Removes the name; the memory goes once nobody maps it any more. Closing twice is no error."""
        if self._closed:
            return
        self._closed = True
        with suppress(FileNotFoundError):
            os.unlink(DIRECTORY / self.name)
        os.close(self._file)


def _take_pages(file: int, num_bytes: int) -> None:
    try:
        os.posix_fallocate(file, 0, num_bytes)
    except OSError as error:
        raise SharedMemoryUnavailable(
            f"{DIRECTORY} has no room for {num_bytes} bytes ({error.strerror}); enlarge it (docker: the size of the "
            "volume that is mounted there, or shm_size)"
        ) from None


def map_segment(name: str, *, writable: bool) -> memoryview:
    """Maps another process's segment; the mapping lasts as long as anything refers to the memory.

    Raises:
        SharedMemoryUnavailable: there is none of that name here: the owner is on another machine, in a container with
            another /dev/shm, of another user, or has ended.
    """
    if reason := why_not():
        raise SharedMemoryUnavailable(reason)
    if not name.startswith(_PREFIX) or "/" in name:
        raise SharedMemoryUnavailable(f"{name[:80]!r} is not the name of a segment")
    flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        file = os.open(DIRECTORY / name, flags)
    except OSError as error:
        raise SharedMemoryUnavailable(f"{DIRECTORY / name} cannot be opened: {error.strerror}") from None
    try:
        return memoryview(mmap.mmap(file, 0, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ))
    except (OSError, ValueError) as error:
        raise SharedMemoryUnavailable(f"{DIRECTORY / name} cannot be mapped: {error}") from None
    finally:
        os.close(file)


def sweep() -> list[str]:
    """Removes the segments of this user whose owners have ended; returns their names. Safe while others run."""
    removed: list[str] = []
    for path in sorted(DIRECTORY.glob(_PREFIX + "*")) if not why_not() else ():
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # of another user, or gone by now
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
            removed.append(path.name)
        except OSError:  # its owner lives
            continue
        finally:
            os.close(file)
    return removed
