"""How much memory a process takes, watched while it works."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PERIOD_S = 0.005
_COUNTED = ("RssAnon:", "RssShmem:")


def resident_bytes(pid: int) -> int:
    """What a process has in memory: its own (RssAnon) and shared (RssShmem, all of it), no mapped files. Linux only.

    Raises:
        FileNotFoundError: there is no such process.
    """
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(int(fields[1]) * 1024 for fields in lines if fields[0] in _COUNTED)


@contextmanager
def highest_resident_bytes(pid: int) -> Iterator[Callable[[], int]]:
    """Looks at a process every few milliseconds while the block lasts; yields what says the highest seen so far."""
    highest = resident_bytes(pid)
    ended = threading.Event()

    def watch() -> None:
        nonlocal highest
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended: whoever waits for its work will say so
            while not ended.wait(_PERIOD_S):
                highest = max(highest, resident_bytes(pid))

    watcher = threading.Thread(target=watch, name="memory-watch", daemon=True)
    watcher.start()
    try:
        yield lambda: highest
    finally:
        ended.set()
        watcher.join()
