"""Which buckets' new values have arrived, while others are still on their way."""

import threading
from collections.abc import Iterator, Set
from contextlib import contextmanager


class Arrivals:
    """Told by the network loop, asked by the thread that trains."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards the three fields below
        self._arrived: dict[int, int] = {}  # the round of each bucket
        self._taking = False
        self._over = False

    def begin(self, buckets: Set[int]) -> None:
        """The memory of these buckets is about to be written, perhaps once more: a call is repeated if it breaks."""
        with self._changed:
            self._changed.wait_for(lambda: not self._taking)
            for bucket in buckets:
                self._arrived.pop(bucket, None)

    def add(self, bucket: int, round_number: int) -> None:
        """A bucket has arrived whole, with values of this round."""
        with self._changed:
            self._arrived[bucket] = round_number
            self._changed.notify_all()

    def end(self) -> None:
        """Nothing more will arrive."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    @contextmanager
    def taking(self, buckets: Set[int]) -> Iterator[int | None]:
        """Waits for these buckets; in the block nobody writes to them.

        Yields:
            Their round, the oldest if they are mixed; None: they will never arrive.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._arrived.keys() >= buckets)
            self._taking = self._arrived.keys() >= buckets
            oldest = min(self._arrived[bucket] for bucket in buckets) if self._taking else None
        try:
            yield oldest
        finally:
            with self._changed:
                self._taking = False
                self._changed.notify_all()
