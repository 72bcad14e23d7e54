import math
from dataclasses import replace

import pytest
from core_builders import OPTIONS, commit
from hypothesis import given
from hypothesis import strategies as st

from pserver.core.messages import Committed, Decision, Plan, Prepared, Refusal
from pserver.core.rounds import BUFFER_POLICIES, RoundBook
from pserver.core.rules import GradientRules, NonFinite
from pserver.core.sync import Async, Bsp, Ssp

SHARDS = (0, 1)
CLIPPED = GradientRules(max_norm=1.0)


def committed(shard, trainer, step, **about):
    return Committed(model="m", shard=shard, epoch=1, trainer_id=trainer, commit=commit(step, **about))


def book_of(*trainers, policy=None, world_size=1, num_shards=2, buffers="lowest", always_prepares=False):
    """Trainers 10, 11, ... with the ranks 0, 1, ..."""
    book = RoundBook(
        policy or Bsp(),
        names=["w", "b"],
        num_shards=num_shards,
        world_size=world_size,
        buffers=buffers,
        always_prepares=always_prepares,
    )
    for trainer in trainers:
        book.attach(trainer, trainer - 10, 0.0)
    return book


def commit_everywhere(book, trainer, step, *, now_s=0.0, shards=SHARDS, **about):
    """By default on the parameters of the last round."""
    about = {"base_round": book.round, **about}
    for shard in shards:
        book.committed(committed(shard, trainer, step, **about), now_s)


def prepared(shard, round_number, *squares, attempt=1, nonfinite=()):
    return Prepared(
        model="m",
        shard=shard,
        epoch=1,
        round=round_number,
        attempt=attempt,
        squares=squares,
        nonfinite=tuple(nonfinite),
    )


def decide(book, now_s=0.0):
    """The decision of the next round; None if there is none yet."""
    news = book.advance(now_s)
    if not news:
        return None
    (decision,) = news
    assert isinstance(decision, Decision)
    return decision


def decide_all(book, now_s=0.0):
    news = book.advance(now_s)
    assert all(isinstance(each, Decision) for each in news)
    return news


def members(decision):
    return [(each.trainer_id, each.step) for each in decision.contributions]


# What counts


def test_a_commit_counts_only_when_every_shard_has_reported_it():
    book = book_of(10)
    book.committed(committed(0, 10, 1), 0.0)
    assert decide(book) is None
    book.committed(committed(1, 10, 1), 0.0)
    decision = decide(book)
    assert (decision.round, members(decision), decision.divisor) == (1, [(10, 1)], 1)
    assert decision.options == OPTIONS


def test_a_repeated_report_does_not_stand_in_for_another_shard():
    book = book_of(10)
    for _ in range(3):
        book.committed(committed(0, 10, 1), 0.0)
    assert decide(book) is None


def test_reports_of_shards_that_there_are_not_do_not_count():
    book = book_of(10)
    book.committed(committed(0, 10, 1), 0.0)
    book.committed(committed(9, 10, 1), 0.0)
    assert decide(book) is None


def test_reports_of_different_steps_do_not_add_up_to_one():
    book = book_of(10)
    book.committed(committed(0, 10, 1), 0.0)
    book.committed(committed(1, 10, 2), 0.0)
    assert decide(book) is None


def test_a_decided_step_is_not_counted_again_when_its_reports_are_repeated():
    book = book_of(10)
    commit_everywhere(book, 10, 1)
    assert decide(book) is not None
    commit_everywhere(book, 10, 1)
    assert decide(book) is None


def test_a_round_waits_for_every_expected_trainer_and_names_those_it_lacks():
    book = book_of(10, 11, 12)
    commit_everywhere(book, 11, 1)
    assert decide(book) is None
    assert book.waiting_for(0.0) == [0, 2]
    commit_everywhere(book, 10, 1)
    commit_everywhere(book, 12, 1)
    assert members(decide(book)) == [(10, 1), (11, 1), (12, 1)]


def test_contributions_go_in_order_of_rank_whatever_the_order_of_arrival():
    book = book_of()
    for trainer, rank in ((10, 2), (11, 0), (12, 1)):
        book.attach(trainer, rank, 0.0)
    for trainer in (10, 11, 12):
        commit_everywhere(book, trainer, 1)
    assert [(each.trainer_id, each.rank) for each in decide(book).contributions] == [(11, 0), (12, 1), (10, 2)]


def test_weights_are_the_samples_without_their_common_divisor():
    book = book_of(10, 11, 12)
    for trainer, samples in ((10, 64), (11, 0), (12, 96)):
        commit_everywhere(book, trainer, 1, samples=samples)
    decision = decide(book)
    assert [each.weight for each in decision.contributions] == [2, 0, 3]
    assert decision.divisor == 5


def test_a_round_without_samples_has_the_divisor_zero_and_counts_as_a_round():
    book = book_of(10, 11)
    for trainer in (10, 11):
        commit_everywhere(book, trainer, 1, samples=0)
    decision = decide(book)
    assert (decision.divisor, [each.weight for each in decision.contributions]) == (0, [0, 0])
    assert decision.skip == "no trainer in the round contributed samples"
    assert (decision.overflow, decision.error) == (False, "")
    assert book.round == 1


# Options and rules of the lowest rank


def test_the_options_of_the_lowest_rank_win():
    book = book_of(10, 11)
    commit_everywhere(book, 11, 1, options=({"lr": 0.1},))
    commit_everywhere(book, 10, 1, options=({"lr": 0.9},))
    assert decide(book).options == ({"lr": 0.9},)


def test_the_lowest_rank_s_last_options_count_in_rounds_that_it_is_not_in():
    """So that one schedule counts for all, also where each gradient is a round of its own."""
    book = book_of(10, 11, policy=Async())
    commit_everywhere(book, 11, 1, options=({"lr": 0.1},))
    assert decide(book).options == ({"lr": 0.1},)
    commit_everywhere(book, 10, 1, options=({"lr": 0.9},), rules=GradientRules(clip_value=3.0))
    decide(book)
    commit_everywhere(book, 11, 2, options=({"lr": 0.1},))
    decision = decide(book)
    assert (members(decision), decision.options, decision.clip_value) == ([(11, 2)], ({"lr": 0.9},), 3.0)


