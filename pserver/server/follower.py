"""Keeps one replica of a shard up to date: brings it what has happened, and then what happens."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing, suppress

from pserver.core.changes import Bookkeeping, LoggedChange
from pserver.core.messages import ReplicaAddress, ReplicaCaughtUp, ReplicaFailed, Report
from pserver.core.replication import Entry
from pserver.errors import (
    DeadlineExceeded,
    InternalError,
    PserverError,
    ServerUnavailable,
    SharedMemoryUnavailable,
    StaleEpoch,
)
from pserver.server.hosted_shard import HostedShard
from pserver.server.shard_log import Listener, ShardLog
from pserver.transport.changes import change_messages
from pserver.transport.channel import Channel, Connector
from pserver.transport.deadline import Backoff, Deadline
from pserver.transport.gen import replicas_pb2 as pb
from pserver.transport.methods import REPLICAS, Sendable, encode
from pserver.transport.same_machine import read_nonce
from pserver.transport.tasks import end_tasks, next_or_none

logger = logging.getLogger(__name__)

#: A stream to a replica is renewed at least this often, in seconds.
STREAM_TIMEOUT_S = 30 * 86400.0
#: A replica must say within this time where it is, in seconds.
ANSWER_S = 5.0
#: Parts of the state that may be on their way.
WINDOW = 2
#: A replica that cannot be reached for this part of a server's lease, or is silent for that part, has failed.
UNREACHABLE_PART, SILENT_PART = 0.2, 0.5


class Follower(Listener):
    """The primary's side of one replica. Runs on the server's event loop.

    Args:
        replica: whom to bring it to.
        shard: what.
        log: of the shard.
        connect: opens channels.
        report: tells the coordinator.
        lease_s: of servers.
        in_sync: whether it has all that was ever shown, and nothing may be shown any more that it lacks.
        acknowledged: called when it has more.
    """

    def __init__(
        self,
        replica: ReplicaAddress,
        shard: HostedShard,
        log: ShardLog,
        connect: Connector,
        report: Callable[[Report], None],
        *,
        lease_s: float,
        in_sync: bool,
        acknowledged: Callable[[], None],
    ) -> None:
        self.replica = replica
        self._shard = shard
        self._log = log
        self._connect = connect
        self._report = report
        self._lease_s = lease_s
        self._counts = in_sync
        self._on_acknowledged = acknowledged
        self._queue: deque[Sequence[Sendable] | Entry[LoggedChange]] = deque()
        self._wake = asyncio.Event()
        self._listening = False
        self._shown: int | None = None  # entries up to this one it must have, to be in sync; None: it is, or not yet
        self._caught_up = False
        self._failure = ""  # that the coordinator was told of last
        self._sent = self._acknowledged = 0
        self._num_parts = self._num_parts_taken = 0
        self._progress_s = time.monotonic()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins."""
        if self._counts:
            self._log.entries.admit(self.replica.number, 0)
        self._log.listen(self.replica.number, self)
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Ends; the log waits for this replica no longer."""
        self._log.forget(self.replica.number)
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    def tell(self, entry: Entry[LoggedChange]) -> None:
        if self._listening:
            self._enqueue(entry)

    def _enqueue(self, item: Sequence[Sendable] | Entry[LoggedChange]) -> None:
        if not self._is_behind:
            self._progress_s = time.monotonic()
        self._queue.append(item)
        self._wake.set()

    @property
    def lag(self) -> int:
        """Entries that the replica has not acknowledged."""
        return self._log.entries.lag_of(self.replica.number) if self._counts else self._log.entries.position

    @property
    def _is_behind(self) -> bool:
        """Whether it owes an answer."""
        return bool(self._queue) or self._num_parts_taken < self._num_parts or self._acknowledged < self._sent

    async def _run(self) -> None:
        backoff, told = Backoff(), False
        since = Deadline(self._lease_s * UNREACHABLE_PART)
        while True:
            before = self._progress_s
            try:
                await self._follow_once()
                last: PserverError = ServerUnavailable("it ended the stream")
            except StaleEpoch as error:
                # Another primary has been named: nothing of this shard may be shown any more, and nothing is.
                logger.warning("shard %d: %s: %s", self._shard.number, self.replica.server, error)
                return
            except PserverError as error:
                last = error
            self._listening = False
            if self._progress_s > before:
                backoff.reset()
                since, told = Deadline(self._lease_s * UNREACHABLE_PART), False
            hopeless = not last.retryable or isinstance(last, DeadlineExceeded)
            if not told and (hopeless or not since.remaining_s()):
                told = True
                self._fail(str(last))
            await asyncio.sleep(backoff.next_s())

    def _fail(self, failure: str) -> None:
        logger.warning("shard %d: its replica on %s fails: %s", self._shard.number, self.replica.server, failure)
        self._failure = failure
        self._report(self._failed_report(failure))

    def _failed_report(self, failure: str) -> ReplicaFailed:
        return ReplicaFailed(
            model=self._shard.model,
            shard=self._shard.number,
            epoch=self._shard.epoch,
            number=self.replica.number,
            failure=failure,
        )

    async def _follow_once(self) -> None:
        channel = self._connect(self.replica.address)
        started: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        try:
            hello = await self._hello(channel)
            call = channel.call(REPLICAS["Follow"], self._requests(hello, started), timeout_s=STREAM_TIMEOUT_S)
            async with aclosing(call) as replies:
                while (reply := await self._next(replies)) is not None:
                    self._take(reply, started)
        finally:
            started.cancel()
            await channel.close()

    async def _next(self, replies: AsyncIterator[pb.FollowReply]) -> pb.FollowReply | None:
        """The next reply; None: there are no more.

        Raises:
            DeadlineExceeded: the replica owes one, and has been silent for too long.
        """
        silent_s = self._lease_s * SILENT_PART
        coming: asyncio.Future[pb.FollowReply | None] = asyncio.ensure_future(next_or_none(replies))
        try:
            while not (await asyncio.wait((coming,), timeout=silent_s / 4))[0]:
                if self._is_behind and time.monotonic() - self._progress_s > silent_s:
                    raise DeadlineExceeded(
                        f"server {self.replica.server} at {self.replica.address} has taken nothing for {silent_s:g} s"
                    )
            return coming.result()
        finally:
            if not coming.done():
                await end_tasks(coming)

    def _take(self, reply: pb.FollowReply, started: "asyncio.Future[int]") -> None:
        self._progress_s = time.monotonic()
        if not started.done():
            started.set_result(reply.position)
            return
        self._acknowledged = reply.acknowledged
        self._num_parts_taken = reply.num_parts
        if self.released is not None:
            self.released = reply.released
        self._log.acknowledge(self.replica.number, reply.acknowledged)
        self._look_whether_caught_up()
        self._failure = ""
        self._on_acknowledged()
        self._wake.set()

    async def _hello(self, channel: Channel) -> pb.FollowRequest:
        """The first request: with a segment, if the replica is on this machine."""
        request = pb.FollowRequest(shard=self._shard.address)
        self.released = None
        try:
            request.nonce = await read_nonce(channel, timeout_s=ANSWER_S)
            async with self._shard.exclusive():
                request.segment = self._log.share()
                self.released = 0
        except SharedMemoryUnavailable as error:
            logger.info("shard %d: its replica on %s gets messages: %s", self._shard.number, self.replica.server, error)
        return request

    # What is sent

    async def _requests(self, hello: pb.FollowRequest, started: "asyncio.Future[int]") -> AsyncIterator[Sendable]:
        yield hello
        position = await started
        if not await self._resume(position):
            async for message in self._bring_state():
                yield message
        while True:
            self._wake.clear()
            async for message in self._queued():
                yield message
            await self._wake.wait()

    async def _resume(self, position: int) -> bool:
        """Goes on after the last entry that the replica has; False if it must be brought the whole state.

        Raises:
            InternalError: it counts, and lacks what it must have.
        """
        async with self._shard.exclusive():
            entries = self._log.entries.since(position) if position >= 0 else None
            if entries is None or not self._counts:
                if self._counts:
                    raise InternalError(
                        f"the replica on {self.replica.server} is at entry {position} of the log, of which it should "
                        f"have more; the primary is at {self._log.entries.position}"
                    )
                return False
            self._begin(position)
            self._queue.extend(entries)
        self._log.acknowledge(self.replica.number, position)
        return True

    def _begin(self, position: int) -> None:
        self._queue.clear()
        self._sent = self._acknowledged = position
        self._num_parts = self._num_parts_taken = 0
        self._listening = True

    async def _bring_state(self) -> AsyncIterator[Sendable]:
        """Everything, bucket by bucket, while rounds go on: what happens in between goes in between."""
        async with self._shard.exclusive() as shard:
            self._begin(self._log.entries.position)
            for part in shard.state_parts():
                position = self._log.entries.position if isinstance(part, Bookkeeping) else 0
                self._put(change_messages(part, position=position))
            num_buckets = len(shard.buckets)
        for number in range(num_buckets):
            async for message in self._until_taken(self._num_parts - WINDOW + 1):
                yield message
            async with self._shard.exclusive() as shard:
                self._put(change_messages(shard.bucket_part(number)))
        async for message in self._until_taken(self._num_parts):
            yield message
        self._counts = True
        self._log.entries.admit(self.replica.number, self._acknowledged)
        # What was shown until now was shown without it.
        self._shown = self._log.entries.position
        self._look_whether_caught_up()

    def _look_whether_caught_up(self) -> None:
        if self._shown is not None and self._acknowledged >= self._shown:
            self._shown = None
            self._caught_up = True
            self._report(self._caught_up_report())

    def _caught_up_report(self) -> ReplicaCaughtUp:
        return ReplicaCaughtUp(
            model=self._shard.model,
            shard=self._shard.number,
            epoch=self._shard.epoch,
            number=self.replica.number,
        )

    def reports(self) -> list[Report]:
        """What the coordinator may have missed."""
        found: list[Report] = [self._caught_up_report()] if self._caught_up else []
        return [*found, self._failed_report(self._failure)] if self._failure else found

    async def _until_taken(self, num_parts: int) -> AsyncIterator[Sendable]:
        """Sends what is queued until the replica has taken so many parts."""
        while self._num_parts_taken < num_parts:
            self._wake.clear()
            async for message in self._queued():
                yield message
            if self._num_parts_taken < num_parts:
                await self._wake.wait()

    def _put(self, messages: Iterable[Sendable]) -> None:
        """Queues a part of the state as it is now: copied, since the shard goes on."""
        self._num_parts += 1
        self._enqueue([encode(each) for each in messages])

    async def _queued(self) -> AsyncIterator[Sendable]:
        """The messages of what is queued."""
        while self._queue:
            item = self._queue.popleft()
            if isinstance(item, Entry):
                self._sent = item.index
                offsets = self._log.offsets_of(item.change) if self.released is not None else None
                released = self._log.entries.replicated
                for message in change_messages(item.change, index=item.index, released=released, offsets=offsets):
                    yield message
            else:
                for message in item:
                    yield message
