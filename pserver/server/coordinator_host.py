"""Runs the coordinator: time, waiting registrations, and the links to servers."""

import asyncio
import logging
import random
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from pserver.clock import Clock
from pserver.config import ServerSettings
from pserver.core.coordinator import Coordinator, Placement, Registration
from pserver.core.messages import AbandonPlan, Apply, Command, ModelSpec, Prepare, Reject, Report
from pserver.core.models import check_spec
from pserver.errors import ConfigError, DeadlineExceeded, NotLeader, StoreUnavailable
from pserver.server.changed import Changed
from pserver.server.coordination.store import CoordinationStore
from pserver.transport.deadline import LONGEST_BACKOFF_S, Backoff, Deadline
from pserver.transport.tasks import end_tasks
from pserver.types import PushId

logger = logging.getLogger(__name__)

#: How often leases are looked at: this many times in the shortest of them, but at least every 0.1 s.
LOOKS_PER_LEASE = 20
LONGEST_PAUSE_S = 0.1
#: Who waits for an answer waits so long for what has changed to be kept, in seconds.
KEEP_S = 5.0


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

    def cut(self) -> None:
        """Ends the link; nothing more of what was told goes out."""
        while not self._queue.empty():
            self._queue.get_nowait()
        self.end()

    async def commands(self) -> AsyncIterator[Command]:
        """Commands as they come, until the link ends."""
        while (command := await self._queue.get()) is not None:
            yield command


