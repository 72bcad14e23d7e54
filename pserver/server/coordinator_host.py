"""Runs the coordinator: time, waiting registrations, and the links to servers."""

import asyncio
import logging
from collections.abc import AsyncGenerator

from pserver.clock import Clock
from pserver.config import ServerSettings
from pserver.core.coordinator import Coordinator, Registration
from pserver.core.messages import Command, ModelSpec, Report
from pserver.errors import DeadlineExceeded
from pserver.server.changed import Changed
from pserver.transport.deadline import Deadline
from pserver.types import PushId

logger = logging.getLogger(__name__)

#: How often leases are looked at, in seconds.
EXPIRE_EVERY_S = 0.1
#: Ids of one coordinator process; the next process starts above, since its incarnation is later.
IDS_PER_INCARNATION = 1 << 20


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
        self._changed = Changed()
        self._links: dict[str, asyncio.Queue[Command | None]] = {}
        self._expiry: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts looking at leases."""
        self._expiry = asyncio.create_task(self._expire_forever())

    async def stop(self) -> None:
        """Ends the links and stops looking at leases."""
        if self._expiry is not None:
            self._expiry.cancel()
        for queue in self._links.values():
            queue.put_nowait(None)

    def now_s(self) -> float:
        """The time on the coordinator's clock."""
        return self._clock.now_s()

    def changed(self) -> None:
        """To be called after every call that may have changed the core: sends commands, wakes who waits."""
        for server, command in self.core.take_commands():
            if (queue := self._links.get(server)) is not None:
                queue.put_nowait(command)
        self._changed.notify()

    async def register(self, push_id: PushId, spec: ModelSpec, *, initialised: bool, wait_s: float) -> Registration:
        """Registers a model and waits until this trainer can go on.

        Raises:
            DeadlineExceeded: after `wait_s`; says what is missing. And what `Coordinator.register` raises.
        """
        deadline = Deadline(wait_s)
        while True:
            registration = self.core.register(push_id, spec, initialised=initialised)
            self.changed()
            if registration is not None:
                return registration
            if not await self._changed.wait(deadline.remaining_s()):
                raise DeadlineExceeded(
                    f"model {spec.name!r} was not ready within {wait_s:g} s; it waits for "
                    f"{self.core.waiting_for(spec.name)}"
                )

    async def commands(self, name: str, address: str, incarnation: int) -> AsyncGenerator[Command, None]:
        """What a server must do, from its Hello until its link breaks."""
        self.core.server_joined(name, address, incarnation, self.now_s())
        if (older := self._links.get(name)) is not None:
            older.put_nowait(None)
        queue: asyncio.Queue[Command | None] = asyncio.Queue()
        self._links[name] = queue
        logger.info("server %s joined at %s", name, address)
        self.changed()
        try:
            while (command := await queue.get()) is not None:
                yield command
        finally:
            if self._links.get(name) is queue:
                del self._links[name]
                self.core.server_unlinked(name, incarnation)
                logger.info("link of server %s closed", name)
                self.changed()

    def unlink(self, name: str) -> None:
        """Ends a server's link from this side."""
        if (queue := self._links.get(name)) is not None:
            queue.put_nowait(None)

    def heard(self, server: str, report: Report | None) -> None:
        """Takes a report, or a mere sign of life, of a server."""
        if not self.core.server_heard(server, self.now_s()):
            self.unlink(server)
        elif report is not None:
            self.core.report(server, report)
            self.changed()

    async def _expire_forever(self) -> None:
        while True:
            await asyncio.sleep(EXPIRE_EVERY_S)
            if self.core.expire(self.now_s()):
                self.changed()