def test_a_commit_that_not_every_shard_has_sets_no_options():
    book = book_of(10, 11, policy=Async())
    book.committed(committed(0, 10, 1, options=({"lr": 0.9},)), 0.0)
    commit_everywhere(book, 11, 1, options=({"lr": 0.1},))
    assert decide(book).options == ({"lr": 0.1},)


def test_a_trainer_that_joins_late_does_not_begin_the_schedule_of_the_others_again():
    """Those who have been there longest lead, also if their rank is higher."""
    book = book_of(11)
    commit_everywhere(book, 11, 1, options=({"lr": 0.1},))
    decide(book)
    book.attach(10, 0, 0.0)
    commit_everywhere(book, 10, 1, options=({"lr": 0.9},))
    commit_everywhere(book, 11, 2, options=({"lr": 0.2},))
    decision = decide(book)
    assert (members(decision), decision.options) == ([(10, 1), (11, 2)], ({"lr": 0.2},))
    book.remove(11)
    commit_everywhere(book, 10, 2, options=({"lr": 0.9},))
    assert decide(book).options == ({"lr": 0.9},)


def test_when_the_lowest_rank_has_left_the_next_one_s_options_count():
    book = book_of(10, 11, policy=Async())
    commit_everywhere(book, 10, 1, options=({"lr": 0.9},))
    decide(book)
    book.remove(10)
    commit_everywhere(book, 11, 1, options=({"lr": 0.1},))
    assert decide(book).options == ({"lr": 0.1},)


# Who is expected


def test_the_first_round_waits_until_the_whole_world_has_attached():
    book = book_of(10, world_size=2)
    commit_everywhere(book, 10, 1)
    assert decide(book) is None
    assert book.missing_trainers == 1
    book.attach(11, 1, 0.0)
    assert book.missing_trainers == 0
    assert decide(book) is None
    commit_everywhere(book, 11, 1)
    assert members(decide(book)) == [(10, 1), (11, 1)]


def test_a_policy_without_barriers_does_not_wait_for_the_whole_world():
    book = book_of(10, policy=Async(), world_size=2)
    commit_everywhere(book, 10, 1)
    assert members(decide(book)) == [(10, 1)]
    assert book_of(10, policy=Ssp(max_lag=1), world_size=2).missing_trainers == 1


def test_later_rounds_do_not_wait_for_the_whole_world():
    book = book_of(10, 11, world_size=2)
    for trainer in (10, 11):
        commit_everywhere(book, trainer, 1)
    decide(book)
    book.remove(11)
    commit_everywhere(book, 10, 2)
    assert members(decide(book)) == [(10, 2)]


def test_a_trainer_that_attaches_twice_counts_once():
    book = book_of(10, 10, world_size=2)
    assert book.missing_trainers == 1


def test_a_trainer_that_was_restarted_before_the_first_round_does_not_stand_in_for_another():
    book = book_of(10, world_size=2)
    book.remove(10)
    book.attach(20, 0, 0.0)
    assert book.missing_trainers == 1
    commit_everywhere(book, 20, 1)
    assert decide(book) is None


def test_a_trainer_removed_before_the_decision_is_in_no_round_and_holds_up_nobody():
    book = book_of(10, 11)
    for trainer in (10, 11):
        commit_everywhere(book, trainer, 1)
    book.remove(11)
    assert members(decide(book)) == [(10, 1)]


def test_a_trainer_removed_after_the_decision_stays_in_it():
    book = book_of(10)
    commit_everywhere(book, 10, 1)
    (decision,) = book.advance(0.0)
    book.remove(10)
    assert book.outstanding(0) == [decision]
    assert members(decision) == [(10, 1)]


def test_a_trainer_that_is_gone_or_never_attached_opens_no_round():
    book = book_of(10)
    book.remove(10)
    commit_everywhere(book, 10, 1)
    commit_everywhere(book, 99, 1)
    assert decide(book) is None
    assert (book.step_of(10), book.lag_of(10), book.waiting_for(0.0)) == (0, 0, [])


def test_a_joiner_is_expected_from_the_next_round_on():
    book = book_of(10)
    commit_everywhere(book, 10, 1)
    decide(book)
    book.attach(11, 1, 0.0)
    commit_everywhere(book, 10, 2)
    assert decide(book) is None
    assert book.waiting_for(0.0) == [1]
    commit_everywhere(book, 11, 1)
    assert members(decide(book)) == [(10, 2), (11, 1)]


def test_a_joiner_holds_up_a_round_that_is_not_decided_yet():
    book = book_of(10, 11)
    commit_everywhere(book, 10, 1)
    book.attach(12, 2, 0.0)
    commit_everywhere(book, 11, 1)
    assert decide(book) is None
    commit_everywhere(book, 12, 1)
    assert len(decide(book).contributions) == 3


def test_steps_that_were_committed_ahead_are_counted_once_each_and_in_order():
    book = book_of(10, 11, policy=Ssp(max_lag=0))
    for step in (1, 2):
        commit_everywhere(book, 10, step)
    commit_everywhere(book, 11, 1)
    assert [members(each) for each in decide_all(book)] == [[(10, 1)], [(11, 1)], [(10, 2)]]
    assert decide(book) is None
    commit_everywhere(book, 11, 2)
    assert members(decide(book)) == [(11, 2)]


def test_a_step_committed_ahead_was_not_computed_on_the_round_before_and_is_refused_by_bsp():
    book = book_of(10)
    for step in (1, 2):
        commit_everywhere(book, 10, step)
    decision, refusal = book.advance(0.0)
    assert members(decision) == [(10, 1)]
    assert (refusal.step, refusal.round) == (2, 1)


def test_a_round_takes_no_more_than_one_step_of_a_trainer():
    book = book_of(10, policy=Async())
    for step in (2, 1, 3):
        commit_everywhere(book, 10, step)
    assert [members(each) for each in decide_all(book)] == [[(10, 1)], [(10, 2)], [(10, 3)]]
    assert decide(book) is None


