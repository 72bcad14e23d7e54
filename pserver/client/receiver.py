"""Values as they come from one shard, in messages."""

from collections.abc import Iterable, Sequence

from pserver.client.arrivals import Arrivals
from pserver.client.region import Region
from pserver.errors import InternalError
from pserver.transport.raw_chunks import RawChunk
from pserver.wire.layout import Bucket


class Receiver:
    """Writes chunks into host memory and checks that every byte came, once and of one round.

    Args:
        where: the server, for messages.
        buckets: those that come; into: where they belong, if there are any.
        arrivals: told of each bucket that is whole.
    """

    def __init__(
        self,
        where: str,
        buckets: Sequence[Bucket],
        into: Region | None,
        arrivals: Arrivals | None,
    ) -> None:
        self._where = where
        self._targets = {bucket.index: into.bucket_bytes(bucket) for bucket in buckets} if into is not None else {}
        self._received = dict.fromkeys(self._targets, 0)
        self._placed: memoryview | None = None
        self._round: int | None = None
        self._arrivals = arrivals
        if arrivals is not None:
            arrivals.begin(self._targets.keys())

    def place(self, bucket: int, offset_bytes: int, num_bytes: int) -> memoryview | None:
        """Where bytes that are about to come belong, to be written there; None: they are none that `take` would."""
        target, stop = self._targets.get(bucket), offset_bytes + num_bytes
        if target is None or offset_bytes != self._received[bucket] or stop > len(target):
            return None
        self._placed = target[offset_bytes:stop]
        return self._placed

    def take(self, round_number: int, chunks: Iterable[RawChunk]) -> int:
        """Writes one message's chunks; returns their bytes."""
        num_bytes = 0
        for chunk in chunks:
            target = self._targets.get(chunk.bucket)
            start, stop = chunk.offset_bytes, chunk.offset_bytes + len(chunk.data)
            if target is None or start != self._received[chunk.bucket] or stop > len(target):
                raise InternalError(
                    f"{self._where} sent bytes {start} to {stop} of bucket {chunk.bucket}, which were not expected"
                )
            if chunk.data is not self._placed:
                target[start:stop] = chunk.data
            self._received[chunk.bucket] = stop
            num_bytes += len(chunk.data)
            if stop == len(target) and self._arrivals is not None:
                self._arrivals.add(chunk.bucket, round_number)
        if self._round not in (None, round_number):
            raise InternalError(
                f"{self._where} sent values of the rounds {self._round} and {round_number} in one stream"
            )
        self._round = round_number
        return num_bytes

    def finish(self) -> int | None:
        """The round of everything received; None if there was nothing to receive.

        Raises:
            InternalError: something is missing.
        """
        for index, target in self._targets.items():
            if self._received[index] != len(target):
                raise InternalError(
                    f"{self._where} sent {self._received[index]} of {len(target)} bytes of bucket {index}"
                )
        return self._round if self._targets else None
