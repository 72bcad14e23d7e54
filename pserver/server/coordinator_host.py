"""Runs the coordinator: time, waiting registrations, and the links to servers."""

import asyncio
import logging
from collections.abc import AsyncIterator

from pserver.clock import Clock
from pserver.config import ServerSettings
from pserver.core.coordinator import Coordinator, Placement, Registration
from pserver.core.messages import Command, ModelSpec, Report
from pserver.core.models import check_spec
from pserver.errors import DeadlineExceeded
from pserver.server.changed import Changed
from pserver.transport.deadline import Deadline
from pserver.types import PushId

logger = logging.getLogger(__name__)

#: How often leases are looked at: this many times in the shortest of them, but at least every 0.1 s.
LOOKS_PER_LEASE = 20
LONGEST_PAUSE_S = 0.1
#: Ids of one coordinator process; the next process starts above, since its incarnation is later.
IDS_PER_INCARNATION = 1 << 20


class ServerLink:
    """What one server must be told, until its link ends."""

    def __init__(self, name: str, incarnation: int) -> None:
        self.name = name
        self.incarnation = incarnation
        self._queue: asyncio.Queue[Command | None] = asyncio.Queue()

    def tell(self, command: Command) -> None:
        """Sends a command after those sent before."""
        self._queue.put_nowait(command)

    def end(self) -> None:
        """Ends the link after what has been sent."""
        self._queue.put_nowait(None)

    async def commands(self) -> AsyncIterator[Command]:
        """Commands as they come, until the link ends."""
        while (command := await self._queue.get()) is not None:
            yield command


class CoordinatorHost:
    """Owns the `Coordinator`; everything here runs on one event loop.

    Args:
        settings: of the server that hosts it.
        clock: tells the time.
        incarnation: grows with every start of a coordinator, so that no trainer id is used twice.
    """

    def __init__(self, settings: ServerSettings, clock: Clock, incarnation: int) -> None:
        self._clock = clock
        self.core = Coordinator(
            trainer_lease_s=settings.trainer_lease_s,
            server_lease_s=settings.server_lease_s,
            min_servers=settings.min_servers,
            first_trainer_id=incarnation * IDS_PER_INCARNATION + 1,
            now_s=clock.now_s(),
        )
        shortest_s = min(settings.trainer_lease_s, settings.server_lease_s)
        self._expire_every_s = min(shortest_s / LOOKS_PER_LEASE, LONGEST_PAUSE_S)
        self._changed = Changed()
        self._links: dict[str, ServerLink] = {}
        self._expiry: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts looking at leases."""
        self._expiry = asyncio.create_task(self._expire_forever())

    async def stop(self) -> None:
        """Ends the links and stops looking at leases."""
        if self._expiry is not None:
            self._expiry.cancel()
        for link in self._links.values():
            link.end()

    def now_s(self) -> float:
        """The time on the coordinator's clock."""
        return self._clock.now_s()

    def changed(self) -> None:
        """To be called after every call that may have changed the core: sends commands, wakes who waits."""
        for server, command in self.core.take_commands():
            if (link := self._links.get(server)) is not None:
                link.tell(command)
        self._changed.notify()

    async def register(
        self, push_id: PushId, spec: ModelSpec, *, initialised: int, replaces: int, wait_s: float
    ) -> Registration:
        """Registers a model and waits until this trainer can go on.

        Raises:
            DeadlineExceeded: after `wait_s`; says what is missing. And what `Coordinator.register` raises.
        """
        deadline = Deadline(wait_s)
        if replaces or not self.core.knows(spec.name):
            # The first optimizer of a process makes torch import its compiler, which takes seconds.
            await asyncio.to_thread(check_spec, spec)
        try:
            return await self._register(push_id, spec, initialised=initialised, replaces=replaces, deadline=deadline)
        except BaseException:
            # Whoever does not wait any longer, wants no change any longer.
            self.core.withdraw(push_id.trainer_id, spec.name)
            raise

    async def _register(
        self, push_id: PushId, spec: ModelSpec, *, initialised: int, replaces: int, deadline: Deadline
    ) -> Registration:
        while True:
            registration = self.core.register(push_id, spec, initialised=initialised, replaces=replaces)
            self.changed()
            if registration is not None:
                return registration
            if not await self._changed.wait(deadline.remaining_s()):
                raise DeadlineExceeded(
                    f"model {spec.name!r} was not ready within {deadline.timeout_s:g} s; it waits for "
                    f"{self.core.waiting_for(spec.name)}"
                )

    async def watch(self, name: str, version: int, wait_s: float) -> Placement:
        """Where a model's shards are, once that is another version than this.

        Raises:
            UnknownModel, ModelFailed
        """
        deadline = Deadline(wait_s)
        while True:
            placement = self.core.placement(name)
            if placement.version != version or not await self._changed.wait(deadline.remaining_s()):
                return placement

    def open_link(self, name: str, address: str, incarnation: int, arithmetic: str) -> "ServerLink":
        """Links a server; a link that it had before ends.

        Raises:
            ConfigError: another living server has the name. ServerEnded: this one's lease has ended.
        """
        self.core.server_joined(name, address, incarnation, self.now_s(), arithmetic)
        link = ServerLink(name, incarnation)
        if (older := self._links.get(name)) is not None:
            older.end()
        self._links[name] = link
        logger.info("server %s joined at %s", name, address)
        self.changed()
        return link

    def close_link(self, link: "ServerLink") -> None:
        """Notes that a link is gone."""
        if self._links.get(link.name) is link:
            del self._links[link.name]
            self.core.server_unlinked(link.name, link.incarnation)
            logger.info("link of server %s closed", link.name)
            self.changed()

    def heard(self, link: "ServerLink", report: Report | None) -> None:
        """Takes a report, or a mere sign of life; a server whose lease has ended is unlinked."""
        if not self.core.server_heard(link.name, self.now_s()):
            link.end()
        elif report is not None:
            self.core.report(link.name, report, self.now_s())
            self.changed()

    async def _expire_forever(self) -> None:
        while True:
            await asyncio.sleep(self._expire_every_s)
            if self.core.expire(self.now_s()):
                self.changed()
                self._end_dead_links()

    def _end_dead_links(self) -> None:
        """A server whose lease has ended may never send another message: nothing is kept for it."""
        for name in self.core.lost_servers & self._links.keys():
            self._links[name].end()