@pytest.mark.parametrize("world_size", [1, 3])
def test_nobody_is_waited_for_when_nobody_is_there(world_size):
    book = book_of(world_size=world_size)
    assert decide(book) is None
    assert (book.waiting_for(0.0), book.missing_trainers) == ([], world_size)


# Late and refused gradients


def closed_without(policy=None):
    """Round 1 has been decided without trainer 11; 10 and 12 are in it."""
    book = book_of(10, 11, 12, policy=policy or Bsp(backup_workers=1))
    for trainer in (10, 12):
        commit_everywhere(book, trainer, 1)
    assert members(decide(book)) == [(10, 1), (12, 1)]
    return book


def test_a_late_gradient_is_refused_and_its_trainer_told_why():
    book = closed_without()
    commit_everywhere(book, 11, 1, base_round=0)
    (refusal,) = book.advance(0.0)
    assert refusal == Refusal(
        trainer_id=11,
        step=1,
        round=1,
        staleness=1,
        reason="it was computed on the parameters of round 0, but round 1 has been decided without it",
        error="",
    )
    assert book.advance(0.0) == []
    commit_everywhere(book, 11, 1, base_round=0)
    assert book.advance(0.0) == []
    assert book.round == 1


def test_no_round_waits_for_a_trainer_that_has_not_been_told_yet():
    book = closed_without()
    assert book.waiting_for(0.0) == [0, 2]
    for trainer in (10, 12):
        commit_everywhere(book, trainer, 2)
    assert members(decide(book)) == [(10, 2), (12, 2)]


def test_a_trainer_that_has_been_told_is_waited_for_again():
    book = closed_without(Bsp(backup_workers=1))
    commit_everywhere(book, 11, 1, base_round=0)
    book.advance(0.0)
    assert book.waiting_for(0.0) == [0, 1, 2]
    commit_everywhere(book, 11, 2)
    commit_everywhere(book, 10, 2)
    assert members(decide(book)) == [(10, 2), (11, 2)]


def test_a_late_trainer_that_has_read_newer_parameters_is_not_late_any_more():
    """As one that attached just before the round was decided, and pulled after it."""
    book = closed_without()
    commit_everywhere(book, 11, 1, base_round=1)
    commit_everywhere(book, 10, 2)
    assert members(decide(book)) == [(10, 2), (11, 1)]


@pytest.mark.parametrize("claimed", [-5, 99])
def test_a_base_round_that_no_trainer_can_have_is_taken_for_the_nearest_one(claimed):
    book = book_of(10, policy=Async())
    commit_everywhere(book, 10, 1)
    decide(book)
    commit_everywhere(book, 10, 2, base_round=claimed)
    (contribution,) = decide(book).contributions
    assert contribution.staleness == (1 if claimed < 0 else 0)


def test_a_gradient_that_is_too_old_is_refused_and_a_younger_one_taken():
    book = book_of(10, 11, policy=Async(max_staleness=1))
    for step in (1, 2):
        commit_everywhere(book, 10, step)
        decide(book)
    commit_everywhere(book, 11, 1, base_round=0)
    commit_everywhere(book, 10, 3, base_round=1)
    refusal, decision = book.advance(0.0)
    assert (refusal.trainer_id, refusal.staleness, refusal.reason) == (11, 2, "it is 2 rounds old; the limit is 1")
    assert (decision.round, members(decision)) == (3, [(10, 3)])
    assert decision.contributions[0].staleness == 1


def test_a_gradient_that_grows_too_old_while_it_waits_its_turn_is_refused():
    book = book_of(10, 11, policy=Async(max_staleness=0))
    commit_everywhere(book, 11, 1)
    commit_everywhere(book, 10, 1)
    decision, refusal = book.advance(0.0)
    assert members(decision) == [(11, 1)]
    assert (refusal.trainer_id, refusal.round, refusal.staleness) == (10, 1, 1)


def test_a_failed_round_is_refused_to_all_who_committed_and_may_be_tried_again():
    book = book_of(10, 11, policy=Bsp(deadline=5.0, absent="fail"))
    commit_everywhere(book, 10, 1, now_s=1.0)
    assert book.advance(5.9) == []
    (refusal,) = book.advance(6.0)
    assert (refusal.trainer_id, refusal.step, refusal.round, refusal.error) == (10, 1, 0, "RoundFailed")
    assert "the ranks [1] had not committed" in refusal.reason
    assert book.round == 0
    for trainer, step in ((10, 2), (11, 1)):
        commit_everywhere(book, trainer, step, now_s=7.0)
    assert members(decide(book, 7.0)) == [(10, 2), (11, 1)]


# Ssp


def test_a_trainer_too_far_ahead_waits_until_the_slowest_has_stepped():
    book = book_of(10, 11, policy=Ssp(max_lag=1))
    for step in (1, 2, 3):
        commit_everywhere(book, 10, step)
    assert [members(each) for each in decide_all(book)] == [[(10, 1)], [(10, 2)]]
    assert book.waiting_for(0.0) == [1]
    commit_everywhere(book, 11, 1)
    assert [members(each) for each in decide_all(book)] == [[(11, 1)], [(10, 3)]]


def test_a_joiner_begins_where_the_slowest_one_is():
    book = book_of(10, policy=Ssp(max_lag=1))
    for step in range(1, 6):
        commit_everywhere(book, 10, step)
        decide(book)
    book.attach(11, 1, 0.0)
    for step in (6, 7, 8):
        commit_everywhere(book, 10, step)
    assert [members(each) for each in decide_all(book)] == [[(10, 6)], [(10, 7)]]


def test_a_slow_trainer_that_is_removed_lets_the_others_go_on():
    book = book_of(10, 11, policy=Ssp(max_lag=0))
    for step in (1, 2):
        commit_everywhere(book, 10, step)
    assert len(decide_all(book)) == 1
    book.remove(11)
    assert [members(each) for each in decide_all(book)] == [[(10, 2)]]


