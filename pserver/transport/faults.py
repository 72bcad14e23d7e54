"""Faults as data: which message of which RPC is lost. Wraps any channel."""

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from pserver.errors import ServerUnavailable
from pserver.transport.channel import Channel, Connector, Place
from pserver.transport.methods import Method, Sendable


class FaultKind(Enum):
    """LOSE_REQUEST: the server never sees the call. LOSE_REPLY: it carries the call out, the caller never hears.
    BREAK_STREAM: the connection breaks after the first request message."""

    LOSE_REQUEST = "lose request"
    LOSE_REPLY = "lose reply"
    BREAK_STREAM = "break stream"


@dataclass(slots=True, kw_only=True)
class Fault:
    """Hits the next `times` calls of the RPC called `method`, or only those to `address` if given."""

    kind: FaultKind
    method: str
    times: int = 1
    address: str | None = None


@dataclass(slots=True)
class FaultPlan:
    """Faults still to come, and how many have struck. Shared by all channels of a connector."""

    faults: list[Fault] = field(default_factory=list)
    struck: int = 0

    def take(self, method: str, address: str) -> FaultKind | None:
        """The fault that hits this call, if any."""
        for fault in self.faults:
            if fault.method == method and fault.times > 0 and fault.address in (None, address):
                fault.times -= 1
                self.struck += 1
                return fault.kind
        return None


def with_faults(connect: Connector, plan: FaultPlan) -> Connector:
    """A connector whose channels suffer the faults of a plan."""

    def connect_faulty(address: str) -> Channel:
        return _FaultyChannel(connect(address), plan)

    return connect_faulty


class _FaultyChannel:
    def __init__(self, inner: Channel, plan: FaultPlan) -> None:
        self._inner = inner
        self._plan = plan

    @property
    def address(self) -> str:
        return self._inner.address

    async def call(
        self, method: Method, requests: AsyncIterable[Sendable], *, timeout_s: float, place: Place | None = None
    ) -> AsyncGenerator[Any, None]:
        kind = self._plan.take(method.name, self.address)
        lost = ServerUnavailable(f"server at {self.address}: injected fault: {kind.value if kind else ''}")
        if kind is FaultKind.LOSE_REQUEST:
            raise lost
        if kind is FaultKind.BREAK_STREAM:
            requests = _broken(requests, lost)
        async for reply in self._inner.call(method, requests, timeout_s=timeout_s, place=place):
            if kind is None:
                yield reply
        if kind is not None:
            raise lost

    async def close(self) -> None:
        await self._inner.close()


async def _broken(requests: AsyncIterable[Sendable], error: ServerUnavailable) -> AsyncIterator[Sendable]:
    async for request in requests:
        yield request
        raise error
