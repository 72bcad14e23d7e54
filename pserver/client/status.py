"""Asks a coordinator for the state of its cluster, without joining it."""

from collections.abc import Sequence

from pserver.config import parse_address
from pserver.errors import DeadlineExceeded, NotLeader, ServerUnavailable
from pserver.transport.channel import Connector, unary
from pserver.transport.convert import status_from_proto
from pserver.transport.gen import coordinator_pb2 as pb
from pserver.transport.grpc_channel import GrpcChannel
from pserver.transport.loop import LoopThread
from pserver.transport.methods import COORDINATOR
from pserver.types import ClusterStatus


def fetch_status(address: str, timeout_s: float = 5.0) -> ClusterStatus:
    """What the cluster looks like now.

    Args:
        address: of the coordinator, or of several, "host:port,host:port".
        timeout_s: for each.

    Raises:
        ConfigError: `address` is not of the form host:port.
        ServerUnavailable, DeadlineExceeded: nobody answers there.
        ProtocolMismatch: the server there is no coordinator.
    """
    addresses = address.split(",")
    for each in addresses:
        parse_address(each)
    loop = LoopThread("pserver-status")
    loop.start()
    try:
        return loop.run(_fetch_of(addresses, timeout_s))
    finally:
        loop.close()


async def _fetch_of(addresses: Sequence[str], timeout_s: float) -> ClusterStatus:
    """What the one that leads says."""
    for address in addresses[:-1]:
        try:
            return await _fetch(address, timeout_s, GrpcChannel)
        except (NotLeader, ServerUnavailable, DeadlineExceeded):
            continue
    return await _fetch(addresses[-1], timeout_s, GrpcChannel)


async def _fetch(address: str, timeout_s: float, connect: Connector) -> ClusterStatus:
    channel = connect(address)
    try:
        reply = await unary(channel, COORDINATOR["Status"], pb.StatusRequest(), pb.StatusReply, timeout_s=timeout_s)
    finally:
        await channel.close()
    return status_from_proto(reply)