# Deadlines


def test_the_deadline_counts_from_the_moment_when_the_first_gradient_was_whole():
    book = book_of(10, 11, 12, policy=Bsp(deadline=5.0))
    book.committed(committed(0, 10, 1), 1.0)
    assert not book.undecided
    book.committed(committed(1, 10, 1), 3.0)
    commit_everywhere(book, 11, 1, now_s=6.0)
    assert book.undecided
    assert book.advance(7.9) == []
    assert members(decide(book, 8.0)) == [(10, 1), (11, 1)]
    assert not book.undecided


def test_a_repeated_report_does_not_move_the_deadline():
    book = book_of(10, 11, policy=Bsp(deadline=5.0))
    commit_everywhere(book, 10, 1, now_s=1.0)
    commit_everywhere(book, 10, 1, now_s=4.0)
    assert members(decide(book, 6.0)) == [(10, 1)]


def test_time_in_which_nobody_could_report_does_not_count():
    book = book_of(10, 11, policy=Bsp(deadline=5.0))
    commit_everywhere(book, 10, 1, now_s=1.0)
    book.postpone(100.0, 103.0)
    assert book.advance(105.9) == []
    assert decide(book, 106.0) is not None


def test_what_was_reported_after_a_pause_is_not_dated_into_the_future():
    book = book_of(10, 11, policy=Bsp(deadline=5.0))
    commit_everywhere(book, 10, 1, now_s=103.0)
    book.postpone(100.0, 103.0)
    assert book.advance(107.9) == []
    assert decide(book, 108.0) is not None


def test_the_deadline_of_the_first_round_does_not_count_while_trainers_are_missing():
    """Else those who attach last would be late for a round that could not begin without them."""
    book = book_of(10, policy=Bsp(deadline=5.0, absent="fail"), world_size=2)
    commit_everywhere(book, 10, 1, now_s=1.0)
    book.attach(11, 1, 60.0)
    assert book.advance(64.9) == []
    commit_everywhere(book, 11, 1, now_s=64.9)
    assert members(decide(book, 64.9)) == [(10, 1), (11, 1)]


# Rounds that shards look at first


def test_a_round_with_a_norm_to_clip_is_prepared_before_it_is_decided():
    book = book_of(10, 11)
    for trainer in (10, 11):
        commit_everywhere(book, trainer, 1, rules=GradientRules(max_norm=1.0, clip_value=0.5))
    (plan,) = book.advance(0.0)
    assert isinstance(plan, Plan)
    assert (plan.attempt, plan.rules) == (1, GradientRules(max_norm=1.0, clip_value=0.5))
    assert (plan.plan.round, members(plan.plan), plan.plan.divisor) == (1, [(10, 1), (11, 1)], 2)
    assert (book.round, book.statistics().num_accepted) == (1, 0)
    assert book.advance(0.0) == []
    book.prepared(prepared(1, 1, 16.0))
    assert book.advance(0.0) == []
    book.prepared(prepared(0, 1, 4.0, 5.0))
    decision = decide(book)
    assert decision == replace(plan.plan, grad_norm=5.0, clip_coefficient=1.0 / (5.0 + 1e-6), clip_value=0.5)
    assert book.statistics().num_accepted == 2


def test_a_limit_for_single_elements_needs_no_look():
    book = book_of(10)
    commit_everywhere(book, 10, 1, rules=GradientRules(clip_value=0.5))
    decision = decide(book)
    assert (decision.clip_value, decision.grad_norm) == (0.5, None)


@pytest.mark.parametrize(("policy", "error"), [("skip", ""), ("raise", "NonFiniteGradient")])
def test_a_round_with_nan_or_infinite_elements_steps_nothing_if_the_rules_say_so(policy, error):
    book = book_of(10, 11)
    for trainer in (10, 11):
        commit_everywhere(book, trainer, 1, rules=GradientRules(nonfinite=policy))
    (plan,) = book.advance(0.0)
    assert plan.rules.look_for_nonfinite
    book.prepared(prepared(0, 1, math.nan, nonfinite=[NonFinite(trainer_id=11, tensor=1, count=3)]))
    book.prepared(prepared(1, 1, 1.0, nonfinite=[NonFinite(trainer_id=11, tensor=0, count=2)]))
    decision = decide(book)
    assert "5 NaN or infinite elements, the first in 'w' of trainer 11" in decision.skip
    assert (decision.error, decision.num_nonfinite, decision.overflow) == (error, 5, False)
    assert (decision.divisor, decision.clip_coefficient) == (2, 1.0)
    assert book.statistics().num_skipped == 1


def test_the_rules_of_the_lowest_rank_count():
    book = book_of(10, 11)
    commit_everywhere(book, 10, 1)
    commit_everywhere(book, 11, 1, rules=GradientRules(max_norm=1.0, nonfinite="raise"))
    assert decide(book).grad_norm is None


def test_nothing_else_is_decided_while_a_round_is_prepared():
    book = book_of(10, 11, policy=Async(max_staleness=0))
    commit_everywhere(book, 10, 1, rules=CLIPPED)
    (plan,) = book.advance(0.0)
    commit_everywhere(book, 11, 1, base_round=0)
    assert book.advance(0.0) == []
    for shard in SHARDS:
        book.prepared(prepared(shard, 1, 0.0))
    decision, refusal = book.advance(0.0)
    assert members(decision) == members(plan.plan) == [(10, 1)]
    assert (refusal.trainer_id, refusal.round) == (11, 1)


def test_a_trainer_removed_while_its_round_is_prepared_stays_in_it():
    book = book_of(10, 11)
    for trainer in (10, 11):
        commit_everywhere(book, trainer, 1, rules=CLIPPED)
    (plan,) = book.advance(0.0)
    book.remove(10)
    for shard in SHARDS:
        book.prepared(prepared(shard, 1, 0.0))
    assert members(decide(book)) == members(plan.plan) == [(10, 1), (11, 1)]


