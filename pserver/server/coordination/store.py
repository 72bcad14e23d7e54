"""What coordinators keep for the next one, and how they agree who leads."""

from collections.abc import Mapping
from typing import Protocol


class CoordinationStore(Protocol):
    """Keeps small values that are written seldom, never in a training step, for whoever leads next.

    Belongs to one event loop. Only the leader reads and writes what is kept. Nothing starts before `lead`.

    Attributes:
        durable: False if what is written ends with the process.
    """

    durable: bool

    async def lead(self, address: str) -> int:
        """Waits, for as long as it takes, until this process leads. Cancelled, it leaves nothing behind.

        May be called again once the leadership has ended.

        Args:
            address: what others are told to dial.

        Returns:
            The term: above that of every earlier leader.

        Raises:
            StoreUnavailable: the store could not be used at the first try; what fails while waiting is waited out.
            ConfigError: what is kept is damaged, or a setting of the store is unusable.
            InternalError: this process leads already.
        """
        ...

    async def leader(self) -> str | None:
        """The address of whoever leads now; None if nobody does. A leader that was killed may be told for a while.

        Raises:
            StoreUnavailable: the store cannot be read.
        """
        ...

    async def load(self) -> dict[str, bytes]:
        """Everything that is kept, by key.

        Raises:
            NotLeader: this process does not lead.
            StoreUnavailable: the store cannot be read.
            ConfigError: what is kept is damaged.
        """
        ...

    async def write(self, changes: Mapping[str, bytes | None]) -> None:
        """Makes all these changes or none; they are durable on return, if the store is. None deletes.

        Writes happen one after another, in the order of the calls. To repeat one is harmless.

        Raises:
            NotLeader: this process does not lead, or no longer. If it no longer did when it called, nothing was
                written.
            StoreUnavailable: the store is full, out of reach or did not answer in time. The changes may have been
                made, or may yet be, but never after those of a later write.
            ConfigError: the store takes no changes of that size; says what to set.
        """
        ...

    async def deposed(self) -> str:
        """Waits until the leadership of the last `lead` has ended, and returns why.

        Raises:
            NotLeader: there was none.
        """
        ...

    async def close(self) -> None:
        """Gives leadership up at once, so that the next leader waits for nothing. May be called again.

        A `lead` that still waits must be cancelled before. Of a closed store nothing is asked but `deposed`.
        """
        ...
