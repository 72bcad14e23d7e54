"""Keeps what coordinators must remember in memory, for clusters that end with their coordinator."""

from collections.abc import Mapping

from pserver.server.coordination.leadership import Leadership, check_may_lead, lasting, some


class MemoryStore:
    """A `CoordinationStore` of one process, which leads at once and is never deposed.

    Args:
        term: of the first leadership. Must be above that of every process before, for example the time of the start.
    """

    durable = False

    def __init__(self, term: int) -> None:
        self._next_term = term
        self._address: str | None = None
        self._leadership: Leadership | None = None
        self._kept: dict[str, bytes] = {}

    async def lead(self, address: str) -> int:
        check_may_lead(self._leadership)
        self._leadership = Leadership(self._next_term)
        self._next_term += 1
        self._address = address
        return self._leadership.term

    async def leader(self) -> str | None:
        return self._address

    async def load(self) -> dict[str, bytes]:
        lasting(self._leadership)
        return dict(self._kept)

    async def write(self, changes: Mapping[str, bytes | None]) -> None:
        lasting(self._leadership)
        for key, value in changes.items():
            if value is None:
                self._kept.pop(key, None)
            else:
                self._kept[key] = value

    async def deposed(self) -> str:
        return await some(self._leadership).ended()

    async def close(self) -> None:
        self._address = None
        if self._leadership is not None:
            self._leadership.end("this coordinator gave it up")