def test_what_shards_say_of_other_rounds_is_no_answer():
    book = book_of(10)
    book.prepared(prepared(0, 1, 9.0))
    commit_everywhere(book, 10, 1, rules=CLIPPED)
    book.advance(0.0)
    book.prepared(prepared(0, 0, 9.0))
    book.prepared(prepared(1, 2, 9.0))
    assert book.advance(0.0) == []
    book.prepared(prepared(0, 1, 0.0))
    book.prepared(prepared(1, 1, 0.0))
    assert decide(book).grad_norm == 0.0
    book.prepared(prepared(0, 1, 9.0))
    assert book.advance(0.0) == []


def test_a_shard_that_there_is_not_has_no_say_in_the_norm():
    book = book_of(10)
    commit_everywhere(book, 10, 1, rules=CLIPPED)
    book.advance(0.0)
    book.prepared(prepared(9, 1, 1e9))
    book.prepared(prepared(0, 1, 0.0))
    assert book.advance(0.0) == []
    book.prepared(prepared(1, 1, 0.0))
    assert decide(book).grad_norm == 0.0


def test_a_repeated_answer_of_a_shard_counts_once():
    book = book_of(10)
    commit_everywhere(book, 10, 1, rules=CLIPPED)
    book.advance(0.0)
    for _ in range(2):
        book.prepared(prepared(0, 1, 9.0))
    assert book.advance(0.0) == []
    book.prepared(prepared(1, 1, 16.0))
    assert decide(book).grad_norm == 5.0


# Loss scaling


def test_when_loss_scaling_overflows_on_one_trainer_nobody_steps():
    book = book_of(10, 11, 12)
    for trainer in (10, 11, 12):
        commit_everywhere(book, trainer, 1, overflow=trainer != 11, rules=CLIPPED)
    decision = decide(book)
    assert decision.skip == "loss scaling overflowed on the ranks [0, 2]; nobody stepped"
    assert (decision.overflow, decision.error, decision.divisor) == (True, "", 3)
    assert book.statistics().num_skipped == 1


# Buffers


@pytest.mark.parametrize("buffers", BUFFER_POLICIES)
def test_only_the_policy_lowest_names_a_trainer_whose_buffers_count(buffers):
    book = book_of(10, 11, buffers=buffers)
    for trainer in (10, 11):
        commit_everywhere(book, trainer, 1)
    assert decide(book).buffers_from == (10 if buffers == "lowest" else 0)


def test_buffers_are_those_of_the_lowest_rank_that_has_samples():
    book = book_of(10, 11, 12)
    for trainer in (10, 11, 12):
        commit_everywhere(book, trainer, 1, samples=0 if trainer == 10 else 1)
    assert decide(book).buffers_from == 11


def test_a_round_of_one_trainer_takes_its_buffers_where_rounds_take_everybody():
    book = book_of(10, 11, policy=Bsp(backup_workers=1))
    commit_everywhere(book, 11, 1)
    assert decide(book).buffers_from == 11


def test_where_gradients_are_rounds_of_their_own_the_lowest_rank_that_contributes_brings_buffers():
    book = book_of(10, 11, policy=Async())
    commit_everywhere(book, 11, 1)
    assert decide(book).buffers_from == 11
    commit_everywhere(book, 10, 1)
    assert decide(book).buffers_from == 10
    commit_everywhere(book, 11, 2)
    assert decide(book).buffers_from == 0
    commit_everywhere(book, 10, 2, samples=0)
    assert decide(book).buffers_from == 0
    commit_everywhere(book, 11, 3)
    assert decide(book).buffers_from == 11
    commit_everywhere(book, 10, 3)
    decide(book)
    book.remove(10)
    commit_everywhere(book, 11, 4)
    assert decide(book).buffers_from == 11


def test_a_trainer_that_has_announced_a_step_without_samples_brings_the_buffers_of_the_one_before():
    book = book_of(10, 11, policy=Ssp(max_lag=0))
    for step, samples in ((1, 1), (2, 1), (3, 0)):
        commit_everywhere(book, 10, step, samples=samples)
    decide(book)
    commit_everywhere(book, 11, 1, samples=0)
    assert [(members(each), each.buffers_from) for each in decide_all(book)] == [([(11, 1)], 0), ([(10, 2)], 10)]


# What shards may have missed


def test_decisions_are_kept_until_every_shard_has_applied_them():
    book = book_of(10)
    decided = []
    for step in (1, 2, 3):
        commit_everywhere(book, 10, step)
        decided += book.advance(0.0)
    assert book.outstanding(0) == book.outstanding(1) == decided
    book.applied(0, 3)
    assert book.outstanding(0) == []
    assert book.outstanding(1) == decided
    book.applied(1, 2)
    assert book.outstanding(1) == decided[2:]
    book.applied(1, 1)
    assert book.outstanding(1) == decided[2:]


def test_shards_that_there_are_not_apply_nothing():
    book = book_of(10)
    commit_everywhere(book, 10, 1)
    decided = book.advance(0.0)
    book.applied(9, 1)
    assert book.outstanding(0) == decided


def test_a_round_in_preparation_is_told_again_to_those_who_have_not_answered():
    book = book_of(10)
    commit_everywhere(book, 10, 1)
    (decision,) = book.advance(0.0)
    commit_everywhere(book, 10, 2, rules=CLIPPED)
    (plan,) = book.advance(0.0)
    assert book.outstanding(0) == book.outstanding(1) == [decision, plan]
    book.applied(0, 1)
    book.prepared(prepared(0, 2, 1.0))
    assert book.outstanding(0) == []
    assert book.outstanding(1) == [decision, plan]


def test_a_refusal_is_told_again_until_the_trainer_s_next_step_is_settled():
    book = closed_without()
    commit_everywhere(book, 11, 1, base_round=0)
    (refusal,) = book.advance(0.0)
    for shard in SHARDS:
        book.applied(shard, 1)
        assert book.outstanding(shard) == [refusal]
    commit_everywhere(book, 11, 2)
    commit_everywhere(book, 10, 2)
    (decision,) = book.advance(0.0)
    assert book.outstanding(0) == [decision]


