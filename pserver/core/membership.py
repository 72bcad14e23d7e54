"""Who is a trainer: ids, ranks and leases."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pserver.errors import InvalidRequest, RankTaken, TrainerEnded

MAX_RANK = 1 << 20
#: Most trainers that live at once.
MAX_TRAINERS = 1 << 16
MAX_NONCE_LENGTH = 128
#: Nonces of trainers that have ended are remembered, so that a late repeat of a join makes no new trainer: this many.
MAX_ENDED_NONCES = 1 << 14
#: Figures that a trainer may report, and the length of their names in characters.
MAX_FIGURES = 64
MAX_FIGURE_NAME_LENGTH = 64


def check_figures(reported: Mapping[str, float], sent_bytes: int = 0, received_bytes: int = 0) -> None:
    """Refuses what is too much to keep for every trainer. Values may be anything: a loss that is NaN is worth showing.

    Raises:
        InvalidRequest: more than `MAX_FIGURES` figures, a name that is empty or too long, or a negative count of bytes.
    """
    if len(reported) > MAX_FIGURES:
        raise InvalidRequest(f"a trainer may report {MAX_FIGURES} figures, but {len(reported)} came; report fewer")
    for name in reported:
        if not 1 <= len(name) <= MAX_FIGURE_NAME_LENGTH:
            raise InvalidRequest(
                f"the name of a reported figure must have 1 to {MAX_FIGURE_NAME_LENGTH} characters, but one has "
                f"{len(name)}: {name[:40]!r}"
            )
    if sent_bytes < 0 or received_bytes < 0:
        raise InvalidRequest(
            f"counts of bytes must not be negative, got {sent_bytes} sent and {received_bytes} received"
        )


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
            InvalidRequest: no nonce or a long one, a rank out of range, or too many trainers.
        """
        if not 1 <= len(nonce) <= MAX_NONCE_LENGTH or not -1 <= rank < MAX_RANK:
            raise InvalidRequest(
                f"expected a nonce of 1 to {MAX_NONCE_LENGTH} characters and a rank in -1..{MAX_RANK - 1}, got one of "
                f"{len(nonce)}, {nonce[:40]!r}, and {rank}"
            )
        known = self._by_nonce.get(nonce)
        if known is not None:
            member = self.require(known)
            member.lease_ends_s = now_s + self.lease_s
            return member
        if len(self._members) >= MAX_TRAINERS:
            raise InvalidRequest(f"{len(self._members)} trainers have joined; wait until some have left")
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
        if len(self._by_nonce) > 2 * MAX_ENDED_NONCES + len(self._members):
            self._forget_oldest_nonces()
        return member

    @property
    def ids(self) -> tuple[int, int]:
        """The first id that was handed out, and the next one."""
        return self._first_id, self._next_id

    def find(self, trainer_id: int) -> Member | None:
        """The member with this id, if it lives."""
        return self._members.get(trainer_id)

    def restore(self, first_id: int, next_id: int, members: Iterable[Member]) -> None:
        """Takes the place of another one, with its ids and members."""
        self._first_id, self._next_id = first_id, next_id
        self._members = {each.trainer_id: each for each in members}
        self._by_nonce = {each.nonce: each.trainer_id for each in self._members.values()}

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

    def _forget_oldest_nonces(self) -> None:
        ended = [nonce for nonce, trainer_id in self._by_nonce.items() if trainer_id not in self._members]
        for nonce in ended[:-MAX_ENDED_NONCES]:
            del self._by_nonce[nonce]
