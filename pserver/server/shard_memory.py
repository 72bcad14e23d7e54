"""The shared memory of one shard: values that trainers on this machine read, and a mailbox for each of them."""

from collections.abc import Sequence

import torch

from pserver.errors import InvalidRequest, SharedMemoryUnavailable
from pserver.types import PushId
from pserver.wire.layout import Bucket
from pserver.wire.shared_buckets import BucketOffsets, SharedBuckets
from pserver.wire.shm import Segment


class ShardMemory:
    """Segments of one shard. A `Publication` of its values: a seqlock whose only writer is the shard.

    Args:
        buckets: of the shard.
        exchanged: those that travel with every step; a mailbox has room for one push of them.
        fingerprint, epoch: what the shard is of.

    Raises:
        SharedMemoryUnavailable: there is no such memory, or not enough.

    Belongs to the owner of the shard's lock; the lease may be written at any time.
    """

    def __init__(self, buckets: Sequence[Bucket], exchanged: Sequence[Bucket], *, fingerprint: int, epoch: int) -> None:
        self._closed = False
        self._label = (fingerprint, epoch)
        self._exchanged = BucketOffsets(exchanged)
        self._mailboxes: dict[int, tuple[Segment, SharedBuckets]] = {}
        offsets = BucketOffsets(buckets)
        self._segment = Segment(offsets.num_bytes)
        self._values = SharedBuckets(self._segment.memory, offsets)
        for bucket in buckets:
            self._values.set_word(bucket.index, 1)  # nobody's values yet
        self._values.label(fingerprint, epoch)

    # Values

    @property
    def name(self) -> str:
        """Of the segment of values."""
        return self._segment.name

    def tensor_of(self, bucket: Bucket) -> torch.Tensor:
        """Where trainers read a bucket."""
        return self._values.tensor_of(bucket)

    def begin(self, bucket: int) -> None:
        """Readers that come now try again later, and so do those that are under way."""
        self._values.set_word(bucket, self._values.word(bucket) | 1)

    def end(self, bucket: int, round_number: int) -> None:
        """The bucket may be read, as of this round."""
        self._values.set_word(bucket, round_number << 1)

    def extend_lease(self, until_ns: int) -> None:
        """Until when these values may be read without asking, in ns of the machine's monotonic clock."""
        if not self._closed:
            self._values.lease_ns = until_ns

    def relabel(self, epoch: int) -> None:
        """The values are of another epoch; there may be no mailboxes yet."""
        self._label = (self._label[0], epoch)
        self._values.label(*self._label)

    # Mailboxes

    def open_mailbox(self, trainer_id: int) -> str:
        """The name of a trainer's mailbox, made if it has none.

        Raises:
            SharedMemoryUnavailable: there is not enough memory, or it has been closed.
        """
        if self._closed:
            raise SharedMemoryUnavailable("the model has ended, and its memory with it")
        known = self._mailboxes.get(trainer_id)
        if known is None:
            segment = Segment(self._exchanged.num_bytes)
            buckets = SharedBuckets(segment.memory, self._exchanged)
            buckets.label(*self._label)
            known = self._mailboxes[trainer_id] = (segment, buckets)
        return known[0].name

    def pushed(self, push_id: PushId) -> "MailboxPush":
        """What a trainer says it has put into its mailbox.

        Raises:
            InvalidRequest: it has none.
        """
        known = self._mailboxes.get(push_id.trainer_id)
        if known is None:
            raise InvalidRequest(f"trainer {push_id.trainer_id} has no mailbox here; open one, or send messages")
        return MailboxPush(known[1], push_id)

    def close_mailbox(self, trainer_id: int) -> None:
        """Removes a trainer's mailbox; gradients in it that belong to a decided round stay readable until then."""
        known = self._mailboxes.pop(trainer_id, None)
        if known is not None:
            known[0].close()

    def close(self, *, revoke: bool = True) -> None:
        """Removes everything.

        Args:
            revoke: whether readers are to see that the lease is over, and ask. If not, they may read until it is: the
                values stay those of their round, and whoever has just stepped wants them.
        """
        self._closed = True
        if revoke:
            self._values.lease_ns = 0
        self._segment.close()
        for trainer_id in list(self._mailboxes):
            self.close_mailbox(trainer_id)


class MailboxPush:
    """One push that lies in a mailbox: `core.staging.Pushed`, without a copy."""

    def __init__(self, mailbox: SharedBuckets, push_id: PushId) -> None:
        self._mailbox = mailbox
        self._push_id = push_id

    @property
    def empty(self) -> bool:
        """It never is."""
        return False

    def lent(self) -> bool:
        """Whether every bucket is of this push."""
        return all(word == self._push_id.sequence for word in self._mailbox.words())

    def complete(self) -> dict[int, torch.Tensor]:
        """Every bucket, where the trainer wrote it.

        Raises:
            InvalidRequest: a bucket is of another push.
        """
        if not self.lent():
            raise InvalidRequest(
                f"the mailbox of trainer {self._push_id.trainer_id} should hold its push {self._push_id.sequence} in "
                f"every bucket, but holds the pushes {sorted(set(self._mailbox.words()))[:8]}"
            )
        return dict(self._mailbox.tensors)
