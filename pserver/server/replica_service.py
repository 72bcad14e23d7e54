"""The Replicas service: decode, call the core, encode."""

from collections.abc import AsyncIterator

from pserver.server.shard_host import ShardHost
from pserver.transport.changes import ChangeStaging
from pserver.transport.gen import replicas_pb2 as pb
from pserver.transport.methods import first_of
from pserver.wire.shm import map_segment


class ReplicaService:
    """Serves the RPCs of replicas.proto."""

    def __init__(self, host: ShardHost) -> None:
        self._host = host

    async def follow(self, requests: AsyncIterator[pb.FollowRequest]) -> AsyncIterator[pb.FollowReply]:
        first = await first_of(requests)
        address = first.shard
        replica, stream = await self._host.require_replica(
            address.model, address.shard, address.epoch, address.fingerprint
        )
        segment: memoryview | None = None
        if first.segment:
            self._host.proof.check(first.nonce)
            segment = map_segment(first.segment, writable=False)
        staging = ChangeStaging(replica.buckets, segment, model=address.model, shard=address.shard)
        num_parts = 0
        yield pb.FollowReply(position=replica.position)
        async for request in requests:
            arrived = staging.add(request)
            if arrived is not None:
                await self._host.redo(replica, stream, arrived)
                num_parts += not arrived.index
                yield pb.FollowReply(acknowledged=replica.position, num_parts=num_parts, released=replica.released)
