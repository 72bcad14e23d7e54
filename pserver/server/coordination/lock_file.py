"""A lock file that says who holds it. The kernel releases it with the process, however that one ends."""

import fcntl
import os
from pathlib import Path


class LockFile:
    """At most one holder at a time, of all processes of one machine. Not safe for several threads at once.

    Args:
        path: of the file; its directory must exist. The file stays when the lock is released.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._held: int | None = None

    def take(self, holder: str) -> bool:
        """Takes the lock unless somebody has it, and writes down who holds it; whether it was taken.

        Raises:
            OSError: the file cannot be made or written.
        """
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            taken = _try_lock(file, fcntl.LOCK_EX)
            if taken:
                os.ftruncate(file, 0)
                os.pwrite(file, f"{holder}\n".encode(), 0)
        except BaseException:
            os.close(file)
            raise
        if taken:
            self._held = file
        else:
            os.close(file)
        return taken

    def release(self) -> None:
        """Releases the lock, if it is held."""
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def holder(self) -> str | None:
        """Who holds the lock, or None; also if that is just being written down.

        Raises:
            OSError: the file cannot be read.
        """
        try:
            file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            if _try_lock(file, fcntl.LOCK_SH):
                return None
            text = os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")
        finally:
            os.close(file)
        return text.removesuffix("\n") if text.endswith("\n") else None


def _try_lock(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
