"""Who is a trainer: ids, ranks and leases."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pserver.errors import InvalidRequest, RankTaken, TrainerEnded

MAX_RANK = 1 << 20


@dataclass(slots=True, kw_only=True)
class Member:
    """One living trainer; times are those of the caller's clock, in seconds."""

    trainer_id: int
    rank: int
    nonce: str
    lease_ends_s: float
    sent_bytes: int = 0
    received_bytes: int = 0
    reported: Mapping[str, float] = field(default_factory=dict)


class Membership:
    """Living trainers and the ids that are refused for ever. Not thread-safe.

    Args:
        lease_s: how long a trainer counts as alive without renewing, in seconds.
        first_id: first id to hand out; must be above every id of an earlier coordinator.
    """

    def __init__(self, *, lease_s: float, first_id: int) -> None:
        self.lease_s = lease_s
        self._first_id = self._next_id = first_id
        self._members: dict[int, Member] = {}
        self._by_nonce: dict[str, int] = {}

    def join(self, nonce: str, rank: int, now_s: float) -> Member:
        """Makes a member. The same nonce returns the same member; rank -1 takes the lowest free rank.

        Raises:
            RankTaken: a living trainer has the rank.
            TrainerEnded: the nonce belongs to a trainer whose lease has ended.
            InvalidRequest: no nonce, or a rank out of range.
        """
        if not nonce or not -1 <= rank < MAX_RANK:
            raise InvalidRequest(f"expected a nonce and a rank in -1..{MAX_RANK - 1}, got {nonce!r} and {rank}")
        known = self._by_nonce.get(nonce)
        if known is not None:
            member = self.require(known)
            member.lease_ends_s = now_s + self.lease_s
            return member
        taken = {member.rank: member for member in self._members.values()}
        if rank in taken:
            holder = taken[rank]
            raise RankTaken(
                f"rank {rank} belongs to trainer {holder.trainer_id}, whose lease runs for another "
                f"{max(0.0, holder.lease_ends_s - now_s):.1f} s; give each trainer a rank of its own, or wait if that "
                "one has died"
            )
        if rank < 0:
            rank = next(free for free in range(len(taken) + 1) if free not in taken)
        member = Member(trainer_id=self._next_id, rank=rank, nonce=nonce, lease_ends_s=now_s + self.lease_s)
        self._next_id += 1
        self._members[member.trainer_id] = member
        self._by_nonce[nonce] = member.trainer_id
        return member

    def require(self, trainer_id: int) -> Member:
        """The member with this id.

        Raises:
            TrainerEnded: its lease has ended.
            InvalidRequest: no trainer ever had this id.
        """
        member = self._members.get(trainer_id)
        if member is not None:
            return member
        if self._first_id <= trainer_id < self._next_id:
            raise TrainerEnded(
                f"the lease of trainer {trainer_id} has ended (it left, or did not renew within {self.lease_s:g} s); "
                "its id is refused for ever: connect again to join as a new trainer"
            )
        raise InvalidRequest(f"trainer {trainer_id} is unknown to this coordinator; connect again")

    def renew(self, trainer_id: int, now_s: float) -> Member:
        """Extends a lease; raises as `require` does."""
        member = self.require(trainer_id)
        member.lease_ends_s = now_s + self.lease_s
        return member

    def end(self, trainer_id: int) -> bool:
        """Ends a lease; returns False if it had ended before."""
        return self._members.pop(trainer_id, None) is not None

    def overdue(self, now_s: float) -> list[int]:
        """Trainers whose lease has run out."""
        return [member.trainer_id for member in self._members.values() if member.lease_ends_s <= now_s]

    @property
    def members(self) -> tuple[Member, ...]:
        """Living trainers, in order of joining."""
        return tuple(self._members.values())
