"""A trainer's session with a cluster."""

import asyncio
import atexit
import logging
import os
import secrets
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor, ThreadPoolExecutor
from contextvars import ContextVar, Token
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from google.protobuf.message import Message

from pserver.client.contexts import ContextBook
from pserver.client.coordinators import Coordinators
from pserver.client.lease import LeaseKeeper
from pserver.client.push_ids import PushIds
from pserver.client.shard_client import Traffic
from pserver.config import TrainerSettings
from pserver.errors import ConfigError, InvalidRequest, NotLeader, PserverError, ServerUnavailable
from pserver.transport.channel import Channel, Connector, unary
from pserver.transport.convert import push_id_to_proto, status_from_proto
from pserver.transport.deadline import Deadline, retry
from pserver.transport.gen import coordinator_pb2 as pb
from pserver.transport.grpc_channel import GrpcChannel
from pserver.transport.loop import LoopThread, Running
from pserver.transport.methods import COORDINATOR
from pserver.transport.tasks import end_tasks
from pserver.types import PROTOCOL_VERSION, ClusterStatus

logger = logging.getLogger(__name__)

T = TypeVar("T")
M = TypeVar("M", bound=Message)

#: A polite goodbye may take this long, in seconds; the lease ends anyway.
LEAVE_TIMEOUT_S = 2.0

