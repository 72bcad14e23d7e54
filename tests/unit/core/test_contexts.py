import pytest
import torch
from core_builders import commit

from pserver.core import contexts as contexts_module
from pserver.core.contexts import ContextTable, GradientContext
from pserver.errors import InvalidRequest, UnknownContext


@pytest.fixture
def table():
    return ContextTable()


def test_gradients_add_up_over_pushes():
    context = GradientContext(trainer_id=1, context_id=1)
    context.add_({0: torch.tensor([1.0, 2.0])}, frozenset())
    context.add_({0: torch.tensor([10.0, 20.0]), 1: torch.tensor([5.0])}, frozenset())
    assert {index: gradient.tolist() for index, gradient in context.buckets.items()} == {0: [11.0, 22.0], 1: [5.0]}


def test_a_tensor_is_absent_only_if_no_push_had_it():
    context = GradientContext(trainer_id=1, context_id=1)
    assert context.absent is None
    context.add_({}, frozenset({1, 2}))
    context.add_({}, frozenset({2, 3}))
    assert context.absent == {2}


def test_a_context_is_opened_once_per_trainer_and_id(table):
    first = table.open(1, 7)
    assert table.open(1, 7) is first
    assert table.open(2, 7) is not first
    assert len(table) == 2


def test_a_committed_context_takes_no_more(table):
    table.open(1, 7).commit = commit(3)
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
    table.open(1, 7).commit = commit(3)
    with pytest.raises(UnknownContext, match="committed for step 3"):
        table.drop(1, 7)
    assert len(table) == 1


def test_the_context_of_a_step_is_taken_once(table):
    table.open(1, 7).commit = commit(3)
    table.open(2, 7).commit = commit(3)
    table.open(1, 8)
    assert [context.trainer_id for context in table.committed()] == [1, 2]
    assert table.take_committed(1, 4) is None
    taken = table.take_committed(1, 3)
    assert taken is not None
    assert (taken.trainer_id, taken.context_id) == (1, 7)
    assert table.take_committed(1, 3) is None
    assert len(table) == 2


def test_an_ended_trainer_keeps_nothing_and_others_keep_theirs(table):
    table.open(1, 1)
    waiting = table.open(1, 2)
    waiting.commit = commit(1)
    table.open(2, 1)
    assert table.end_trainer(1) == [waiting]
    assert table.end_trainer(1) == []
    assert len(table) == 1