def test_rounds_are_told_again_before_refusals_that_name_them():
    """A trainer that hears of a refusal must find the parameters of the round that it names."""
    book = closed_without()
    commit_everywhere(book, 11, 1, base_round=0)
    book.advance(0.0)
    assert [type(each) for each in book.outstanding(0)] == [Decision, Refusal]


def test_refusals_of_a_trainer_that_is_removed_are_told_no_more():
    book = closed_without()
    commit_everywhere(book, 11, 1, base_round=0)
    book.advance(0.0)
    book.remove(11)
    for shard in SHARDS:
        book.applied(shard, 1)
        assert book.outstanding(shard) == []


# Another placement


def test_a_book_goes_on_at_the_same_round_with_other_shards():
    book = book_of(10, 11, policy=Bsp(backup_workers=1))
    for trainer in (10, 11):
        commit_everywhere(book, trainer, 1)
    decide(book)
    book.replace(["v"], 1)
    assert (book.round, book.attached, book.outstanding(0)) == (1, {10, 11}, [])
    commit_everywhere(book, 10, 2, shards=[1])
    assert book.advance(0.0) == []
    commit_everywhere(book, 10, 2, shards=[0])
    (decision,) = book.advance(0.0)
    assert (decision.round, members(decision)) == (2, [(10, 2)])
    assert book.outstanding(0) == [decision]
    book.applied(0, 2)
    assert book.outstanding(0) == []
    assert book.statistics().num_accepted == 3


def test_what_was_told_of_the_old_placement_is_told_to_nobody_of_the_new_one():
    book = closed_without()
    commit_everywhere(book, 11, 1, base_round=0)
    book.advance(0.0)
    commit_everywhere(book, 10, 2, rules=CLIPPED)
    commit_everywhere(book, 12, 2, rules=CLIPPED)
    assert isinstance(book.advance(0.0)[-1], Plan)
    book.replace(["v"], 2)
    assert book.outstanding(0) == []
    for shard in SHARDS:
        book.prepared(prepared(shard, 2, 1.0))
    assert book.advance(0.0) == []


def test_names_of_the_new_description_are_used():
    book = book_of(10)
    book.replace(["a", "b"], 1)
    commit_everywhere(book, 10, 1, shards=[0], rules=GradientRules(nonfinite="skip"))
    book.advance(0.0)
    book.prepared(prepared(0, 1, nonfinite=[NonFinite(trainer_id=10, tensor=1, count=1)]))
    (decision,) = book.advance(0.0)
    assert "'b'" in decision.skip


def test_options_of_the_old_description_do_not_count_in_the_new_one():
    book = book_of(10, 11, policy=Async())
    commit_everywhere(book, 10, 1, options=({"lr": 0.9},))
    decide(book)
    book.replace(["v"], 1)
    commit_everywhere(book, 11, 1, shards=[0], options=({"lr": 0.1}, {"lr": 0.2}))
    (decision,) = book.advance(0.0)
    assert decision.options == ({"lr": 0.1}, {"lr": 0.2})


def test_after_a_change_of_description_everybody_is_waited_for_again():
    """All have been told where the model stands, also those that were late before."""
    book = closed_without(Bsp(deadline=5.0, backup_workers=1))
    book.replace(["v"], 2)
    assert book.waiting_for(0.0) == [0, 1, 2]


# For whoever looks


def test_lag_counts_the_rounds_since_a_trainer_was_last_told():
    book = book_of(10)
    for step in (1, 2):
        commit_everywhere(book, 10, step)
        decide(book)
    book.attach(11, 1, 0.0)
    assert (book.lag_of(10), book.lag_of(11)) == (0, 0)
    book.committed(committed(0, 11, 5), 0.0)
    assert book.step_of(11) == 5
    late = closed_without()
    assert (late.lag_of(10), late.lag_of(11)) == (0, 1)
    commit_everywhere(late, 11, 1, base_round=0)
    late.advance(0.0)
    assert late.lag_of(11) == 0


def test_statistics_count_gradients_refusals_and_skipped_rounds_and_staleness():
    book = book_of(10, 11, policy=Async(max_staleness=2))
    for step, base_round in enumerate([0, 0, 0, 2], start=1):
        commit_everywhere(book, 10, step, base_round=base_round)
        decide(book)
    commit_everywhere(book, 11, 1, base_round=0)
    book.advance(0.0)
    commit_everywhere(book, 11, 2, samples=0)
    decide(book)
    counts = book.statistics()
    assert (counts.num_accepted, counts.num_rejected, counts.num_skipped) == (4, 1, 1)
    assert counts.staleness == {0: 1, 1: 2, 2: 1}


def test_what_is_very_old_is_counted_as_one_age_so_that_the_histogram_stays_small(monkeypatch):
    monkeypatch.setattr("pserver.core.rounds.MAX_STALENESS_SHOWN", 2)
    book = book_of(10, policy=Async())
    for step in range(1, 6):
        commit_everywhere(book, 10, step, base_round=0)
        decide(book)
    assert book.statistics().staleness == {0: 1, 1: 1, 2: 3}


