"""Keeps a trainer's lease alive on a thread and a connection of its own."""

import asyncio
import logging
from collections.abc import Callable, Mapping

from pserver.client.coordinators import Coordinators
from pserver.client.shard_client import Traffic
from pserver.core.membership import check_figures
from pserver.errors import DeadlineExceeded, NotLeader, PserverError, ServerUnavailable
from pserver.transport.channel import Channel, Connector, unary
from pserver.transport.deadline import Deadline
from pserver.transport.gen import coordinator_pb2 as pb
from pserver.transport.loop import LoopThread
from pserver.transport.methods import COORDINATOR
from pserver.transport.tasks import end_tasks

logger = logging.getLogger(__name__)

#: Renewals per lease, and the longest time between two: they also carry figures for the live view.
RENEWALS_PER_LEASE = 5
LONGEST_PAUSE_S = 1.0
#: One renewal may take this part of a lease.
RENEWAL_PART = 4


class LeaseKeeper:
    """Renews until `close`, or until the lease is lost.

    Args:
        loop: where renewals run; not the one that carries bulk data.
        connect: opens the channel.
        coordinators: one of them leads.
        trainer_id: whose lease.
        lease_s: its length.
        patience_s: if no coordinator can be reached for so long, the lease counts as lost. One that is started again,
            or takes another's place, extends all leases.
        traffic: counters to report.
        on_moved: called with the address of the coordinator that leads, if that is another one than before.
        on_lost: called once, on the loop's thread, with the reason why the lease has ended.
    """

    def __init__(
        self,
        loop: LoopThread,
        connect: Connector,
        coordinators: Coordinators,
        *,
        trainer_id: int,
        lease_s: float,
        patience_s: float,
        traffic: Traffic,
        on_moved: Callable[[str], None],
        on_lost: Callable[[PserverError], None],
    ) -> None:
        self._loop = loop
        self._connect = connect
        self._coordinators = coordinators
        self._patience_s = patience_s
        self._on_moved = on_moved
        self._trainer_id = trainer_id
        self._lease_s = lease_s
        self._traffic = traffic
        self._on_lost = on_lost
        self._pause_s = min(lease_s / RENEWALS_PER_LEASE, LONGEST_PAUSE_S)
        self._reported: Mapping[str, float] = {}
        self._channel: Channel | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts renewing."""
        self._loop.run(self._start())

    def report(self, figures: Mapping[str, float]) -> None:
        """Figures to carry from now on, with the next renewal; replaces those of the same name. Any thread."""
        reported = {**self._reported, **figures}
        check_figures(reported)
        self._reported = reported

    def close(self) -> None:
        """Renews once more, so that the last figures arrive, and stops."""
        self._loop.run(self._stop())

    async def _start(self) -> None:
        self._channel = self._connect(self._coordinators.current)
        self._task = asyncio.create_task(self._run())

    async def _stop(self) -> None:
        if self._task is None or self._channel is None:
            return
        lost = self._task.done()
        await end_tasks(self._task)
        try:
            if not lost:
                await self._renew()
        except PserverError as error:
            logger.warning("the last figures of trainer %d did not arrive: %s", self._trainer_id, error)
        finally:
            await self._channel.close()

    async def _run(self) -> None:
        ends, leads = Deadline(self._patience_s), self._coordinators.current
        while True:
            try:
                await self._renew()
                ends = Deadline(self._patience_s)
                if self._coordinators.current != leads:
                    leads = self._coordinators.current
                    self._on_moved(leads)
            except PserverError as error:
                if not error.retryable and not isinstance(error, DeadlineExceeded):
                    self._on_lost(error)
                    return
                if not ends.remaining_s():
                    self._on_lost(self._unreachable(error))
                    return
            await asyncio.sleep(self._pause_s)

    async def _renew(self) -> None:
        address = self._coordinators.current
        if self._channel is None or self._channel.address != address:
            if self._channel is not None:
                await self._channel.close()
            self._channel = self._connect(address)
        request = pb.RenewRequest(
            trainer_id=self._trainer_id,
            sent_bytes=self._traffic.sent_bytes,
            received_bytes=self._traffic.received_bytes,
            reported=self._reported,
        )
        try:
            await unary(
                self._channel, COORDINATOR["Renew"], request, pb.RenewReply, timeout_s=self._lease_s / RENEWAL_PART
            )
        except (ServerUnavailable, NotLeader, DeadlineExceeded):
            self._coordinators.failed(address)
            raise

    def _unreachable(self, last: PserverError) -> PserverError:
        return ServerUnavailable(
            f"the lease of trainer {self._trainer_id} has ended: the coordinator at {self._coordinators} could not be "
            f"reached for {self._patience_s:g} s. Start the cluster again and connect anew; last failure: {last}"
        )
