"""Which buckets' new values have arrived, while others are still on their way."""

import threading
from collections.abc import Iterator, Set
from contextlib import contextmanager


class Arrivals:
    """Told by the network loop, asked by the thread that trains."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards the three fields below
        self._arrived: set[int] = set()
        self._taking = False
        self._over = False

    def begin(self, buckets: Set[int]) -> None:
        """The memory of these buckets is about to be written, perhaps once more: a call is repeated if it breaks."""
        with self._changed:
            self._changed.wait_for(lambda: not self._taking)
            self._arrived -= buckets

    def add(self, bucket: int) -> None:
        """A bucket has arrived whole."""
        with self._changed:
            self._arrived.add(bucket)
            self._changed.notify_all()

    def end(self) -> None:
        """Nothing more will arrive."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    @contextmanager
    def taking(self, buckets: Set[int]) -> Iterator[bool]:
        """Waits for these buckets; in the block nobody writes to them. Gives False if they will never arrive."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._arrived >= buckets)
            arrived = self._taking = self._arrived >= buckets
        try:
            yield arrived
        finally:
            with self._changed:
                self._taking = False
                self._changed.notify_all()
