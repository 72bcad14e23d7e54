"""Sync policies: pure functions that say which gradients enter the next round, and which are refused."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import ClassVar, Protocol, runtime_checkable

from pserver.errors import InvalidRequest, RoundFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A gradient that every shard has.

    `base_round` is the round of the parameters it was computed on, `arrival` its place in the order of arrival.
    """

    base_round: int
    arrival: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberView:
    """One expected trainer.

    Attributes:
        rank: its rank.
        clock: its decided steps, counted on from the slowest member's clock when it attached.
        in_step: whether it has been told the outcome of the last round, so that it may be at work for the next one.
        offer: the gradient that waits for a verdict, if there is one.
    """

    rank: int
    clock: int
    in_step: bool
    offer: Offer | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundView:
    """What a policy may look at: the last decided round, the trainers, and how long the oldest offer has waited."""

    round: int
    members: tuple[MemberView, ...]
    waited_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Ranks whose gradients make the next round, and ranks that are refused, with the reason. Nothing of both: wait.

    `error` names the error that those who are refused raise; "" for none.
    """

    take: frozenset[int] = frozenset()
    reject: Mapping[int, str] = field(default_factory=dict)
    error: str = ""


WAIT = Verdict()


@runtime_checkable
class SyncPolicy(Protocol):
    """Decides rounds. Implementations are frozen dataclasses, registered in `POLICIES`.

    Attributes:
        name: on the wire.
        mixed_rounds: whether a trainer may read some buckets of one round and some of another.
        gathers: whether the first round waits until `world_size` trainers have attached.
    """

    name: ClassVar[str]
    mixed_rounds: ClassVar[bool]
    gathers: ClassVar[bool]

    @property
    def waits_for_everybody(self) -> bool:
        """Whether no round is ever decided without a trainer that lives."""
        ...

    def verdict(self, view: RoundView) -> Verdict:
        """Who is in the next round, if it may be decided now."""
        ...

    def waiting_for(self, view: RoundView) -> frozenset[int]:
        """Ranks that hold the next round up."""
        ...


@dataclass(frozen=True, slots=True)
class Bsp:
    """Bulk synchronous parallel: every round takes one gradient from every trainer, all computed on the last round.

    Training equals one process on the joined batch. Valiant, "A bridging model for parallel computation", 1990. With
    backup workers a round closes without the slowest; Chen et al., "Revisiting Distributed Synchronous SGD", 2016.
    A gradient that comes after its round has closed is refused, and its trainer told so; until it has been, no round
    waits for that trainer.

    Args:
        backup_workers: a round closes when all trainers but this many have committed.
        deadline: seconds from a round's first gradient until it is decided without those who are absent; None: it is
            not, and waits end with each trainer's own timeout.
        absent: "exclude" decides the round with those who have committed; "fail" makes their `step` raise
            `RoundFailed`, which names the absent; nothing is stepped, and they may step again.
    """

    backup_workers: int = 0
    deadline: float | None = None
    absent: str = "exclude"

    name: ClassVar[str] = "bsp"
    mixed_rounds: ClassVar[bool] = False
    gathers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _require_count("Bsp", "backup_workers", self.backup_workers)
        if self.deadline is not None and not (isinstance(self.deadline, int | float) and 0 < self.deadline < 1e9):
            raise InvalidRequest(f"Bsp: deadline must be a positive number of seconds, or None: {self.deadline!r}")
        if self.absent not in ("exclude", "fail"):
            raise InvalidRequest(f'Bsp: absent must be "exclude" or "fail", but is {self.absent!r}')

    @property
    def waits_for_everybody(self) -> bool:
        return self.backup_workers == 0 and self.deadline is None

    def verdict(self, view: RoundView) -> Verdict:
        """Refuses what is late; closes when enough have committed, or at the deadline."""
        late = {
            each.rank: f"it was computed on the parameters of round {each.offer.base_round}, but round {view.round} "
            "has been decided without it"
            for each in view.members
            if each.offer is not None and each.offer.base_round != view.round
        }
        if late:
            return Verdict(reject=late)
        complete = frozenset(each.rank for each in view.members if each.offer is not None)
        absent = self.waiting_for(view)
        if not complete:
            return WAIT
        if len(complete) >= self._num_needed(view) or not absent:
            return Verdict(take=complete)
        if self.deadline is None or view.waited_s < self.deadline:
            return WAIT
        if self.absent == "exclude":
            return Verdict(take=complete)
        reason = (
            f"round {view.round + 1} failed: the ranks {sorted(absent)} had not committed {self.deadline:g} s after "
            "the first trainer; nothing was stepped"
        )
        return Verdict(reject=dict.fromkeys(complete, reason), error=RoundFailed.__name__)

    def waiting_for(self, view: RoundView) -> frozenset[int]:
        """Those who are in step and have not committed."""
        return frozenset(each.rank for each in view.members if each.in_step and each.offer is None)

    def _num_needed(self, view: RoundView) -> int:
        in_step = sum(each.in_step for each in view.members)
        return max(1, min(in_step, len(view.members) - self.backup_workers))


@dataclass(frozen=True, slots=True)
class Ssp:
    """Stale synchronous parallel: every gradient is a round of its own; nobody gets too far ahead of the slowest.

    Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", 2013. A step waits
    while its trainer has more than `max_lag` steps more behind it than the slowest one.

    Args:
        max_lag: 0 or more.
    """

    max_lag: int

    name: ClassVar[str] = "ssp"
    mixed_rounds: ClassVar[bool] = True
    gathers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _require_count("Ssp", "max_lag", self.max_lag)

    @property
    def waits_for_everybody(self) -> bool:
        return False

    def verdict(self, view: RoundView) -> Verdict:
        """Takes the offer that came first of those who are not too far ahead."""
        slowest = min((each.clock for each in view.members), default=0)
        return _first_come(each for each in view.members if each.clock - slowest <= self.max_lag)

    def waiting_for(self, view: RoundView) -> frozenset[int]:
        """The slowest, if somebody waits for them."""
        slowest = min((each.clock for each in view.members), default=0)
        if all(each.offer is None for each in view.members):
            return frozenset()
        return frozenset(each.rank for each in view.members if each.clock == slowest and each.offer is None)


@dataclass(frozen=True, slots=True)
class Async:
    """Asynchronous: every gradient is a round of its own, applied as it comes.

    Recht et al., "Hogwild!", 2011; Dean et al., "Large Scale Distributed Deep Networks", 2012. With W trainers a
    gradient is typically W - 1 rounds old.

    Args:
        max_staleness: a gradient more than this many rounds old is refused, and its trainer told so; None: none is.
    """

    max_staleness: int | None = None

    name: ClassVar[str] = "async"
    mixed_rounds: ClassVar[bool] = True
    gathers: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.max_staleness is not None:
            _require_count("Async", "max_staleness", self.max_staleness)

    @property
    def waits_for_everybody(self) -> bool:
        return False

    def verdict(self, view: RoundView) -> Verdict:
        """Refuses what is too old, then takes the offer that came first."""
        if self.max_staleness is not None:
            stale = {
                each.rank: f"it is {view.round - each.offer.base_round} rounds old; the limit is {self.max_staleness}"
                for each in view.members
                if each.offer is not None and view.round - each.offer.base_round > self.max_staleness
            }
            if stale:
                return Verdict(reject=stale)
        return _first_come(view.members)

    def waiting_for(self, view: RoundView) -> frozenset[int]:
        """Nobody."""
        return frozenset()


def _first_come(members: Iterable[MemberView]) -> Verdict:
    offers = [(each.offer.arrival, each.rank) for each in members if each.offer is not None]
    return Verdict(take=frozenset({min(offers)[1]})) if offers else WAIT


def _require_count(policy: str, name: str, value: object) -> None:
    if type(value) is not int or not 0 <= value < 1 << 31:
        raise InvalidRequest(f"{policy}: {name} must be an integer, 0 or more, but is {value!r}")


POLICIES: dict[str, type[Bsp] | type[Ssp] | type[Async]] = {each.name: each for each in (Bsp, Ssp, Async)}


def policy_arguments(policy: SyncPolicy) -> dict[str, object]:
    """The constructor arguments that make an equal policy."""
    if type(policy) not in POLICIES.values():
        raise InvalidRequest(f"expected a sync policy such as pserver.Bsp(), got {policy!r}")
    return asdict(policy)  # type: ignore[call-overload,no-any-return]


def describe_policy(policy: SyncPolicy) -> str:
    """As a user would write it: "Bsp(backup_workers=1)"."""
    given = [
        f"{each.name}={value!r}"
        for each in fields(policy)  # type: ignore[arg-type]
        if (value := getattr(policy, each.name)) != each.default
    ]
    return f"{type(policy).__name__}({', '.join(given)})"


def make_policy(name: str, arguments: Mapping[str, object]) -> SyncPolicy:
    """Builds a policy from what travelled.

    Raises:
        InvalidRequest: no such policy, or arguments that it does not take.
    """
    policy = POLICIES.get(name)
    if policy is None:
        raise InvalidRequest(f"sync policy {name!r} is unknown; expected one of {sorted(POLICIES)}")
    try:
        return policy(**arguments)  # type: ignore[arg-type]
    except TypeError as error:
        raise InvalidRequest(f"sync policy {name!r} does not take {dict(arguments)}: {error}") from error