@pytest.mark.parametrize("policy", [Bsp(), Bsp(backup_workers=1), Ssp(max_lag=1), Async(max_staleness=1)], ids=repr)
@pytest.mark.parametrize("clipped", [False, True], ids=["plain", "clipped"])
@given(
    st.lists(
        st.one_of(
            st.tuples(
                st.just("commit"),
                st.sampled_from((10, 11, 12)),
                st.integers(1, 5),
                st.integers(0, 3),
                st.sampled_from(SHARDS),
            ),
            st.tuples(st.just("whole"), st.sampled_from((10, 11, 12)), st.integers(1, 5), st.integers(0, 3)),
            st.tuples(st.just("prepared"), st.sampled_from(SHARDS)),
            st.tuples(st.just("remove"), st.sampled_from((11, 12))),
            st.tuples(st.just("attach"), st.sampled_from((10, 11, 12))),
        ),
        max_size=60,
    )
)
def test_no_step_is_ever_settled_twice_and_rounds_have_no_gaps(policy, clipped, actions):
    book = book_of(10, 11, policy=policy)
    rules = CLIPPED if clipped else GradientRules()
    reported: dict[tuple[int, int], set[int]] = {}
    settled: list[tuple[int, int]] = []
    ended: set[int] = set()
    plan = None
    last_round = 0
    for action, *about in actions:
        if action == "attach" and about[0] not in ended:
            book.attach(about[0], about[0] - 10, 0.0)
        elif action == "remove":
            book.remove(about[0])
            ended.add(about[0])
        elif action == "prepared":
            book.prepared(prepared(about[0], book.round, 1.0, attempt=plan.attempt if plan is not None else 0))
        elif action in ("commit", "whole"):
            trainer, step, base_round, *shards = about
            for shard in shards or SHARDS:
                book.committed(committed(shard, trainer, step, base_round=base_round, rules=rules), 0.0)
                reported.setdefault((trainer, step), set()).add(shard)
        for news in book.advance(0.0):
            if isinstance(news, Refusal):
                assert plan is None
                settled.append((news.trainer_id, news.step))
                assert reported[news.trainer_id, news.step] == set(SHARDS)
                continue
            if isinstance(news, Decision) and plan is not None:
                assert news.contributions == plan.plan.contributions
                assert news.round == plan.plan.round
                plan = None
                continue
            assert plan is None
            plan = news if isinstance(news, Plan) else None
            decision = plan.plan if plan is not None else news
            assert (plan is not None) == clipped
            last_round += 1
            assert decision.round == last_round
            settled += members(decision)
            assert not ended & {each.trainer_id for each in decision.contributions}
            assert all(reported[each] == set(SHARDS) for each in members(decision))
    assert len(set(settled)) == len(settled)
    assert last_round == book.round
    for trainer in (10, 11, 12):
        steps = [step for each, step in settled if each == trainer]
        assert steps == sorted(steps)


# Shards that are lost, and go on elsewhere


def replicated_book(*trainers, **about):
    """Every round is prepared, since shards may be lost."""
    return book_of(*trainers, always_prepares=True, **about)


def prepare_next(book, *trainers, step, shards=SHARDS, **about):
    """These trainers commit everywhere, and so the next round is planned; the shards that answer."""
    for trainer in trainers:
        commit_everywhere(book, trainer, step, **about)
    (plan,) = book.advance(0.0)
    assert isinstance(plan, Plan)
    for shard in shards:
        book.prepared(prepared(shard, plan.plan.round, attempt=plan.attempt))
    return plan


def promote(book, shard, round_number, attempt):
    """A replica goes on; a plan that it lacks is given up, as the coordinator does."""
    if book.shard_promoted(shard, round_number, attempt):
        book.give_up()


def where(book, *trainers):
    """What a plan changes and giving it up must restore."""
    about = [
        (each.settled_step, each.told_round, each.clock, sorted(each.commits))
        for each in (book._expected[trainer] for trainer in trainers)
    ]
    return book.round, book.version, about


def test_where_shards_may_be_lost_every_round_is_prepared_before_it_is_decided():
    book = replicated_book(10, 11)
    plan = prepare_next(book, 10, 11, step=1)
    assert (plan.attempt, plan.rules) == (1, GradientRules())
    assert decide(book) == plan.plan
    assert (book.round, book.version, book.statistics().num_accepted) == (1, 1, 2)


def test_rounds_that_step_nothing_are_prepared_as_well():
    book = replicated_book(10)
    plan = prepare_next(book, 10, step=1, samples=0)
    assert plan.plan.skip
    assert decide(book) == plan.plan
    assert book.version == 0


def test_attempts_are_never_used_twice():
    book = replicated_book(10)
    for step in (1, 2, 3):
        assert prepare_next(book, 10, step=step).attempt == step
        decide(book)


def test_commits_of_a_lost_shard_must_be_repeated():
    book = replicated_book(10, 11)
    commit_everywhere(book, 10, 1)
    book.shard_lost(1)
    commit_everywhere(book, 11, 1)
    assert book.advance(0.0) == []
    assert book.waiting_for(0.0) == [0]
    promote(book, 1, 0, 0)
    book.committed(committed(0, 10, 1), 0.0)
    assert book.advance(0.0) == []
    book.committed(committed(1, 10, 1), 0.0)
    (plan,) = book.advance(0.0)
    assert members(plan.plan) == [(10, 1), (11, 1)]


def test_commits_of_the_shards_that_are_left_need_not_be_repeated():
    book = replicated_book(10)
    book.committed(committed(0, 10, 1), 0.0)
    book.shard_lost(1)
    promote(book, 1, 0, 0)
    book.committed(committed(1, 10, 1), 0.0)
    assert len(book.advance(0.0)) == 1


def test_a_plan_that_the_promoted_replica_has_is_completed():
    book = replicated_book(10, 11)
    plan = prepare_next(book, 10, 11, step=1, shards=[0])
    book.shard_lost(1)
    promote(book, 1, 0, plan.attempt)
    assert book.advance(0.0) == []
    assert book.outstanding(0) == []
    assert book.outstanding(1) == [plan]
    book.prepared(prepared(1, 1, attempt=plan.attempt))
    assert decide(book) == plan.plan


def test_what_the_lost_shard_had_answered_is_asked_again():
    """Its answer may have gone with it, but for a replica that has the round."""
    book = replicated_book(10)
    plan = prepare_next(book, 10, step=1, shards=[1])
    book.shard_lost(1)
    book.prepared(prepared(0, 1, attempt=plan.attempt))
    assert book.advance(0.0) == []
    promote(book, 1, 0, plan.attempt)
    book.prepared(prepared(1, 1, attempt=plan.attempt))
    assert decide(book) == plan.plan


