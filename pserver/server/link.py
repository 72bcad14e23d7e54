"""Keeps a server linked to its coordinator: reports out, commands in, again after every break."""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress

import torch

from pserver.core.messages import Applied, Report
from pserver.errors import DeadlineExceeded, PserverError, ServerEnded, ServerUnavailable
from pserver.server.shard_host import ShardHost
from pserver.transport.channel import Connector
from pserver.transport.convert import command_from_proto, report_to_proto
from pserver.transport.deadline import LONGEST_BACKOFF_S, SAY_SO_AFTER_S, Backoff, Deadline
from pserver.transport.gen import coordinator_pb2 as pb
from pserver.transport.methods import COORDINATOR
from pserver.transport.tasks import end_tasks
from pserver.types import PROTOCOL_VERSION

logger = logging.getLogger(__name__)

#: A link is renewed at least this often, in seconds.
LINK_TIMEOUT_S = 30 * 86400.0
#: While it is linked, a server looks so often whether another coordinator leads, in seconds.
LOOK_FOR_LEADER_S = 0.5
#: A server must have been welcomed within this time, in seconds.
JOIN_TIMEOUT_S = 60.0
#: Heartbeats per lease.
BEATS_PER_LEASE = 5
#: Nobody waits for the news that a round was applied: it is told this much later, in seconds, if no later one was.
APPLIED_DELAY_S = 0.05


