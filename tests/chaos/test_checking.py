"""The check of chaos runs catches what it is for."""

from collections.abc import Sequence

import pytest
import torch

from tests.chaos.checking import Ledger, Outcome, longest_pause_s, violations
from tests.chaos.pushes import Accumulators, Update

#: Who was in each round. Nobody was told of the last two updates.
ROUNDS: list[list[Update]] = [[(0, 0), (1, 0)], [(0, 1), (1, 1)], [(0, 2)], [(0, 3), (2, 0)], [(1, 2)]]
UNKNOWN = {(2, 0), (1, 2)}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Threads that wait for each other's cores would take most of the time."""
    torch.set_num_threads(1)


def values_of(rounds: Sequence[Sequence[Update]]) -> tuple[torch.Tensor, torch.Tensor]:
    """What torch's SGD makes of these rounds."""
    model = Accumulators()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for members in rounds:
        gradients = []
        for update in members:
            model.set_gradients(update)
            gradients.append([each.grad for each in model.parameters()])
        for parameter, *each in zip(model.parameters(), *gradients, strict=True):
            parameter.grad = torch.stack(each).sum(0) / len(members)
        optimizer.step()
    return model.slots.detach(), model.dense.detach()


def ledgers_of(rounds: Sequence[Sequence[Update]], refused: Sequence[Update] = ()) -> list[Ledger]:
    ledgers = {trainer: Ledger(trainer=trainer) for trainer in range(3)}
    for number, members in enumerate(rounds, start=1):
        for trainer, step in members:
            ledgers[trainer].begun[step] = float(number)
            if (trainer, step) not in UNKNOWN:
                ledgers[trainer].outcomes[step] = outcome(number, len(members))
    for trainer, step in refused:
        ledgers[trainer].begun[step] = 0.0
        ledgers[trainer].outcomes[step] = outcome(0, 0, accepted=False)
    return list(ledgers.values())


def outcome(number: int, num_trainers: int, *, accepted: bool = True) -> Outcome:
    return Outcome(
        round=number, accepted=accepted, num_trainers=num_trainers, began_s=float(number), ended_s=number + 0.5
    )


def found(rounds: Sequence[Sequence[Update]], ledgers: list[Ledger] | None = None) -> list[str]:
    return violations(ledgers_of(ROUNDS) if ledgers is None else ledgers, *values_of(rounds))


def test_what_was_told_is_right() -> None:
    assert found(ROUNDS) == []


def test_update_that_nobody_was_told_of_may_be_missing() -> None:
    assert found(ROUNDS[:4]) == []


def test_lost_update_is_found() -> None:
    lost = [*ROUNDS[:2], *ROUNDS[3:]]
    assert any("(0, 2)" in each and "lost" in each for each in found(lost))


def test_lost_update_of_a_larger_round_is_found() -> None:
    assert any("(0, 0)" in each for each in found([[(1, 0)], *ROUNDS[1:]]))


def test_doubled_update_is_found() -> None:
    assert any("(0, 2)" in each and "wrong number" in each for each in found([*ROUNDS, [(0, 2)]]))


def test_doubled_update_that_nobody_was_told_of_is_found() -> None:
    assert any("(1, 2)" in each and "more than once" in each for each in found([*ROUNDS, [(1, 2)]]))


def test_foreign_update_is_found() -> None:
    assert any("foreign" in each and "(2, 7)" in each for each in found([*ROUNDS, [(2, 7)]]))


def test_refused_update_that_is_in_is_found() -> None:
    assert any("refused" in each for each in found([*ROUNDS, [(2, 5)]], ledgers_of(ROUNDS, refused=[(2, 5)])))


def test_refused_update_that_is_not_in_is_right() -> None:
    assert found(ROUNDS, ledgers_of(ROUNDS, refused=[(2, 5)])) == []


def test_update_that_one_bucket_lacks_or_has_twice_is_found() -> None:
    for sign in (-1, 1):
        slots, dense = values_of(ROUNDS)
        dense[4096:8192] += sign * values_of([[(0, 2)]])[1][4096:8192]
        (violation,) = violations(ledgers_of(ROUNDS), slots, dense)
        assert "4096 elements of dense, 4096 to 8191" in violation


def test_round_that_trainers_were_told_different_sizes_of_is_found() -> None:
    ledgers = ledgers_of(ROUNDS)
    ledgers[1].outcomes[0] = outcome(1, 1)
    assert any("round 1 had [1, 2] trainers" in each for each in found(ROUNDS, ledgers))


def test_round_that_counts_a_trainer_whose_update_is_nowhere_is_found() -> None:
    ledgers = ledgers_of(ROUNDS[:3])
    ledgers[0].begun[3] = 4.0
    ledgers[0].outcomes[3] = outcome(4, 2)
    slots, dense = values_of(ROUNDS[:3])
    alone = values_of([[(0, 3)]])
    assert violations(ledgers, slots + alone[0] / 2, dense + alone[1] / 2) == [
        "rounds count 1 updates that nobody was told of, but only 0 such are in"
    ]


def test_longest_pause_leaves_out_steps_of_a_stopped_trainer() -> None:
    ledger = Ledger(trainer=0)
    ledger.outcomes = {
        0: Outcome(round=1, accepted=True, num_trainers=1, began_s=0.0, ended_s=1.0),
        1: Outcome(round=2, accepted=True, num_trainers=1, began_s=2.0, ended_s=9.0),
    }
    assert longest_pause_s([ledger], {}) == 7.0
    assert longest_pause_s([ledger], {0: [(3.0, 4.0)]}) == 1.0
