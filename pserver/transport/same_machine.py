"""The caller's part of proving to be on a server's machine: it reads a nonce that lies in that machine's memory."""

from pserver.errors import SharedMemoryUnavailable
from pserver.transport.channel import Channel, unary
from pserver.transport.gen import shards_pb2 as pb
from pserver.transport.methods import SHARDS
from pserver.wire.shm import map_segment


async def read_nonce(channel: Channel, *, timeout_s: float) -> bytes:
    """The nonce that proves that this process is on the machine of the channel's server.

    Raises:
        SharedMemoryUnavailable: it is not, or the server shares nothing; says why. And what the call raises.
    """
    reply = await unary(channel, SHARDS["FindMemory"], pb.FindMemoryRequest(), pb.FindMemoryReply, timeout_s=timeout_s)
    if not reply.segment:
        raise SharedMemoryUnavailable(reply.reason)
    return bytes(map_segment(reply.segment, writable=False))
