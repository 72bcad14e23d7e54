"""Hands out push ids and remembers which outcomes are still unknown."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pserver.types import PushId


class PushIds:
    """Push ids of one trainer. Thread-safe."""

    def __init__(self, trainer_id: int) -> None:
        self._trainer_id = trainer_id
        self._lock = threading.Lock()  # guards both fields below
        self._last = 0
        self._unknown: set[int] = set()

    def issue(self) -> PushId:
        """A new id; its outcome is unknown until `settle`."""
        with self._lock:
            self._last += 1
            self._unknown.add(self._last)
            return PushId(self._trainer_id, self._last, min(self._unknown))

    def settle(self, push_id: PushId) -> None:
        """The outcome is known, or will never be asked for again."""
        with self._lock:
            self._unknown.discard(push_id.sequence)

    @contextmanager
    def one(self) -> Iterator[PushId]:
        """An id for one mutation whose outcome is known, or given up, at the end of the block."""
        push_id = self.issue()
        try:
            yield push_id
        finally:
            self.settle(push_id)