_current: ContextVar["Cluster | None"] = ContextVar("pserver_cluster", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatistics:
    """Counters since the session started: bytes of tensor data, and attempts that had to be repeated."""

    sent_bytes: int
    received_bytes: int
    num_retries: int


class Cluster:
    """A trainer's membership in a cluster; make it with `connect` and use it in a `with` block.

    Methods may be called from any thread.

    Args:
        settings: address, rank, world size, timeout.
        connect_channel: opens channels; over gRPC unless told otherwise.
        shared_loop: event loop to use in place of threads of its own; whoever made it closes it.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        *,
        connect_channel: Connector = GrpcChannel,
        shared_loop: LoopThread | None = None,
    ) -> None:
        self.settings = settings
        self.contexts = ContextBook()
        self.traffic = Traffic()
        self._connect_channel = connect_channel
        self._shared_loop = shared_loop
        self._loop = shared_loop or LoopThread("pserver-network")
        self._lease_loop = shared_loop or LoopThread("pserver-lease")
        self._channels: dict[str, Channel] = {}
        self._coordinators = Coordinators(settings.addresses)
        self._coordinator_channels: dict[str, Channel] = {}
        self._nonce = secrets.token_hex(16)
        self._member: pb.JoinReply | None = None
        self._push_ids = PushIds(0)
        self._lease: LeaseKeeper | None = None
        self._lost: PserverError | None = None
        self._under_way: set[asyncio.Task[Any]] = set()  # on the network loop; ended when the lease is lost
        self._background: set[asyncio.Task[None]] = set()  # on the network loop; ended with the session
        self._worker: ThreadPoolExecutor | None = None
        self._to_complete: dict[weakref.WeakMethod[Callable[[], None]], None] = {}
        self._closed = False
        self._process = os.getpid()
        self._token: Token[Cluster | None] | None = None

    # Life

    def start(self) -> None:
        """Joins the cluster; waits for a coordinator that is not up yet, with a message after 2 s.

        Raises:
            ServerUnavailable: no coordinator answered within the timeout.
            RankTaken: another living trainer keeps the rank.
        """
        if self._member is not None or self._closed:
            raise InvalidRequest("this cluster session was started before; make a new one with pserver.connect()")
        self._process = os.getpid()
        if self._shared_loop is None:
            self._loop.start()
            self._lease_loop.start()
        try:
            member = self._loop.run(self._join())
            self._member = member
            self._push_ids = PushIds(member.trainer_id)
            self._lease = LeaseKeeper(
                self._lease_loop,
                self._connect_channel,
                self._coordinators,
                trainer_id=member.trainer_id,
                lease_s=member.lease_s,
                patience_s=max(member.lease_s, self.settings.timeout_s),
                traffic=self.traffic,
                on_moved=self._on_moved,
                on_lost=self._on_lost,
            )
            self._lease.start()
        except BaseException:
            self.close()
            raise
        atexit.register(self.close)
        logger.info("trainer %d joined %s as rank %d", member.trainer_id, self.settings.address, member.rank)

    def close(self) -> None:
        """Leaves the cluster and ends the session; closing twice is no error.

        In a process that was forked from the session's it does nothing: the session goes on where it was opened.
        """
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        if self._forked:
            return
        if self._worker is not None:
            self._worker.shutdown(cancel_futures=True)
        lost = self._lost is not None
        if self._lease is not None:
            self._lease.close()
        if self._member is not None and not lost:
            try:
                self._loop.run(self._leave())
            except PserverError as error:
                logger.warning("trainer %d could not say goodbye: %s", self._member.trainer_id, error)
        self._loop.run(self._close_channels())
        if self._shared_loop is None:
            self._loop.close()
            self._lease_loop.close()

    def __enter__(self) -> "Cluster":
        self.start()
        self._token = _current.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        if self._token is not None:
            _current.reset(self._token)
            self._token = None
        try:
            if error[0] is None and not self._closed:
                for complete in tuple(self._to_complete):
                    if (found := complete()) is not None:
                        found()
        finally:
            self.close()

    # For training scripts

    @property
    def rank(self) -> int:
        """This trainer's rank: its place in sums, and the part of the data it may take."""
        return self.require_member().rank

    @property
    def trainer_id(self) -> int:
        """This trainer's id; no other trainer ever has it."""
        return self.require_member().trainer_id

    @property
    def world_size(self) -> int:
        """Number of trainers that the first round waits for."""
        return self.settings.world_size

    def report(self, **figures: float) -> None:
        """Figures for `pserver status` and the live view, for example loss; sent with the next lease renewal."""
        if self._lease is None:
            raise InvalidRequest("the cluster session is not started; use `with pserver.connect() as cluster:`")
        self._lease.report({name: float(value) for name, value in figures.items()})

    def status(self) -> ClusterStatus:
        """What the cluster looks like now."""
        reply = self.call_coordinator("Status", pb.StatusRequest(), pb.StatusReply, what="asking for the status")
        return status_from_proto(reply)

    def drop_model(self, name: str) -> None:
        """Removes a model from the cluster and frees its memory on every server; an unknown name is no error."""
        with self._push_ids.one() as push_id:
            request = pb.DropModelRequest(push_id=push_id_to_proto(push_id), model=name)
            self.call_coordinator("DropModel", request, pb.DropModelReply, what=f"dropping model {name!r}")

    def statistics(self) -> ClusterStatistics:
        """Counters since the session started."""
        return ClusterStatistics(
            sent_bytes=self.traffic.sent_bytes,
            received_bytes=self.traffic.received_bytes,
            num_retries=self.traffic.num_retries,
        )

    # For the rest of the client

    def require_member(self) -> pb.JoinReply:
        """The membership.

        Raises:
            InvalidRequest: the session is not started, or closed, or was opened before this process was forked.
        """
        if self._forked:
            raise InvalidRequest(
                f"this cluster session belongs to process {self._process}, from which this process was forked; connect "
                "anew here to train (data loading needs no connection)"
            )
        if self._member is None or self._closed:
            raise InvalidRequest("the cluster session is not open; use it inside `with pserver.connect() as cluster:`")
        return self._member

    @property
    def worker(self) -> Executor:
        """One thread for what a training loop should not wait for; calls run in order."""
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="pserver-early")
        return self._worker

    def complete_at_exit(self, complete: Callable[[], None]) -> None:
        """A method to call at the end of the `with` block, if that ends well: a step that is under way still counts."""
        self._to_complete[weakref.WeakMethod(complete)] = None

    @property
    def push_ids(self) -> PushIds:
        """Where mutations get their ids from."""
        return self._push_ids

    def channel(self, address: str) -> Channel:
        """The channel to a server; used on the network loop only."""
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = self._connect_channel(address)
        return channel

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs network work to its end, or until the lease is lost.

        Raises:
            PserverError: what the work raised, or why the lease has ended.
        """
        return self.begin(coroutine).result()

    def begin(self, coroutine: Coroutine[Any, Any, T]) -> Running[T]:
        """Runs network work in the background, until its end or that of the lease."""
        try:
            self.require_member()
        except InvalidRequest:
            coroutine.close()
            raise
        return self._loop.begin(self._until_lost(coroutine))

    def post(self, function: Callable[..., None], *arguments: Any) -> None:
        """Calls a quick function on the network loop, soon; such calls keep their order.

        Raises:
            InvalidRequest: the session is not open.
        """
        self.require_member()
        self._loop.post(function, *arguments)

    def call_coordinator(
        self, method: str, request: Message, reply_type: type[M], *, what: str, timeout_s: float | None = None
    ) -> M:
        """Calls the coordinator, with retries until the deadline."""
        deadline = Deadline(self.settings.timeout_s if timeout_s is None else timeout_s)
        return self.run(self._call_coordinator(method, request, reply_type, deadline, what))

    async def ask_coordinator(
        self, method: str, request: Message, reply_type: type[M], deadline: Deadline, what: str
    ) -> M:
        """`call_coordinator` for what runs on the network loop already."""
        return await self._call_coordinator(method, request, reply_type, deadline, what)

    def in_background(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs work on the network loop, and from it, until its end or that of the session."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def retry(
        self, attempt: Any, deadline: Deadline, what: str, pause: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> Any:
        """`retry` that counts the repeats. On the network loop only."""
        first = True

        async def counted(remaining_s: float) -> Any:
            nonlocal first
            if not first:
                self.traffic.num_retries += 1
            first = False
            return await attempt(remaining_s)

        return await retry(counted, deadline=deadline, what=what, pause=pause)

    # Inside

    @property
    def _forked(self) -> bool:
        """Whether this is another process than the session's: it has none of the session's threads."""
        return self._process != os.getpid()

    async def _join(self) -> pb.JoinReply:
        request = pb.JoinRequest(nonce=self._nonce, rank=self.settings.rank, protocol=PROTOCOL_VERSION)
        deadline = Deadline(self.settings.timeout_s)
        return await self._call_coordinator("Join", request, pb.JoinReply, deadline, "joining")

    async def _leave(self) -> None:
        assert self._member is not None
        with self._push_ids.one() as push_id:
            request = pb.LeaveRequest(push_id=push_id_to_proto(push_id))
            await self._call_coordinator("Leave", request, pb.LeaveReply, Deadline(LEAVE_TIMEOUT_S), "leaving")

    async def _call_coordinator(
        self, method: str, request: Message, reply_type: type[M], deadline: Deadline, what: str
    ) -> M:
        async def attempt(remaining_s: float) -> M:
            address = self._coordinators.current
            channel = self._coordinator_channels.get(address)
            if channel is None:
                channel = self._coordinator_channels[address] = self._connect_channel(address)
            try:
                return await unary(channel, COORDINATOR[method], request, reply_type, timeout_s=remaining_s)
            except (ServerUnavailable, NotLeader):
                self._coordinators.failed(address)
                raise

        where = f"{what}: coordinator at {self._coordinators}"
        reply: M = await self.retry(attempt, deadline, where)
        return reply

    async def _until_lost(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs work that ends when the lease is lost. It is this task's own: a small step has no time for another."""
        if self._lost is not None:
            coroutine.close()
            raise self._lost
        task = asyncio.current_task()
        assert task is not None
        self._under_way.add(task)
        try:
            return await coroutine
        except asyncio.CancelledError:
            if self._lost is None:
                raise
            task.uncancel()
            raise self._lost from None
        finally:
            self._under_way.discard(task)

    def _on_moved(self, address: str) -> None:
        """Another coordinator leads: calls to the one before may never be answered."""
        self._loop.spawn(self._leave_coordinators(address))

    async def _leave_coordinators(self, leads: str) -> None:
        for address in [each for each in self._coordinator_channels if each != leads]:
            await self._coordinator_channels.pop(address).close()

    def _on_lost(self, error: PserverError) -> None:
        logger.error("trainer's lease is lost: %s", error)
        self._loop.spawn(self._set_lost(error))

    async def _set_lost(self, error: PserverError) -> None:
        if self._lost is None:
            self._lost = error
            for task in self._under_way:
                task.cancel()

    async def _close_channels(self) -> None:
        await end_tasks(*self._background)
        channels = [*self._channels.values(), *self._coordinator_channels.values()]
        self._channels, self._coordinator_channels = {}, {}
        await asyncio.gather(*(channel.close() for channel in channels))


