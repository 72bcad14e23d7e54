"""The log of one shard: what happened, in order, until every replica has it. It does not know what that is.

Primary and replicas number entries alike and without gaps, also across primaries: the replica whose log goes furthest
goes on (see `groups`), so what another one has of it is the same. Pure: nothing here waits, sends or locks.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from pserver.errors import InternalError

C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class Entry(Generic[C]):
    """One change and its place in the log, from 1."""

    index: int
    change: C


class Log(Generic[C]):
    """The last entries of a log, and who has them. Not thread-safe.

    Attributes:
        position: index of the last entry; 0: there was none.
        required: the last entry that every replica must have before anything that follows from it is shown.
    """

    def __init__(self) -> None:
        self.position = 0
        self.required = 0
        self._entries: deque[Entry[C]] = deque()
        self._acknowledged: dict[int, int] = {}

    # The primary's part

    def append(self, change: C, *, required: bool) -> Entry[C]:
        """Adds what has just happened.

        Args:
            required: whether the replicas must have it before anything that follows from it is shown.
        """
        self.position += 1
        if required:
            self.required = self.position
        entry = Entry(self.position, change)
        if self._acknowledged:
            self._entries.append(entry)
        return entry

    def admit(self, replica: int, acknowledged: int) -> None:
        """From now on a replica counts, which has every entry up to this one."""
        self._acknowledged.setdefault(replica, acknowledged)

    def dismiss(self, replica: int) -> None:
        """A replica counts no more."""
        self._acknowledged.pop(replica, None)
        self._forget()

    def acknowledge(self, replica: int, index: int) -> None:
        """A replica has every entry up to this one."""
        if replica in self._acknowledged:
            self._acknowledged[replica] = max(self._acknowledged[replica], index)
            self._forget()

    @property
    def replicas(self) -> frozenset[int]:
        """Those that count."""
        return frozenset(self._acknowledged)

    @property
    def replicated(self) -> int:
        """The last entry that every replica has."""
        return min(self._acknowledged.values(), default=self.position)

    def lag_of(self, replica: int) -> int:
        """Entries that a replica has not acknowledged."""
        return self.position - self._acknowledged.get(replica, 0)

    def since(self, index: int) -> Sequence[Entry[C]] | None:
        """The entries after this one; None: the log does not go back so far, or has none of that number."""
        if index > self.position or (
            index < self.position and (not self._entries or self._entries[0].index > index + 1)
        ):
            return None
        return [entry for entry in self._entries if entry.index > index]

    # A replica's part

    def begin_at(self, index: int) -> None:
        """The state is that after this entry; whatever was known is of no more use."""
        self.position = self.required = index
        self._entries.clear()

    def store(self, entry: Entry[C], released: int) -> bool:
        """Takes an entry from the primary; False if it is here already.

        Args:
            released: every replica has the entries up to this one, so that nobody will ask for them.

        Raises:
            InternalError: one in between is missing.
        """
        if entry.index > self.position + 1:
            raise InternalError(f"entry {entry.index} of a log came after entry {self.position}: one is missing")
        new = entry.index > self.position
        if new:
            self.position = self.required = entry.index
            self._entries.append(entry)
        self._drop_to(released)
        return new

    def _forget(self) -> None:
        self._drop_to(self.replicated)

    def _drop_to(self, index: int) -> None:
        while self._entries and self._entries[0].index <= index:
            self._entries.popleft()
