import pytest
from core_builders import push_id
from hypothesis import given
from hypothesis import strategies as st

from pserver.core.dedup import DedupTable
from pserver.errors import InvalidRequest, StalePush


@pytest.fixture
def table():
    return DedupTable()


def test_a_repeat_returns_the_recorded_outcome(table):
    assert table.find(push_id(1)) is None
    table.record(push_id(1), "first")
    assert table.find(push_id(1)) == "first"
    assert table.find(push_id(2)) is None


def test_a_recorded_outcome_may_be_replaced(table):
    table.record(push_id(1), "pending")
    table.record(push_id(1), "done")
    assert table.find(push_id(1)) == "done"
    assert len(table) == 1


def test_trainers_do_not_share_outcomes(table):
    table.record(push_id(1, trainer=1), "one")
    assert table.find(push_id(1, trainer=2)) is None


def test_an_acknowledgement_frees_the_outcomes_below_it(table):
    for sequence in (1, 2, 3):
        table.record(push_id(sequence), sequence)
    table.find(push_id(4, acknowledged=3))
    assert len(table) == 1
    assert table.find(push_id(3, acknowledged=3)) == 3


def test_a_repeat_of_an_acknowledged_mutation_is_refused_and_names_both_numbers(table):
    table.record(push_id(1), "done")
    table.find(push_id(3, acknowledged=3))
    with pytest.raises(StalePush, match="repeats mutation 1, but has acknowledged everything below 3"):
        table.find(push_id(1))


def test_a_mutation_below_the_acknowledgement_is_refused_even_if_it_never_arrived(table):
    table.find(push_id(5, acknowledged=5))
    with pytest.raises(StalePush):
        table.find(push_id(4, acknowledged=4))


def test_an_older_acknowledgement_takes_nothing_back(table):
    table.find(push_id(5, acknowledged=5))
    table.record(push_id(5, acknowledged=5), "done")
    assert table.find(push_id(6, acknowledged=2)) is None
    with pytest.raises(StalePush):
        table.find(push_id(3, acknowledged=2))
    assert table.find(push_id(5, acknowledged=5)) == "done"


def test_a_forgotten_trainer_leaves_nothing_behind(table):
    table.record(push_id(1, trainer=1), "one")
    table.record(push_id(1, trainer=2), "two")
    table.find(push_id(2, trainer=1, acknowledged=2))
    table.forget_trainer(1)
    table.forget_trainer(1)
    assert len(table) == 1
    assert table.find(push_id(1, trainer=1)) is None


@pytest.mark.parametrize(("sequence", "acknowledged"), [(0, 0), (0, 1), (-1, 1), (3, 0), (3, 4), (3, -1)])
def test_ids_that_no_trainer_hands_out_are_refused(table, sequence, acknowledged):
    with pytest.raises(InvalidRequest, match="not valid"):
        table.find(push_id(sequence, acknowledged=acknowledged))


@given(st.lists(st.tuples(st.integers(1, 3), st.booleans()), max_size=40))
def test_memory_is_bounded_by_what_is_not_acknowledged(steps):
    """Each trainer sends mutations in order, and learns the outcome of some before it sends the next."""
    table: DedupTable[int] = DedupTable()
    sequences = dict.fromkeys((1, 2, 3), 0)
    unknown: dict[int, set[int]] = {trainer: set() for trainer in sequences}
    sent: dict[int, set[int]] = {trainer: set() for trainer in sequences}
    for trainer, learns in steps:
        sequences[trainer] += 1
        unknown[trainer].add(sequences[trainer])
        new = push_id(sequences[trainer], trainer=trainer, acknowledged=min(unknown[trainer]))
        assert table.find(new) is None
        table.record(new, new.sequence)
        sent[trainer] = {each for each in sent[trainer] | {new.sequence} if each >= new.lowest_unacknowledged}
        if learns:
            unknown[trainer].clear()
        assert len(table) == sum(map(len, sent.values()))
