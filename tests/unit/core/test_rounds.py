import pytest
from core_builders import OPTIONS
from hypothesis import given
from hypothesis import strategies as st

from pserver.core.messages import Committed
from pserver.core.rounds import RoundBook
from pserver.core.sync import Bsp

SERVERS = ("s0", "s1")


def committed(trainer, step, *, samples=1, options=OPTIONS):
    return Committed(model="m", epoch=1, trainer_id=trainer, step=step, samples=samples, options=options)


def book_of(*trainers, world_size=1, servers=SERVERS):
    """Trainers 10, 11, ... with the ranks 0, 1, ..."""
    book = RoundBook(Bsp(), servers, world_size)
    for trainer in trainers:
        book.attach(trainer, trainer - 10)
    return book


def commit_everywhere(book, trainer, step, **fields):
    for server in SERVERS:
        book.committed(server, committed(trainer, step, **fields))


def members(decision):
    return [(each.trainer_id, each.step) for each in decision.contributions]


def test_a_commit_counts_only_when_every_server_has_reported_it():
    book = book_of(10)
    book.committed("s0", committed(10, 1))
    assert book.decide() is None
    book.committed("s1", committed(10, 1))
    decision = book.decide()
    assert (decision.round, members(decision), decision.divisor) == (1, [(10, 1)], 1)
    assert decision.options == OPTIONS


def test_a_repeated_report_does_not_stand_in_for_another_server():
    book = book_of(10)
    for _ in range(3):
        book.committed("s0", committed(10, 1))
    assert book.decide() is None


def test_reports_of_servers_that_own_no_shard_do_not_count():
    book = book_of(10)
    book.committed("s0", committed(10, 1))
    book.committed("s9", committed(10, 1))
    assert book.decide() is None


def test_reports_of_different_steps_do_not_add_up_to_one():
    book = book_of(10)
    book.committed("s0", committed(10, 1))
    book.committed("s1", committed(10, 2))
    assert book.decide() is None


def test_a_decided_step_is_not_counted_again_when_its_reports_are_repeated():
    book = book_of(10)
    commit_everywhere(book, 10, 1)
    assert book.decide() is not None
    commit_everywhere(book, 10, 1)
    assert book.decide() is None


def test_a_round_waits_for_every_expected_trainer_and_names_those_it_lacks():
    book = book_of(10, 11, 12)
    commit_everywhere(book, 11, 1)
    assert book.decide() is None
    assert book.waiting_for() == [0, 2]
    commit_everywhere(book, 10, 1)
    commit_everywhere(book, 12, 1)
    assert members(book.decide()) == [(10, 1), (11, 1), (12, 1)]


def test_contributions_go_in_order_of_rank_whatever_the_order_of_arrival():
    book = RoundBook(Bsp(), SERVERS, 1)
    for trainer, rank in ((10, 2), (11, 0), (12, 1)):
        book.attach(trainer, rank)
    for trainer in (10, 11, 12):
        commit_everywhere(book, trainer, 1)
    assert [(each.trainer_id, each.rank) for each in book.decide().contributions] == [(11, 0), (12, 1), (10, 2)]


def test_the_options_of_the_lowest_rank_win():
    book = book_of(10, 11)
    commit_everywhere(book, 11, 1, options=({"lr": 0.1},))
    commit_everywhere(book, 10, 1, options=({"lr": 0.9},))
    assert book.decide().options == ({"lr": 0.9},)


def test_weights_are_the_samples_without_their_common_divisor():
    book = book_of(10, 11, 12)
    for trainer, samples in ((10, 64), (11, 0), (12, 96)):
        commit_everywhere(book, trainer, 1, samples=samples)
    decision = book.decide()
    assert [each.weight for each in decision.contributions] == [2, 0, 3]
    assert decision.divisor == 5


def test_a_round_without_samples_has_the_divisor_zero_and_counts_as_a_round():
    book = book_of(10, 11)
    for trainer in (10, 11):
        commit_everywhere(book, trainer, 1, samples=0)
    decision = book.decide()
    assert (decision.divisor, [each.weight for each in decision.contributions]) == (0, [0, 0])
    assert book.round == 1


def test_the_first_round_waits_until_the_whole_world_has_attached():
    book = book_of(10, world_size=2)
    commit_everywhere(book, 10, 1)
    assert book.decide() is None
    assert book.missing_trainers == 1
    book.attach(11, 1)
    assert book.missing_trainers == 0
    assert book.decide() is None
    commit_everywhere(book, 11, 1)
    assert members(book.decide()) == [(10, 1), (11, 1)]


def test_later_rounds_do_not_wait_for_the_whole_world():
    book = book_of(10, 11, world_size=2)
    for trainer in (10, 11):
        commit_everywhere(book, trainer, 1)
    book.decide()
    book.remove(11)
    commit_everywhere(book, 10, 2)
    assert members(book.decide()) == [(10, 2)]


def test_a_trainer_that_attaches_twice_counts_once():
    book = book_of(10, 10, world_size=2)
    assert book.missing_trainers == 1


def test_a_trainer_that_was_restarted_before_the_first_round_does_not_stand_in_for_another():
    book = book_of(10, world_size=2)
    book.remove(10)
    book.attach(20, 0)
    assert book.missing_trainers == 1
    commit_everywhere(book, 20, 1)
    assert book.decide() is None


