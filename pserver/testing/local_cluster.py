"""A whole cluster in this process, without sockets: real services, real bytes, one event loop."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pserver.client.cluster import Cluster
from pserver.clock import Clock
from pserver.config import ServerSettings, TrainerSettings
from pserver.server.node import ServerNode
from pserver.transport.faults import FaultPlan, with_faults
from pserver.transport.inprocess import InProcessNetwork
from pserver.transport.loop import LoopThread

T = TypeVar("T")


class LocalCluster:
    """Servers in this process; trainers are threads. Use it in a `with` block.

    Args:
        servers: how many.
        timeout_s: of every operation of its trainers, in seconds.
        trainer_lease_s, server_lease_s: lengths of leases.
        clock: of the coordinator.
    """

    def __init__(
        self,
        servers: int = 1,
        *,
        timeout_s: float = 20.0,
        trainer_lease_s: float = 10.0,
        server_lease_s: float = 5.0,
        clock: Clock | None = None,
    ) -> None:
        self.timeout_s = timeout_s
        self.network = InProcessNetwork()
        self.faults = FaultPlan()
        self._loop = LoopThread("pserver-local-cluster")
        self.nodes = [
            ServerNode(
                ServerSettings(
                    name=f"s{number}",
                    join=None if number == 0 else self.address(0),
                    min_servers=servers if number == 0 else 1,
                    trainer_lease_s=trainer_lease_s,
                    server_lease_s=server_lease_s,
                ),
                clock,
            )
            for number in range(servers)
        ]

    @staticmethod
    def address(server: int) -> str:
        """Address of a server in the network of this process."""
        return f"local:{server + 1}"

    def __enter__(self) -> "LocalCluster":
        self._loop.start()
        for number, node in enumerate(self.nodes):
            self.network.serve(self.address(number), node.handlers)
            self._loop.run(node.start(self.address(number), self.network.connect))
        return self

    def __exit__(self, *error: object) -> None:
        for node in reversed(self.nodes):
            self._loop.run(node.stop())
        self._loop.close()

    def kill(self, server: int) -> None:
        """Takes a server off the network at once."""
        self._loop.run(self._kill(server))

    async def _kill(self, server: int) -> None:
        self.network.stop(self.address(server))
        await self.nodes[server].stop()

    def connect(
        self, rank: int = 0, world_size: int = 1, *, timeout_s: float | None = None, transport: str | None = None
    ) -> Cluster:
        """A trainer's session, like `pserver.connect`; its calls suffer `faults`."""
        settings = TrainerSettings.resolve(
            self.address(0),
            rank=rank,
            world_size=world_size,
            timeout_s=timeout_s or self.timeout_s,
            transport=transport,
            environ={},
        )
        return Cluster(settings, connect_channel=with_faults(self.network.connect, self.faults), shared_loop=self._loop)

    def train(self, trainers: int, program: Callable[[Cluster], T], *, transport: str | None = None) -> list[T]:
        """Runs a program in `trainers` threads, each in its own session; returns their results by rank."""

        def one(rank: int) -> T:
            with self.connect(rank, trainers, transport=transport) as cluster:
                return program(cluster)

        with ThreadPoolExecutor(trainers) as pool:
            return list(pool.map(one, range(trainers)))
