"""Servers behind real gRPC on one event loop of this process, and ways to talk to them."""

from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from google.protobuf.message import Message

from pserver.client.cluster import Cluster, channels_for
from pserver.config import ServerSettings, TrainerSettings
from pserver.server.node import ServerNode
from pserver.transport.channel import Connector
from pserver.transport.faults import FaultPlan, with_faults
from pserver.transport.gen import coordinator_pb2 as pb
from pserver.transport.grpc_channel import GrpcChannel
from pserver.transport.grpc_server import GrpcServer
from pserver.transport.loop import LoopThread
from pserver.transport.methods import COORDINATOR, Method
from pserver.types import ModelStatus

T = TypeVar("T")

#: Of every operation of trainers, unless a test says otherwise.
TIMEOUT_S = 15.0


class GrpcCluster:
    """Use it in a `with` block.

    Args:
        servers: how many; the first one hosts the coordinator.
        trainer_lease_s: length of trainers' leases.
        min_servers: how many the coordinator waits for; all of them unless told otherwise.
        shared_memory: whether the servers share any.
    """

    def __init__(
        self,
        servers: int = 2,
        *,
        trainer_lease_s: float = 10.0,
        min_servers: int | None = None,
        shared_memory: bool = True,
    ) -> None:
        self.loop = LoopThread("service-tests")
        self.nodes: list[ServerNode] = []
        self.servers: list[GrpcServer] = []
        self.addresses: list[str] = []
        self._channels: dict[int, GrpcChannel] = {}
        self._num_servers = servers
        self._trainer_lease_s = trainer_lease_s
        self._min_servers = servers if min_servers is None else min_servers
        self._shared_memory = shared_memory

    def __enter__(self) -> "GrpcCluster":
        self.loop.start()
        for number in range(self._num_servers):
            self.loop.run(self._start(number))
        return self

    def __exit__(self, *error: object) -> None:
        for channel in self._channels.values():
            self.loop.run(channel.close())
        for node, server in reversed(list(zip(self.nodes, self.servers, strict=True))):
            self.loop.run(node.stop())
            self.loop.run(server.stop())
        self.loop.close()

    async def _start(self, number: int) -> None:
        settings = ServerSettings(
            name=f"s{number}",
            join=self.addresses[0] if number else None,
            min_servers=1 if number else self._min_servers,
            trainer_lease_s=self._trainer_lease_s,
            shared_memory=self._shared_memory,
        )
        node = ServerNode(settings)
        server = GrpcServer(node.handlers, host=settings.host, port=settings.port)
        address = await server.start()
        self.nodes.append(node)
        self.servers.append(server)
        self.addresses.append(address)
        await node.start(address, GrpcChannel)

    def connect(
        self,
        rank: int = 0,
        world_size: int = 1,
        *,
        timeout_s: float = TIMEOUT_S,
        transport: str | None = None,
        plan: FaultPlan | None = None,
        connect_channel: Connector | None = None,
    ) -> Cluster:
        """A trainer's session, not started yet; its calls suffer the faults of `plan`."""
        settings = TrainerSettings.resolve(
            self.addresses[0],
            rank=rank,
            world_size=world_size,
            timeout_s=timeout_s,
            transport=transport,
            environ={},
        )
        connect_channel = connect_channel or channels_for(settings.transport)
        return Cluster(settings, connect_channel=with_faults(connect_channel, plan or FaultPlan()))

    def train(
        self,
        trainers: int,
        program: Callable[[Cluster], T],
        *,
        transport: str | None = None,
        plan_of_rank_0: FaultPlan | None = None,
    ) -> list[T]:
        """Runs a program in `trainers` threads, each in its own session; returns their results by rank."""

        def one(rank: int) -> T:
            plan = None if rank else plan_of_rank_0
            with self.connect(rank, trainers, transport=transport, plan=plan) as session:
                return program(session)

        with ThreadPoolExecutor(trainers) as pool:
            return list(pool.map(one, range(trainers)))

    def call(self, method: Method, *requests: Message, server: int = 0, timeout_s: float = 5.0) -> list[Any]:
        """One attempt at an RPC, with exactly these messages; returns all replies."""

        async def stream() -> AsyncIterator[Message]:
            for request in requests:
                yield request

        async def attempt() -> list[Any]:
            channel = self._channels.setdefault(server, GrpcChannel(self.addresses[server]))
            return [reply async for reply in channel.call(method, stream(), timeout_s=timeout_s)]

        return self.loop.run(attempt())

    def status(self) -> pb.StatusReply:
        """What the coordinator says."""
        (reply,) = self.call(COORDINATOR["Status"], pb.StatusRequest())
        return reply

    def model_status(self, name: str) -> ModelStatus:
        """What the coordinator says about one model."""
        return next(model for model in self.status().models if model.name == name)

    def num_contexts(self, name: str) -> list[int]:
        """Contexts that the shards of a model hold, by server; -1 where there is no shard."""
        hosts = [node.shards._shards.get((name, number)) for number, node in enumerate(self.nodes)]
        return [-1 if hosted is None else hosted._shard.num_contexts for hosted in hosts]