class CoordinatorLink:
    """The link of one server. Runs on the server's event loop.

    Args:
        host: whose reports go out, and who carries out commands.
        connect: opens channels.
        find: the address of the coordinator; None: nobody leads now.
        address: where trainers reach this server.
    """

    def __init__(
        self, host: ShardHost, connect: Connector, find: Callable[[], Awaitable[str | None]], *, address: str
    ) -> None:
        self._host = host
        self._connect = connect
        self._find = find
        self._coordinator = "an address that is not known yet"
        self._term = 0
        self._backoff = Backoff()
        self._hello = pb.Hello(
            name=host.name,
            address=address,
            incarnation=secrets.randbits(62),
            protocol=PROTOCOL_VERSION,
            arithmetic=arithmetic(),
        )
        self._outgoing: asyncio.Queue[pb.ServerMessage] = asyncio.Queue()
        self._applied: dict[tuple[str, int], Applied] = {}
        self._welcomed = asyncio.Event()
        self._refused: PserverError | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Links, and returns once the coordinator has welcomed the server.

        Raises:
            ConfigError, ProtocolMismatch: the coordinator refuses this server.
            DeadlineExceeded: it did not answer within `JOIN_TIMEOUT_S`.
        """
        self._host.send_reports_to(self._report)
        self._task = asyncio.create_task(self._run())
        welcomed = asyncio.create_task(self._welcomed.wait())
        done, _ = await asyncio.wait((self._task, welcomed), timeout=JOIN_TIMEOUT_S, return_when="FIRST_COMPLETED")
        welcomed.cancel()
        if self._refused is not None:
            raise self._refused
        if not done:
            raise DeadlineExceeded(
                f"the coordinator at {self._coordinator} did not answer within {JOIN_TIMEOUT_S:g} s; start it first "
                "(`pserver serve --coordinator`) and check the address"
            )

    async def ended(self) -> PserverError:
        """Waits until the coordinator refuses this server for good, and returns why."""
        assert self._task is not None
        await asyncio.wait((self._task,))
        return self._refused or ServerUnavailable(f"the link to the coordinator at {self._coordinator} was stopped")

    async def stop(self) -> None:
        """Ends the link."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    def _report(self, report: Report) -> None:
        if not isinstance(report, Applied):
            self._outgoing.put_nowait(report_to_proto(report))
            return
        if not self._applied:
            asyncio.get_running_loop().call_later(APPLIED_DELAY_S, self._report_applied)
        self._applied[report.model, report.shard] = report

    def _report_applied(self) -> None:
        applied, self._applied = self._applied, {}
        for report in applied.values():
            self._outgoing.put_nowait(report_to_proto(report))

    async def _run(self) -> None:
        since = Deadline(JOIN_TIMEOUT_S)
        said_so = False
        while True:
            linked = self._welcomed.is_set()
            try:
                await self._link_to(await self._find_coordinator())
                last: PserverError = ServerUnavailable("it closed the link")
            except ServerEnded as error:
                last = error
                logger.warning("server %s begins anew: %s", self._host.name, error)
                await self._host.drop_all()
                self._hello.incarnation = secrets.randbits(62)
            except PserverError as error:
                last = error
                if not error.retryable and not isinstance(error, DeadlineExceeded):
                    self._refused = error
                    logger.error("coordinator at %s refuses this server: %s", self._coordinator, error)
                    return
            if self._welcomed.is_set() and not linked:
                self._backoff.reset()
                since, said_so = Deadline(JOIN_TIMEOUT_S), False
            if not said_so and since.elapsed_s() > SAY_SO_AFTER_S:
                said_so = True
                logger.warning("not linked to the coordinator at %s, still trying: %s", self._coordinator, last)
            await asyncio.sleep(self._backoff.next_s())

    async def _find_coordinator(self) -> str:
        found = await self._find()
        if found is None:
            raise ServerUnavailable("no coordinator leads now")
        self._coordinator = found
        return found

    async def _link_to(self, coordinator: str) -> None:
        """One link, until it ends or another coordinator leads."""
        linking = asyncio.create_task(self._link_once(coordinator))
        try:
            while not (await asyncio.wait((linking,), timeout=LOOK_FOR_LEADER_S))[0]:
                with suppress(PserverError):
                    if await self._find() not in (None, coordinator):
                        return
            linking.result()
        finally:
            await end_tasks(linking)

    async def _link_once(self, coordinator: str) -> None:
        channel = self._connect(coordinator)
        outgoing: asyncio.Queue[pb.ServerMessage] = asyncio.Queue()
        hello_ns = time.monotonic_ns()
        outgoing.put_nowait(pb.ServerMessage(hello=self._hello))
        beats: asyncio.Task[None] | None = None
        try:
            call = channel.call(COORDINATOR["Link"], _drain(outgoing), timeout_s=LINK_TIMEOUT_S)
            async with aclosing(call) as messages:
                async for message in messages:
                    assert isinstance(message, pb.CoordinatorMessage)
                    if message.WhichOneof("kind") != "welcome":
                        await self._host.handle(command_from_proto(message))
                        continue
                    if message.welcome.term < self._term:
                        raise ServerUnavailable(
                            f"the coordinator at {coordinator} is of term {message.welcome.term}, but one of term "
                            f"{self._term} has led since"
                        )
                    self._term = message.welcome.term
                    # A coordinator that is started again gives every server one lease to come back.
                    self._backoff.longest_s = min(LONGEST_BACKOFF_S, message.welcome.lease_s / BEATS_PER_LEASE)
                    self._host.begin_lease(message.welcome.lease_s, hello_ns)
                    self._outgoing = outgoing
                    for report in await self._host.reports():
                        self._report(report)
                    beats = asyncio.create_task(self._beat(message.welcome.lease_s / BEATS_PER_LEASE))
                    self._welcomed.set()
        finally:
            if beats is not None:
                beats.cancel()
            await channel.close()

    async def _beat(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            for lag in self._host.lags():
                self._report(lag)
            self._outgoing.put_nowait(pb.ServerMessage(heartbeat=pb.Heartbeat(sent_ns=time.monotonic_ns())))


def arithmetic() -> str:
    """What the bits of this process's results depend on, beside the model: torch, its instructions and its threads."""
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"


async def _drain(queue: asyncio.Queue[pb.ServerMessage]) -> AsyncIterator[pb.ServerMessage]:
    while True:
        yield await queue.get()
