"""One server, apart from the network it is reached by: hosts, services, link."""

import logging
import time
from collections.abc import Mapping

from pserver.clock import Clock, SystemClock
from pserver.config import ServerSettings
from pserver.errors import PserverError
from pserver.server.coordination.open_store import open_store
from pserver.server.coordinator_host import CoordinatorHost
from pserver.server.coordinator_service import CoordinatorService
from pserver.server.link import CoordinatorLink
from pserver.server.replica_service import ReplicaService
from pserver.server.shard_host import ShardHost
from pserver.server.shard_service import ShardService
from pserver.transport.channel import Channel, Connector
from pserver.transport.inprocess import InProcessNetwork
from pserver.transport.methods import COORDINATOR, REPLICAS, SHARDS, Handler, Method, bind
from pserver.wire.shm import sweep

logger = logging.getLogger(__name__)

#: Trainer ids that a cluster may hand out in each second of its life: a later one starts above.
IDS_PER_SECOND = 1 << 20


class ServerNode:
    """A server that hosts shards, and the coordinator if its settings say so.

    Belongs to one event loop. `handlers` is what a transport serves.
    """

    def __init__(self, settings: ServerSettings, clock: Clock | None = None) -> None:
        self.settings = settings
        self.shards = ShardHost(settings.name, shared_memory=settings.shared_memory)
        self.coordinator: CoordinatorHost | None = None
        self._link: CoordinatorLink | None = None
        clock = clock or SystemClock()
        # Seconds grow from one start to the next, so that terms and trainer ids do too where nothing is kept.
        self._store = open_store(
            data_dir=settings.data_dir,
            coordination=settings.coordination,
            first_term=int(time.time()),
            clock=clock,
            lease_ttl_s=max(1, round(settings.server_lease_s)),
        )
        handlers = bind(SHARDS, ShardService(self.shards))
        handlers.update(bind(REPLICAS, ReplicaService(self.shards)))
        if settings.coordinates:
            first_trainer_id = int(time.time()) * IDS_PER_SECOND + 1
            self.coordinator = CoordinatorHost(settings, clock, self._store, first_trainer_id)
            handlers.update(bind(COORDINATOR, CoordinatorService(self.coordinator)))
        self.handlers: Mapping[str, tuple[Method, Handler]] = handlers

    async def start(self, address: str, connect: Connector) -> None:
        """Starts what runs in the background; returns once the server is linked to its coordinator.

        Args:
            address: where trainers and other servers reach this server.
            connect: opens channels to other servers.

        Raises:
            ConfigError, ProtocolMismatch: the coordinator refuses this server, or what was kept cannot be used.
            StoreUnavailable, DeadlineExceeded: nobody leads.
        """
        if self.settings.shared_memory and (swept := sweep()):
            logger.info("removed %d segments of shared memory whose servers have ended", len(swept))
        self.shards.connect_with(connect)
        own = address
        local = InProcessNetwork()
        if self.coordinator is not None:
            local.serve(own, self.handlers)
            if self.settings.coordination is None:
                await self.coordinator.start_alone(own)
            else:
                self.coordinator.start(own)

        def connect_to(address: str) -> Channel:
            return local.connect(own) if self.coordinator is not None and address == own else connect(address)

        async def find() -> str | None:
            if self.settings.coordination is not None:
                return await self._store.leader()
            return self.settings.join or own

        self._link = CoordinatorLink(self.shards, connect_to, find, address=address)
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
        else:
            await self._store.close()
        await self.shards.close()