class CoordinatorHost:
    """Owns the `Coordinator`, for as long as this process leads; everything here runs on one event loop.

    What the next coordinator must know is kept before anybody is told of it. Rounds need nothing kept, and wait for
    nothing.

    Args:
        settings: of the server that hosts it.
        clock: tells the time.
        store: what is kept, and who leads.
        first_trainer_id: of a cluster that begins now; above every id of an earlier one.
    """

    def __init__(self, settings: ServerSettings, clock: Clock, store: CoordinationStore, first_trainer_id: int) -> None:
        self._settings = settings
        self._clock = clock
        self._store = store
        self._first_trainer_id = first_trainer_id
        self._core: Coordinator | None = None
        self.term = 0
        shortest_s = min(settings.trainer_lease_s, settings.server_lease_s)
        self._expire_every_s = min(shortest_s / LOOKS_PER_LEASE, LONGEST_PAUSE_S)
        self._changed = Changed()
        self._links: dict[str, ServerLink] = {}
        self._outbox: deque[_Outgoing] = deque()
        self._num_enqueued = self._num_kept = 0
        self._failure: StoreUnavailable | None = None
        self._leading: asyncio.Task[None] | None = None
        self._to_keep = asyncio.Event()

    def start(self, address: str) -> None:
        """Begins to lead, as soon as nobody else does.

        Args:
            address: where others reach this coordinator.
        """
        self._leading = asyncio.create_task(self._lead_forever(address))

    async def start_alone(self, address: str) -> None:
        """The same where there is no other coordinator: returns once this one leads.

        Raises:
            StoreUnavailable, ConfigError: what is kept cannot be used.
        """
        core = await self._begin(address)
        self._leading = asyncio.create_task(self._lead_forever(address, core))

    async def stop(self) -> None:
        """Ends the links, and leads no longer."""
        if self._leading is not None:
            await end_tasks(self._leading)
        await self._store.close()

    @property
    def core(self) -> Coordinator:
        """The coordinator.

        Raises:
            NotLeader: this process does not lead.
        """
        if self._core is None:
            raise NotLeader(
                f"server {self._settings.name} is a coordinator that does not lead now; ask the others, or try again"
            )
        return self._core

    async def _begin(self, address: str) -> Coordinator:
        """Waits until this process leads, and takes over what is kept."""
        self.term = await self._store.lead(address)
        values = await self._store.load()
        now_s = self.now_s()
        core = Coordinator(
            trainer_lease_s=self._settings.trainer_lease_s,
            server_lease_s=self._settings.server_lease_s,
            min_servers=self._settings.min_servers,
            first_trainer_id=self._first_trainer_id,
            now_s=now_s,
            keeps=self._store.durable,
        )
        core.restore(values, now_s, self.term)
        logger.info("server %s is the coordinator, term %d", self._settings.name, self.term)
        self._core = core
        self.changed()
        return core

    async def _lead_forever(self, address: str, core: Coordinator | None = None) -> None:
        while True:
            try:
                core = core or await self._begin(address)
            except (NotLeader, StoreUnavailable, ConfigError) as error:
                logger.error("this coordinator cannot lead: %s", error)
                await asyncio.sleep(random.uniform(0, LONGEST_BACKOFF_S))
                continue
            try:
                await self._while_leading(core)
            finally:
                core = None
                self._step_down()

    async def _while_leading(self, core: Coordinator) -> None:
        """Looks at leases and keeps what changes, until another one leads."""
        working = [
            asyncio.create_task(each)
            for each in (self._expire_forever(core), self._keep_forever(), self._until_deposed())
        ]
        try:
            done, _ = await asyncio.wait(working, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except NotLeader as error:
            logger.error("server %s is the coordinator no longer: %s", self._settings.name, error)
        finally:
            await end_tasks(*working)

    async def _until_deposed(self) -> None:
        raise NotLeader(await self._store.deposed())

    def _step_down(self) -> None:
        """Nobody hears anything of this coordinator any more."""
        self._core = None
        self._outbox.clear()
        self._num_kept = self._num_enqueued
        links, self._links = self._links, {}
        for link in links.values():
            link.cut()
        self._changed.notify()

    def now_s(self) -> float:
        """The time on the coordinator's clock."""
        return self._clock.now_s()

    def changed(self) -> None:
        """To be called after every call that may have changed the core: sends commands, wakes who waits."""
        core = self.core
        writes, commands = core.take_writes(), core.take_commands()
        held: list[tuple[ServerLink, Command]] = []
        waits = bool(writes or self._outbox)
        for server, command in commands:
            link = self._links.get(server)
            if link is None:
                continue
            # What is said of rounds follows from what servers have heard already. All else waits, for this very link:
            # who links meanwhile is told what holds by then.
            if waits and not isinstance(command, Prepare | Apply | Reject | AbandonPlan):
                held.append((link, command))
            else:
                link.tell(command)
        if writes or held:
            self._num_enqueued += 1
            self._outbox.append(_Outgoing(writes, held))
            self._to_keep.set()
        self._changed.notify()

    async def kept(self) -> None:
        """Waits until all that has happened is kept, so that it may be answered.

        Raises:
            StoreUnavailable: it is not within `KEEP_S`; says why. NotLeader: another one leads by now.
        """
        number, deadline = self._num_enqueued, Deadline(KEEP_S)
        while self._num_kept < number:
            if not await self._changed.wait(deadline.remaining_s()):
                raise self._failure or StoreUnavailable(f"what has changed was not kept within {KEEP_S:g} s; try again")
        self.core  # noqa: B018 - raises if this process leads no longer

    async def _keep_forever(self) -> None:
        while True:
            if not self._outbox:
                self._to_keep.clear()
                await self._to_keep.wait()
            outgoing = self._outbox[0]
            if outgoing.writes:
                await self._keep(outgoing.writes)
            self._outbox.popleft()
            self._num_kept += 1
            for link, command in outgoing.commands:
                link.tell(command)
            self._changed.notify()

    async def _keep(self, writes: Mapping[str, bytes | None]) -> None:
        """Writes, again and again if it must be: what has happened cannot be undone."""
        backoff = Backoff()
        while True:
            try:
                await self._store.write(writes)
                if self._failure is not None:
                    logger.warning("the coordinator can keep what changes again")
                self._failure = None
                return
            except StoreUnavailable as error:
                if self._failure is None:
                    logger.error("the coordinator cannot keep what changes, and goes on with rounds only: %s", error)
                self._failure = error
            await asyncio.sleep(backoff.next_s())

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
            if self._core is not None:
                self._core.withdraw(push_id.trainer_id, spec.name)
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
        if self._links.get(link.name) is link and self._core is not None:
            del self._links[link.name]
            self._core.server_unlinked(link.name, link.incarnation)
            logger.info("link of server %s closed", link.name)
            self.changed()

    def heard(self, link: "ServerLink", report: Report | None) -> None:
        """Takes a report, or a mere sign of life; a server whose lease has ended is unlinked."""
        if self._links.get(link.name) is not link:
            return  # of a link that another one has taken the place of, or that of an earlier leadership
        if not self.core.server_heard(link.name, self.now_s()):
            link.end()
        elif report is not None:
            self.core.report(link.name, report, self.now_s())
            self.changed()

    async def _expire_forever(self, core: Coordinator) -> None:
        while True:
            await asyncio.sleep(self._expire_every_s)
            if core.expire(self.now_s()):
                self.changed()
                self._end_dead_links(core)

    def _end_dead_links(self, core: Coordinator) -> None:
        """A server whose lease has ended may never send another message: nothing is kept for it."""
        for name in core.lost_servers & self._links.keys():
            self._links[name].end()


@dataclass(frozen=True, slots=True)
class _Outgoing:
    """What must be kept, and the commands that follow from it."""

    writes: Mapping[str, bytes | None]
    commands: Sequence[tuple[ServerLink, Command]]