@pytest.mark.parametrize("held", [0, 7], ids=["none", "another attempt"])
def test_a_plan_that_the_promoted_replica_lacks_is_given_up_and_planned_again_with_the_same_members(held):
    book = replicated_book(10, 11)
    prepare_next(book, 10, 11, step=1)
    decide(book)
    for trainer in (10, 11):
        commit_everywhere(book, trainer, 2)
    before = where(book, 10, 11)
    (plan,) = book.advance(0.0)
    book.prepared(prepared(0, 2, attempt=plan.attempt))
    book.shard_lost(1)
    assert book.advance(0.0) == []
    promote(book, 1, 1, held)
    assert where(book, 10, 11) == before
    assert book.advance(0.0) == []
    assert book.waiting_for(0.0) == [0, 1]
    for trainer in (10, 11):
        commit_everywhere(book, trainer, 2)
    (again,) = book.advance(0.0)
    assert again.attempt > plan.attempt
    assert again.plan == plan.plan
    for shard in SHARDS:
        book.prepared(prepared(shard, 2, attempt=plan.attempt))
    assert book.advance(0.0) == []
    for shard in SHARDS:
        book.prepared(prepared(shard, 2, attempt=again.attempt))
    assert decide(book) == again.plan
    assert (book.round, book.version, book.statistics().num_accepted) == (2, 2, 4)


def test_a_trainer_that_ended_meanwhile_is_not_in_the_plan_that_is_made_again():
    book = replicated_book(10, 11)
    prepare_next(book, 10, 11, step=1, shards=[0])
    book.remove(11)
    book.shard_lost(1)
    promote(book, 1, 0, 0)
    commit_everywhere(book, 10, 1)
    (again,) = book.advance(0.0)
    assert members(again.plan) == [(10, 1)]


def test_a_decided_round_is_told_to_a_promoted_replica_that_has_it_only_prepared():
    book = replicated_book(10)
    plan = prepare_next(book, 10, step=1)
    decision = decide(book)
    book.applied(0, 1)
    book.shard_lost(1)
    promote(book, 1, 0, plan.attempt)
    assert book.outstanding(1) == [decision]
    assert book.round == 1
    book.applied(1, 1)
    assert book.outstanding(1) == []


def test_a_promoted_replica_that_is_behind_is_told_again_what_the_lost_primary_had_applied():
    """That is said to be applied only when the replicas know of it, so that decisions are kept for them."""
    book = replicated_book(10)
    decisions = []
    for step in (1, 2):
        prepare_next(book, 10, step=step)
        decisions.append(decide(book))
        book.applied(0, step)
    book.applied(1, 1)
    plan = prepare_next(book, 10, step=3, shards=[])
    book.shard_lost(1)
    promote(book, 1, 1, 2)
    assert book.round == 2  # the third round was given up: this replica cannot have it
    assert book.outstanding(1) == decisions[1:]
    commit_everywhere(book, 10, 3)
    (again,) = book.advance(0.0)
    assert (again.plan.round, again.attempt) == (plan.plan.round, plan.attempt + 1)
    assert book.outstanding(1) == [*decisions[1:], again]


def test_decisions_are_kept_for_replicas_that_lack_what_the_promoted_one_has():
    book = replicated_book(10)
    prepare_next(book, 10, step=1)
    decision = decide(book)
    book.applied(0, 1)
    book.shard_lost(1)
    promote(book, 1, 1, 0)
    assert book.outstanding(1) == [decision]
    book.applied(1, 1)
    assert book.outstanding(1) == []


def test_a_shard_that_is_lost_while_nothing_is_under_way_changes_nothing():
    book = replicated_book(10)
    prepare_next(book, 10, step=1)
    decide(book)
    before = where(book, 10)
    book.shard_lost(0)
    promote(book, 0, 1, 0)
    assert where(book, 10) == before
    prepare_next(book, 10, step=2)
    assert members(decide(book)) == [(10, 2)]


@pytest.mark.parametrize("policy", [Async(), Ssp(max_lag=1)], ids=repr)
def test_a_step_that_was_committed_ahead_waits_behind_the_one_that_is_planned_again(policy):
    book = replicated_book(10, policy=policy)
    for step in (1, 2):
        commit_everywhere(book, 10, step)
    (plan,) = book.advance(0.0)
    assert members(plan.plan) == [(10, 1)]
    book.shard_lost(0)
    promote(book, 0, 0, 0)
    commit_everywhere(book, 10, 2)
    assert book.advance(0.0) == []
    commit_everywhere(book, 10, 1)
    decisions = []
    while news := book.advance(0.0):
        decisions += [each for each in news if isinstance(each, Decision)]
        for plan in [each for each in news if isinstance(each, Plan)]:
            for shard in SHARDS:
                book.prepared(prepared(shard, plan.plan.round, attempt=plan.attempt))
    assert [(each.round, members(each)) for each in decisions] == [(1, [(10, 1)]), (2, [(10, 2)])]


def test_a_replica_that_goes_on_with_a_plan_lacks_its_commits_if_that_is_given_up_for_another_shard():
    """It has their mean only."""
    book = replicated_book(10)
    plan = prepare_next(book, 10, step=1)
    for shard, held in ((0, plan.attempt), (1, 0)):
        book.shard_lost(shard)
        promote(book, shard, 0, held)
    book.committed(committed(1, 10, 1), 0.0)
    assert book.advance(0.0) == []
    book.committed(committed(0, 10, 1), 0.0)
    (again,) = book.advance(0.0)
    assert (again.plan, again.attempt) == (plan.plan, plan.attempt + 1)


def test_a_refused_step_that_a_promoted_replica_reports_is_refused_again():
    """It lost the refusal with its primary; the others have it."""
    book = closed_without()
    assert book.refusal_of(committed(0, 11, 1)) is None
    commit_everywhere(book, 11, 1, base_round=0)
    (refusal,) = book.advance(0.0)
    assert book.refusal_of(committed(0, 11, 1)) == refusal
    assert book.refusal_of(committed(0, 11, 2)) is None
    assert book.refusal_of(committed(0, 10, 1)) is None
    assert book.refusal_of(committed(0, 99, 1)) is None
    commit_everywhere(book, 11, 2)
    commit_everywhere(book, 10, 2)
    book.advance(0.0)
    assert book.refusal_of(committed(0, 11, 1)) is None
