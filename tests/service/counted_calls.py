"""Channels that count: calls by RPC, and the messages of each."""

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from pserver.transport.channel import Connector, Place
from pserver.transport.methods import Method, Sendable


@dataclass(slots=True)
class Calls:
    """What went over all channels that it opened, by name of the RPC; it is their connector.

    Attributes:
        connect: opens what is counted.
        made: calls.
        sent, received: messages.
    """

    connect: Connector
    made: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    received: Counter[str] = field(default_factory=Counter)

    @property
    def counts(self) -> tuple[Counter[str], ...]:
        """All three."""
        return self.made, self.sent, self.received

    def __call__(self, address: str) -> "_CountedChannel":
        return _CountedChannel(address, self)


class _CountedChannel:
    def __init__(self, address: str, calls: Calls) -> None:
        self._inner = calls.connect(address)
        self._calls = calls

    @property
    def address(self) -> str:
        return self._inner.address

    async def call(
        self, method: Method, requests: AsyncIterable[Sendable], *, timeout_s: float, place: Place | None = None
    ) -> AsyncGenerator[Any, None]:
        self._calls.made[method.name] += 1
        async for reply in self._inner.call(method, self._sent(method, requests), timeout_s=timeout_s, place=place):
            self._calls.received[method.name] += 1
            yield reply

    async def _sent(self, method: Method, requests: AsyncIterable[Sendable]) -> AsyncIterator[Sendable]:
        async for request in requests:
            self._calls.sent[method.name] += 1
            yield request

    async def close(self) -> None:
        await self._inner.close()