def test_a_trainer_removed_before_the_decision_is_in_no_round_and_holds_up_nobody():
    book = book_of(10, 11)
    for trainer in (10, 11):
        commit_everywhere(book, trainer, 1)
    book.remove(11)
    assert members(book.decide()) == [(10, 1)]


def test_a_trainer_removed_after_the_decision_stays_in_it():
    book = book_of(10)
    commit_everywhere(book, 10, 1)
    decision = book.decide()
    book.remove(10)
    assert book.outstanding("s0") == [decision]
    assert members(decision) == [(10, 1)]


def test_a_trainer_that_is_gone_or_never_attached_opens_no_round():
    book = book_of(10)
    book.remove(10)
    commit_everywhere(book, 10, 1)
    commit_everywhere(book, 99, 1)
    assert book.decide() is None
    assert (book.step_of(10), book.lag_of(10), book.waiting_for()) == (0, 0, [])


def test_a_joiner_is_expected_from_the_next_round_on():
    book = book_of(10)
    commit_everywhere(book, 10, 1)
    book.decide()
    assert book.attach(11, 1) == 1
    commit_everywhere(book, 10, 2)
    assert book.decide() is None
    assert book.waiting_for() == [1]
    commit_everywhere(book, 11, 1)
    assert members(book.decide()) == [(10, 2), (11, 1)]


def test_a_joiner_holds_up_a_round_that_is_not_decided_yet():
    book = book_of(10, 11)
    commit_everywhere(book, 10, 1)
    book.attach(12, 2)
    commit_everywhere(book, 11, 1)
    assert book.decide() is None
    commit_everywhere(book, 12, 1)
    assert len(book.decide().contributions) == 3


def test_steps_that_were_committed_ahead_are_counted_once_each_and_in_order():
    book = book_of(10, 11)
    for step in (1, 2):
        commit_everywhere(book, 10, step)
    commit_everywhere(book, 11, 1)
    assert members(book.decide()) == [(10, 1), (11, 1)]
    assert book.decide() is None
    commit_everywhere(book, 11, 2)
    assert members(book.decide()) == [(10, 2), (11, 2)]
    assert book.decide() is None


def test_a_round_takes_no_more_than_one_step_of_a_trainer():
    book = book_of(10)
    for step in (2, 1, 3):
        commit_everywhere(book, 10, step)
    assert [members(book.decide()) for _ in range(3)] == [[(10, 1)], [(10, 2)], [(10, 3)]]
    assert book.decide() is None


def test_decisions_are_kept_until_every_server_has_applied_them():
    book = book_of(10)
    decisions = []
    for step in (1, 2, 3):
        commit_everywhere(book, 10, step)
        decisions.append(book.decide())
    assert book.outstanding("s0") == book.outstanding("s1") == decisions
    book.applied("s0", 3)
    assert book.outstanding("s0") == []
    assert book.outstanding("s1") == decisions
    book.applied("s1", 2)
    assert book.outstanding("s1") == decisions[2:]
    book.applied("s1", 1)
    assert book.outstanding("s1") == decisions[2:]


def test_servers_without_a_shard_apply_nothing():
    book = book_of(10)
    commit_everywhere(book, 10, 1)
    decision = book.decide()
    book.applied("s9", 1)
    assert book.outstanding("s0") == [decision]


def test_lag_counts_the_rounds_since_the_last_contribution():
    book = book_of(10)
    for step in (1, 2):
        commit_everywhere(book, 10, step)
        book.decide()
    book.attach(11, 1)
    assert (book.lag_of(10), book.lag_of(11)) == (0, 0)
    book.committed("s0", committed(11, 5))
    assert book.step_of(11) == 5


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("commit"), st.sampled_from((10, 11, 12)), st.integers(1, 4), st.sampled_from(SERVERS)),
            st.tuples(st.just("remove"), st.sampled_from((11, 12))),
            st.tuples(st.just("attach"), st.sampled_from((10, 11, 12))),
        ),
        max_size=60,
    )
)
def test_no_step_is_ever_counted_twice_and_rounds_have_no_gaps(actions):
    book = book_of(10, 11)
    reported: dict[tuple[int, int], set[str]] = {}
    counted: list[tuple[int, int]] = []
    ended: set[int] = set()
    for action, trainer, *rest in actions:
        if action == "attach" and trainer not in ended:
            book.attach(trainer, trainer - 10)
        elif action == "remove":
            book.remove(trainer)
            ended.add(trainer)
        elif action == "commit":
            step, server = rest
            book.committed(server, committed(trainer, step))
            reported.setdefault((trainer, step), set()).add(server)
        while (decision := book.decide()) is not None:
            counted += members(decision)
            assert decision.round == book.round
            assert not ended & {each.trainer_id for each in decision.contributions}
            assert all(reported[each] == set(SERVERS) for each in members(decision))
    assert len(set(counted)) == len(counted)
    for trainer in (10, 11, 12):
        steps = [step for each, step in counted if each == trainer]
        assert steps == sorted(steps)


@pytest.mark.parametrize("world_size", [1, 3])
def test_nobody_is_waited_for_when_nobody_is_there(world_size):
    book = book_of(world_size=world_size)
    assert book.decide() is None
    assert (book.waiting_for(), book.missing_trainers) == ([], world_size)
