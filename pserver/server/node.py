"""One server, apart from the network it is reached by: hosts, services, link."""

import logging
import time
from collections.abc import Mapping

from pserver.clock import Clock, SystemClock
from pserver.config import ServerSettings
from pserver.errors import PserverError
from pserver.server.coordinator_host import CoordinatorHost
from pserver.server.coordinator_service import CoordinatorService
from pserver.server.link import CoordinatorLink
from pserver.server.replica_service import ReplicaService
from pserver.server.shard_host import ShardHost
from pserver.server.shard_service import ShardService
from pserver.transport.channel import Connector
from pserver.transport.inprocess import InProcessNetwork
from pserver.transport.methods import COORDINATOR, REPLICAS, SHARDS, Handler, Method, bind
from pserver.wire.shm import sweep

logger = logging.getLogger(__name__)


class ServerNode:
    """A server that hosts shards, and the coordinator if its settings name no other.

    Belongs to one event loop. `handlers` is what a transport serves.
    """

    def __init__(self, settings: ServerSettings, clock: Clock | None = None) -> None:
        self.settings = settings
        self.shards = ShardHost(settings.name, shared_memory=settings.shared_memory)
        self.coordinator: CoordinatorHost | None = None
        self._link: CoordinatorLink | None = None
        handlers = bind(SHARDS, ShardService(self.shards))
        handlers.update(bind(REPLICAS, ReplicaService(self.shards)))
        if settings.join is None:
            # Seconds grow from one start to the next, so that trainer ids do too.
            self.coordinator = CoordinatorHost(settings, clock or SystemClock(), int(time.time()))
            handlers.update(bind(COORDINATOR, CoordinatorService(self.coordinator)))
        self.handlers: Mapping[str, tuple[Method, Handler]] = handlers

    async def start(self, address: str, connect: Connector) -> None:
        """Starts what runs in the background; returns once the server is linked to its coordinator.

        Args:
            address: where trainers reach this server.
            connect: opens the channel to a coordinator elsewhere.
        """
        if self.settings.shared_memory and (swept := sweep()):
            logger.info("removed %d segments of shared memory whose servers have ended", len(swept))
        self.shards.connect_with(connect)
        target = self.settings.join or address
        if self.coordinator is not None:
            self.coordinator.start()
            local = InProcessNetwork()
            local.serve(address, self.handlers)
            connect = local.connect
        self._link = CoordinatorLink(self.shards, connect, target, address=address)
        await self._link.start()

    async def refused(self) -> PserverError:
        """Waits until the coordinator refuses this server for good, and returns why."""
        assert self._link is not None
        return await self._link.ended()

    async def stop(self) -> None:
        """Ends the link and everything in the background."""
        if self._link is not None:
            await self._link.stop()
        if self.coordinator is not None:
            await self.coordinator.stop()
        await self.shards.close()
