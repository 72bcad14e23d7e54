"""Sync policies: pure functions that say whether a round may be decided now."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import ClassVar, Protocol, runtime_checkable

from pserver.errors import InvalidRequest


class Verdict(Enum):
    """WAIT: somebody the policy waits for has not committed. CLOSE: decide the round with everybody who has."""

    WAIT = "wait"
    CLOSE = "close"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundView:
    """What a policy may look at: ranks that are expected, and ranks whose commit has reached every shard."""

    expected: frozenset[int]
    complete: frozenset[int]


@runtime_checkable
class SyncPolicy(Protocol):
    """Decides when a round closes. Implementations are frozen dataclasses, registered in `POLICIES`."""

    name: ClassVar[str]

    def verdict(self, view: RoundView) -> Verdict:
        """Whether the round that `view` describes may be decided."""
        ...


@dataclass(frozen=True, slots=True)
class Bsp:
    """Bulk synchronous parallel: every round takes one gradient from every trainer.

    Training equals one process on the joined batch. Valiant, "A bridging model for parallel computation", 1990.
    """

    name: ClassVar[str] = "bsp"

    def verdict(self, view: RoundView) -> Verdict:
        """CLOSE when every expected trainer has committed, and there is one."""
        return Verdict.CLOSE if view.expected and view.expected <= view.complete else Verdict.WAIT


POLICIES: dict[str, type[Bsp]] = {Bsp.name: Bsp}


def policy_arguments(policy: SyncPolicy) -> dict[str, object]:
    """The constructor arguments that make an equal policy."""
    if type(policy) not in POLICIES.values():
        raise InvalidRequest(f"expected a sync policy such as pserver.Bsp(), got {policy!r}")
    return asdict(policy)  # type: ignore[call-overload,no-any-return]


def make_policy(name: str, arguments: Mapping[str, object]) -> SyncPolicy:
    """Builds a policy from what travelled.

    Raises:
        InvalidRequest: no such policy, or arguments that it does not take.
    """
    policy = POLICIES.get(name)
    if policy is None:
        raise InvalidRequest(f"sync policy {name!r} is unknown; expected one of {sorted(POLICIES)}")
    try:
        return policy(**arguments)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"sync policy {name!r} does not take {dict(arguments)}: {error}") from error