def connect(
    address: str | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    timeout_s: float | None = None,
    transport: str | None = None,
) -> Cluster:
    """A session with the cluster whose coordinator is at `address`; use it in a `with` block.

    Arguments that are None come from PSERVER_ADDRESS, PSERVER_RANK, PSERVER_WORLD_SIZE, PSERVER_TIMEOUT_S
    (`pserver launch` sets these) and PSERVER_TRANSPORT, then from defaults.

    Args:
        address: "host:port" of the coordinator; several are written "host:port,host:port".
        rank: this trainer's rank, below `world_size`; by default the coordinator chooses.
        world_size: number of trainers that the first round waits for; default 1.
        timeout_s: deadline of every operation, in seconds; default 60.
        transport: how tensors travel: "shm" through shared memory, which wants servers on this machine; "tcp" in
            messages on connections beside gRPC's, or on gRPC's own where the server's other port cannot be reached;
            "grpc" on gRPC's alone. "auto", the default, uses memory where it can and says in the log where it cannot,
            else does as "tcp".

    Raises:
        ConfigError: no address, or a value that cannot be used.
    """
    settings = TrainerSettings.resolve(
        address, rank=rank, world_size=world_size, timeout_s=timeout_s, transport=transport
    )
    return Cluster(settings, connect_channel=channels_for(settings.transport))


def channels_for(transport: str) -> Connector:
    """Opens channels that keep to this one of `TRANSPORTS`."""
    return partial(GrpcChannel, sockets=transport != "grpc")


def current_cluster() -> Cluster:
    """The cluster of the innermost `with pserver.connect()` block of this thread.

    Raises:
        ConfigError: there is none.
    """
    cluster = _current.get()
    if cluster is None:
        raise ConfigError(
            "no cluster here: work inside `with pserver.connect() as cluster:`, or pass cluster=... (a new thread does "
            "not inherit it)"
        )
    return cluster
