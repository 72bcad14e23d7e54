"""One shard as the coordinator sees it: who is its primary, who keeps copies, and who goes on when one is lost.

The arrangement of PacificA (Lin et al., 2008, https://www.microsoft.com/en-us/research/publication/pacifica): the
primary shows nothing that a replica in sync lacks, and only the coordinator says who is in sync. So whoever is in sync
may go on in the primary's place, and of several the one whose log goes furthest has all that the others have.
"""

from dataclasses import dataclass, field
from enum import Enum


class ReplicaState(Enum):
    """How far a replica is: being made, being brought up to date, and counted on."""

    MAKING = "making"
    CATCHING_UP = "catching up"
    IN_SYNC = "in sync"


@dataclass(slots=True, kw_only=True)
class Replica:
    """One copy of a shard; `lag`: entries of the log that it lacked when its primary last said so."""

    number: int
    server: str
    state: ReplicaState = ReplicaState.MAKING
    lag: int = 0


@dataclass(slots=True, kw_only=True)
class ShardGroup:
    """A shard's primary and replicas; the replicas by server. Not thread-safe.

    Attributes:
        epoch: of this primary, or of the next one while it is lost; shards refuse messages of another one.
        created: whether the primary has said that it has the shard, and is the primary.
        placed_on, placed_epoch: the last primary that was, for trainers.
        positions: while a primary is lost, how far the logs of the replicas in sync go; None: not known yet.
    """

    shard: int
    runs: tuple[range, ...]
    epoch: int
    primary: str
    created: bool = False
    placed_on: str = ""
    placed_epoch: int = 0
    replicas: dict[str, Replica] = field(default_factory=dict)
    positions: dict[str, int | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.placed_on:
            self.place()

    def place(self) -> None:
        """The primary is one: trainers may know."""
        self.placed_on, self.placed_epoch = self.primary, self.epoch

    @property
    def members(self) -> list[str]:
        """Servers that have, or had, a copy."""
        return [self.primary, *self.replicas]

    @property
    def electing(self) -> bool:
        """Whether its primary is lost, and none has taken its place yet."""
        return bool(self.positions)

    @property
    def in_sync(self) -> list[Replica]:
        """Replicas that have all that was ever shown to anybody."""
        return [each for each in self.replicas.values() if each.state is ReplicaState.IN_SYNC]

    @property
    def settling(self) -> bool:
        """Whether some replica is on its way to be in sync."""
        return any(each.state is not ReplicaState.IN_SYNC for each in self.replicas.values())

    def replica(self, number: int) -> Replica | None:
        """The replica of a number, if it still counts."""
        return next((each for each in self.replicas.values() if each.number == number), None)

    def begin_election(self, epoch: int) -> bool:
        """The primary is lost: whether some replica in sync can go on. Those that were not yet are of no more use."""
        survivors = self.in_sync
        self.replicas = {each.server: each for each in survivors}
        self.positions = dict.fromkeys(self.replicas)
        self.epoch = epoch
        self.created = False
        return bool(survivors)

    def fenced(self, server: str, position: int) -> None:
        """A replica takes nothing from the lost primary any more, and its log goes so far."""
        if server in self.positions:
            self.positions[server] = position

    def elect(self) -> Replica | None:
        """Makes the replica with the longest log the primary, once all in sync have said how long theirs is."""
        known = {server: position for server, position in self.positions.items() if position is not None}
        if not known or len(known) < len(self.positions):
            return None
        winner = max(sorted(known), key=known.__getitem__)
        elected = self.replicas.pop(winner)
        self.primary = elected.server
        self.positions = {}
        return elected

    def remove(self, server: str) -> Replica | None:
        """Counts on a replica no longer."""
        self.positions.pop(server, None)
        return self.replicas.pop(server, None)
