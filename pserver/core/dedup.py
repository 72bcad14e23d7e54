"""Remembers the outcome of each mutation, so that a retry changes nothing."""

from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

from pserver.errors import InvalidRequest, StalePush
from pserver.types import PushId

T = TypeVar("T")

#: Most outcomes that are remembered for one trainer. A correct one acknowledges as it goes on.
MAX_UNACKNOWLEDGED = 1 << 14


class DedupTable(Generic[T]):
    """Outcomes by push id. Memory is bounded by what trainers have not acknowledged yet. Not thread-safe."""

    def __init__(self) -> None:
        self._outcomes: dict[int, dict[int, T]] = {}
        self._lowest: dict[int, int] = {}

    def find(self, push_id: PushId) -> T | None:
        """The recorded outcome of a repeat, or None for a mutation not seen before.

        Forgets the outcomes that the sender has acknowledged.

        Raises:
            StalePush: the outcome was acknowledged already; the mutation is never applied again.
            InvalidRequest: the sequence number or the acknowledgement makes no sense, or the sender has acknowledged
                none of its last `MAX_UNACKNOWLEDGED` mutations.
        """
        if push_id.sequence < 1 or not 1 <= push_id.lowest_unacknowledged <= push_id.sequence:
            raise InvalidRequest(
                f"{push_id} is not valid: expected a sequence from 1 and an acknowledgement between 1 and the sequence"
            )
        lowest = self._lowest.get(push_id.trainer_id, 1)
        if push_id.sequence < lowest:
            raise StalePush(
                f"trainer {push_id.trainer_id} repeats mutation {push_id.sequence}, but has acknowledged everything "
                f"below {lowest}; it is not applied again"
            )
        self._acknowledge(push_id.trainer_id, push_id.lowest_unacknowledged)
        outcomes = self._outcomes.get(push_id.trainer_id, {})
        known = outcomes.get(push_id.sequence)
        if known is None and len(outcomes) >= MAX_UNACKNOWLEDGED:
            raise InvalidRequest(
                f"trainer {push_id.trainer_id} has {len(outcomes)} mutations whose outcome it has not acknowledged; "
                "raise lowest_unacknowledged before sending more"
            )
        return known

    def look(self, push_id: PushId) -> T | None:
        """The recorded outcome, or None; forgets nothing and refuses nothing."""
        return self._outcomes.get(push_id.trainer_id, {}).get(push_id.sequence)

    def record(self, push_id: PushId, outcome: T) -> None:
        """Stores the outcome of a mutation."""
        self._outcomes.setdefault(push_id.trainer_id, {})[push_id.sequence] = outcome

    def redo(self, push_id: PushId, outcome: T) -> None:
        """Stores the outcome of a mutation that another table has let pass, and what its sender had acknowledged."""
        self._acknowledge(push_id.trainer_id, push_id.lowest_unacknowledged)
        if push_id.sequence >= self._lowest.get(push_id.trainer_id, 1):
            self.record(push_id, outcome)

    def forget(self, push_id: PushId) -> None:
        """As if a mutation had never come."""
        self._outcomes.get(push_id.trainer_id, {}).pop(push_id.sequence, None)

    def trainers(self) -> Iterator[tuple[int, int, Mapping[int, T]]]:
        """Of each trainer: its id, its lowest unacknowledged number, and its outcomes by number."""
        for trainer_id in self._outcomes.keys() | self._lowest.keys():
            yield trainer_id, self._lowest.get(trainer_id, 1), self._outcomes.get(trainer_id, {})

    def restore(self, trainer_id: int, lowest_unacknowledged: int, outcomes: Mapping[int, T]) -> None:
        """Takes what `trainers` gave of a trainer."""
        self._lowest[trainer_id] = lowest_unacknowledged
        self._outcomes[trainer_id] = dict(outcomes)

    def _acknowledge(self, trainer_id: int, lowest_unacknowledged: int) -> None:
        if lowest_unacknowledged <= self._lowest.get(trainer_id, 1):
            return
        self._lowest[trainer_id] = lowest_unacknowledged
        outcomes = self._outcomes.get(trainer_id, {})
        for sequence in [each for each in outcomes if each < lowest_unacknowledged]:
            del outcomes[sequence]

    def forget_trainer(self, trainer_id: int) -> None:
        """Drops everything about a trainer whose id is refused from now on."""
        self._outcomes.pop(trainer_id, None)
        self._lowest.pop(trainer_id, None)

    def __len__(self) -> int:
        return sum(len(each) for each in self._outcomes.values())
