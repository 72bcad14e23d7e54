import pytest
import torch
from core_builders import commit, push_id

from pserver.core import contexts as contexts_module
from pserver.core.contexts import ContextTable, GradientContext
from pserver.errors import InvalidRequest, UnknownContext

FLOATS = dict.fromkeys(range(4), torch.float32)


@pytest.fixture
def table():
    return ContextTable()


def committed(table, trainer_id, context_id, step=1):
    context = table.open(trainer_id, context_id)
    table.commit(context, commit(step), push_id(step, trainer=trainer_id))
    return context


def test_gradients_add_up_over_pushes():
    context = GradientContext(trainer_id=1, context_id=1)
    context.add_({0: torch.tensor([1.0, 2.0])}, frozenset(), frozenset(), FLOATS)
    context.add_({0: torch.tensor([10.0, 20.0]), 1: torch.tensor([5.0])}, frozenset(), frozenset(), FLOATS)
    assert {index: gradient.tolist() for index, gradient in context.buckets.items()} == {0: [11.0, 22.0], 1: [5.0]}


def test_sums_are_of_the_buckets_dtype_whatever_they_travel_as():
    context = GradientContext(trainer_id=1, context_id=1)
    for value in (256.0, 1.0, 1.0):
        context.add_({0: torch.tensor([value], dtype=torch.bfloat16)}, frozenset(), frozenset(), FLOATS)
    assert context.buckets[0].dtype == torch.float32
    assert context.buckets[0].item() == 258.0  # in bfloat16, 256 + 1 is 256


def test_what_is_replaced_is_not_added_to():
    """Buffers: those of the last push count."""
    context = GradientContext(trainer_id=1, context_id=1)
    for value in (1.0, 10.0):
        context.add_({0: torch.tensor([value]), 1: torch.tensor([value])}, frozenset(), frozenset({1}), FLOATS)
    assert {index: values.item() for index, values in context.buckets.items()} == {0: 11.0, 1: 10.0}


def test_a_tensor_is_absent_only_if_no_push_had_it():
    context = GradientContext(trainer_id=1, context_id=1)
    assert context.absent is None
    context.add_({}, frozenset({1, 2}), frozenset(), FLOATS)
    context.add_({}, frozenset({2, 3}), frozenset(), FLOATS)
    assert context.absent == {2}


def test_a_context_is_opened_once_per_trainer_and_id(table):
    first = table.open(1, 7)
    assert table.open(1, 7) is first
    assert table.open(2, 7) is not first
    assert len(table) == 2


def test_a_committed_context_takes_no_more(table):
    committed(table, 1, 7, step=3)
    with pytest.raises(InvalidRequest, match="context 7 of trainer 1 is committed for step 3"):
        table.open(1, 7)


def test_the_number_of_open_contexts_is_bounded_for_each_trainer(table, monkeypatch):
    monkeypatch.setattr(contexts_module, "MAX_CONTEXTS_PER_TRAINER", 2)
    table.open(1, 1)
    table.open(1, 2)
    with pytest.raises(InvalidRequest, match="2 contexts open"):
        table.open(1, 3)
    table.open(1, 2)
    table.open(2, 3)
    table.drop(1, 1)
    table.open(1, 3)


def test_dropping_a_context_twice_is_no_error(table):
    table.open(1, 7)
    table.drop(1, 7)
    table.drop(1, 7)
    assert len(table) == 0


def test_a_context_that_belongs_to_a_round_cannot_be_dropped(table):
    committed(table, 1, 7, step=3)
    with pytest.raises(UnknownContext, match="committed for step 3"):
        table.drop(1, 7)
    assert len(table) == 1


def test_the_context_of_a_step_is_taken_once(table):
    committed(table, 1, 7, step=3)
    committed(table, 2, 7, step=3)
    table.open(1, 8)
    assert [context.trainer_id for context in table.committed()] == [1, 2]
    assert table.take_committed(1, 2) is None
    taken = table.take_committed(1, 3)
    assert taken is not None
    assert (taken.trainer_id, taken.context_id) == (1, 7)
    assert table.take_committed(1, 3) is None
    assert len(table) == 2


def test_an_ended_trainer_keeps_nothing_and_others_keep_theirs(table):
    table.open(1, 1)
    committed(table, 1, 2)
    table.open(2, 1)
    for _ in range(2):
        table.end_trainer(1)
        assert len(table) == 1
    assert list(table.committed()) == []
    assert table.take_committed(1, 1) is None
    assert not table.holds(1, 1)
    assert table.holds(2, 1)


def test_contexts_are_reported_in_the_order_in_which_they_were_committed(table):
    table.open(1, 1)
    contexts = [committed(table, 2, 1), committed(table, 1, 1, step=4), committed(table, 1, 2, step=5)]
    assert list(table.committed()) == contexts


def test_a_context_is_found_by_the_mutation_that_committed_it_until_a_round_takes_it(table):
    context = committed(table, 1, 7, step=3)
    assert table.committed_by(push_id(3)) is context
    assert table.committed_by(push_id(3, trainer=2)) is None
    table.take_committed(1, 3)
    assert table.committed_by(push_id(3)) is None


def test_what_a_round_has_taken_makes_room_for_another_context(table, monkeypatch):
    monkeypatch.setattr(contexts_module, "MAX_CONTEXTS_PER_TRAINER", 1)
    committed(table, 1, 1)
    with pytest.raises(InvalidRequest, match="1 contexts open"):
        table.open(1, 2)
    table.take_committed(1, 1)
    table.open(1, 2)


def test_taking_a_step_frees_earlier_ones_that_were_never_whole(table):
    """Another shard has refused them; they enter no round."""
    for step in (1, 2, 3):
        committed(table, 1, step, step=step)
    committed(table, 2, 1, step=1)
    assert table.take_committed(1, 2).context_id == 2
    assert [(each.trainer_id, each.context_id) for each in table.committed()] == [(1, 3), (2, 1)]
