"""What happens on a primary's shard, until every replica has it."""

import logging
from collections.abc import Iterable, Mapping, Sequence

import torch

from pserver.core.changes import Bookkeeping, BucketHeld, ContextHeld, LoggedChange, RoundApplied, RoundPrepared
from pserver.core.messages import Applied
from pserver.core.reduce import memory_for_means
from pserver.core.replication import Entry, Log
from pserver.errors import DeadlineExceeded, InvalidRequest, SharedMemoryUnavailable
from pserver.server.changed import Changed
from pserver.server.log_memory import LogMemory
from pserver.transport.changes import Arrived, Offsets
from pserver.transport.deadline import Deadline
from pserver.wire.layout import Bucket

logger = logging.getLogger(__name__)


class Listener:
    """Hears of new entries, in order. See `Follower`."""

    #: The last entry whose mean gradients it needs no more in the primary's memory; None: it does not read them there.
    released: int | None = None

    def tell(self, entry: Entry[LoggedChange]) -> None:
        """Another entry is in the log."""


class ShardLog:
    """The log of one shard, on its primary or on a replica. Belongs to the owner of the shard's lock.

    Args:
        trained: the shard's buckets that are stepped.
        changed: notified when replicas have more.
        shared_memory: whether replicas on this machine may read mean gradients in memory.
    """

    def __init__(self, trained: Sequence[Bucket], changed: Changed, *, shared_memory: bool) -> None:
        self.entries: Log[LoggedChange] = Log()
        self._trained = trained
        self._changed = changed
        self._shared_memory = shared_memory
        self._memory: LogMemory | None = None
        self._listeners: dict[int, Listener] = {}
        self._prepared = 0  # entry of the round that was prepared last
        self._applied: list[tuple[int, Applied]] = []
        self.last_applied: Applied | None = None  # that was taken

    # What happens

    def reduced(self, buckets: Sequence[Bucket]) -> Mapping[int, torch.Tensor]:
        """Memory for the mean gradients of the next round. May be called on any thread that has the shard."""
        found = self._memory.take(buckets) if self._memory is not None else None
        return memory_for_means(buckets) if found is None else found

    def append(self, changes: Iterable[LoggedChange], applied: Applied | None = None) -> None:
        """Adds what has just happened, and tells the replicas; `applied`: the report of the round that was applied."""
        for change in changes:
            # A round that all shards have prepared is decided, whoever hears of that.
            entry = self.entries.append(change, required=not isinstance(change, RoundApplied))
            if isinstance(change, RoundPrepared):
                self._prepared = entry.index
                if self._memory is not None:
                    self._memory.keep(change, entry.index)
            elif isinstance(change, RoundApplied) and applied is not None:
                self._applied.append((entry.index, applied))
            for listener in self._listeners.values():
                listener.tell(entry)

    def store(self, arrived: Arrived) -> bool:
        """On a replica: takes an entry from the primary; False if it is here already. Raises as `Log.store` does."""
        change = arrived.change
        if isinstance(change, Bookkeeping | ContextHeld | BucketHeld):
            raise InvalidRequest(f"entry {arrived.index} of a log is a part of the state, which no log has")
        if isinstance(change, RoundPrepared):
            self._prepared = arrived.index
        return self.entries.store(Entry(arrived.index, change), arrived.released)

    def begin_at(self, position: int) -> None:
        """On a replica: the state that comes is that after this entry, with the plan that was prepared by then."""
        self.entries.begin_at(position)
        self._prepared = position

    # Who has it

    @property
    def required(self) -> int:
        """The last entry that replicas must have before anything that follows from it is shown."""
        return self.entries.required

    @property
    def prepared(self) -> int:
        """The entry of the round that was prepared last."""
        return self._prepared

    def has(self, index: int) -> bool:
        """Whether every replica has the entries up to this one."""
        return self.entries.replicated >= index

    async def replicated(self, index: int, wait_s: float) -> None:
        """Waits until every replica has the entries up to this one.

        Raises:
            DeadlineExceeded: after `wait_s`.
        """
        deadline = Deadline(wait_s)
        while not self.has(index):
            if not await self._changed.wait(deadline.remaining_s()):
                raise DeadlineExceeded(
                    f"the replicas of this shard have not taken what was pushed within {wait_s:g} s; `pserver status` "
                    "shows who lags"
                )

    def acknowledge(self, number: int, index: int) -> None:
        """A replica has the entries up to this one."""
        self.entries.acknowledge(number, index)
        self._changed.notify()

    def take_applied(self) -> Applied | None:
        """The report of the last round of which every replica knows that it is applied, if there is a new one."""
        found: Applied | None = None
        while self._applied and self.has(self._applied[0][0]):
            _, found = self._applied.pop(0)
        self.last_applied = found or self.last_applied
        return found

    # Replicas

    def listen(self, number: int, listener: Listener) -> None:
        """Tells a replica's follower of every entry from now on."""
        self._listeners[number] = listener

    def forget(self, number: int) -> None:
        """Tells it no more, and waits for it no longer."""
        self._listeners.pop(number, None)
        self.entries.dismiss(number)
        self._changed.notify()

    def share(self) -> str:
        """The segment in which replicas on this machine find mean gradients.

        Raises:
            SharedMemoryUnavailable: there is none.
        """
        if not self._shared_memory:
            raise SharedMemoryUnavailable("the primary was started with --no-shared-memory")
        if self._memory is None:
            self._memory = LogMemory(self._trained, self._released)
        return self._memory.name

    def offsets_of(self, change: LoggedChange) -> Offsets:
        """Where the mean gradients of a round lie in the segment; None: nowhere."""
        if self._memory is None or not isinstance(change, RoundPrepared):
            return None
        return self._memory.offsets_of(change)

    def _released(self) -> int:
        return min(
            (each.released for each in self._listeners.values() if each.released is not None),
            default=self.entries.position,
        )

    def close(self) -> None:
        """Removes what was shared."""
        if self._memory is not None:
            self._memory.close()
