"""Asks a coordinator for the state of its cluster, without joining it."""

from pserver.config import parse_address
from pserver.transport.channel import Connector, unary
from pserver.transport.convert import status_from_proto
from pserver.transport.gen import coordinator_pb2 as pb
from pserver.transport.grpc_channel import GrpcChannel
from pserver.transport.loop import LoopThread
from pserver.transport.methods import COORDINATOR
from pserver.types import ClusterStatus


def fetch_status(address: str, timeout_s: float = 5.0) -> ClusterStatus:
    """What the cluster looks like now.

    Raises:
        ConfigError: `address` is not of the form host:port.
        ServerUnavailable, DeadlineExceeded: nobody answers there.
        ProtocolMismatch: the server there is no coordinator.
    """
    parse_address(address)
    loop = LoopThread("pserver-status")
    loop.start()
    try:
        return loop.run(_fetch(address, timeout_s, GrpcChannel))
    finally:
        loop.close()


async def _fetch(address: str, timeout_s: float, connect: Connector) -> ClusterStatus:
    channel = connect(address)
    try:
        reply = await unary(channel, COORDINATOR["Status"], pb.StatusRequest(), pb.StatusReply, timeout_s=timeout_s)
    finally:
        await channel.close()
    return status_from_proto(reply)
