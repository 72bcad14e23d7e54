"""Which servers there are, and which of them live."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pserver.errors import ConfigError, ServerEnded

#: Servers whose lease has ended are shown for as long as no more than this many have followed.
MAX_LOST = 256
#: How often the wait of a server whose replicas fail is doubled.
MAX_DOUBLINGS = 6


@dataclass(slots=True, kw_only=True)
class Server:
    """One server; `linked`: its link is up, `alive`: its lease has not ended. Seconds of the caller's clock.

    `arithmetic` is what the bits of its results depend on. It gets no replica before `spared_until_s`, since replicas
    there have failed.
    """

    name: str
    address: str
    incarnation: int
    heard_s: float
    arithmetic: str
    linked: bool = True
    alive: bool = True
    spared_until_s: float = -math.inf
    num_failed_replicas: int = 0


class ServerTable:
    """Servers by name, in the order of their joining. Not thread-safe.

    Args:
        lease_s: how long a server counts as alive without a message, in seconds.
    """

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._servers: dict[str, Server] = {}

    def __iter__(self) -> Iterator[Server]:
        return iter(self._servers.values())

    def join(self, name: str, address: str, incarnation: int, now_s: float, arithmetic: str) -> Server | None:
        """A server opened its link; returns the earlier one of that name if it is another and was not known to be lost.

        Raises:
            ConfigError: another living server has the name. ServerEnded: its own lease has ended.
        """
        known = self._servers.get(name)
        restarted = known is not None and known.incarnation != incarnation
        if known is not None and restarted and known.linked and known.alive:
            raise ConfigError(
                f"a server named {name!r} is linked already, from {known.address}; give each server its own --name"
            )
        if known is not None and not restarted and not known.alive:
            raise ServerEnded(f"the lease of server {name!r} has ended; it must drop its shards and join as a new one")
        server = Server(name=name, address=address, incarnation=incarnation, heard_s=now_s, arithmetic=arithmetic)
        if known is not None and not restarted:
            server.spared_until_s, server.num_failed_replicas = known.spared_until_s, known.num_failed_replicas
        self._servers[name] = server
        return known if restarted and known is not None and known.alive else None

    def find(self, name: str) -> Server | None:
        """A server by name, if it is known."""
        return self._servers.get(name)

    def restore(self, server: Server) -> None:
        """Takes a server that an earlier coordinator knew."""
        self._servers[server.name] = server

    def address_of(self, name: str) -> str:
        """Where a server is, or was; "" if it was forgotten."""
        server = self._servers.get(name)
        return server.address if server is not None else ""

    def for_replica(self, members: Sequence[str], num_copies: Counter[str], now_s: float) -> str | None:
        """The server that should have the next replica of a shard; None: none can.

        The one with the fewest copies of whatever; of several, the next one by name after the primary.

        Args:
            members: servers that have a copy of it, the primary first.
            num_copies: what each server has already.
        """
        primary = self._servers.get(members[0])
        if primary is None:
            return None
        fit = [
            each.name
            for each in self.alive
            if each.name not in members and each.arithmetic == primary.arithmetic and each.spared_until_s <= now_s
        ]
        after = [each for each in fit if each > primary.name] + [each for each in fit if each < primary.name]
        return min(after, key=lambda name: num_copies[name], default=None)

    def failed_replica(self, name: str, now_s: float) -> None:
        """A replica on this server has failed: the next one may have to wait, the longer the more have."""
        server = self._servers.get(name)
        if server is not None:
            server.spared_until_s = now_s + self.lease_s * 2**server.num_failed_replicas
            server.num_failed_replicas = min(server.num_failed_replicas + 1, MAX_DOUBLINGS)

    def unlinked(self, name: str, incarnation: int) -> None:
        """A server's link broke; the server counts as alive until its lease ends."""
        server = self._servers.get(name)
        if server is not None and server.incarnation == incarnation:
            server.linked = False

    def heard(self, name: str, now_s: float) -> bool:
        """A message came from a server; False if its lease has ended."""
        server = self._servers.get(name)
        if server is None or not server.alive:
            return False
        server.heard_s = now_s
        return True

    def hears(self, name: str) -> bool:
        """Whether a server can be told something now."""
        server = self._servers.get(name)
        return server is not None and server.linked and server.alive

    def lose(self, server: Server) -> None:
        """Ends a server's lease; of many that are lost, the first ones are forgotten."""
        server.alive = False
        lost = [each.name for each in self if not each.alive]
        for name in lost[:-MAX_LOST]:
            del self._servers[name]

    @property
    def alive(self) -> list[Server]:
        """Those whose lease has not ended, by name."""
        return sorted((each for each in self if each.alive), key=lambda each: each.name)

    def silent(self, now_s: float) -> list[Server]:
        """Living servers that nothing was heard from for longer than a lease."""
        return [each for each in self.alive if now_s - each.heard_s > self.lease_s]

    def extend(self, pause_s: float, now_s: float) -> None:
        """Takes a time in which nobody could be heard off every lease."""
        for server in self:
            server.heard_s = min(server.heard_s + pause_s, now_s)
