"""Time during which something was under way."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Stopwatch:
    """Adds up the time in which at least one of several things was under way. Thread-safe.

    Args:
        now_s: a monotonic clock, in seconds.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._lock = threading.Lock()  # guards the three fields below
        self._under_way = 0
        self._since_s = 0.0
        self._seconds = 0.0

    @property
    def seconds(self) -> float:
        """The sum until now."""
        with self._lock:
            return self._seconds + (self._now_s() - self._since_s if self._under_way else 0.0)

    def start(self) -> None:
        """One thing more is under way."""
        with self._lock:
            if not self._under_way:
                self._since_s = self._now_s()
            self._under_way += 1

    def stop(self) -> None:
        """One thing less."""
        with self._lock:
            self._under_way -= 1
            if not self._under_way:
                self._seconds += self._now_s() - self._since_s

    @contextmanager
    def running(self) -> Iterator[None]:
        """One thing more, for a block."""
        self.start()
        try:
            yield
        finally:
            self.stop()
