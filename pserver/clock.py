"""Time as a value that is passed in, so that tests can hold it still."""

import time
from typing import Protocol


class Clock(Protocol):
    """Tells the time."""

    def now_s(self) -> float:
        """Seconds since some fixed moment; never goes back."""
        ...


class SystemClock:
    """The operating system's monotonic clock."""

    def now_s(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told to."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Moves the clock forward."""
        self._now_s += seconds
