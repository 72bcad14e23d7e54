import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pserver.core.sync import (
    POLICIES,
    WAIT,
    Async,
    Bsp,
    MemberView,
    Offer,
    RoundView,
    Ssp,
    SyncPolicy,
    Verdict,
    describe_policy,
    make_policy,
    policy_arguments,
)
from pserver.errors import InvalidRequest

ROUND = 10


def member(rank, offer=None, *, in_step=True, clock=0):
    """A trainer; `offer` is (base round, arrival)."""
    waiting = None if offer is None else Offer(base_round=offer[0], arrival=offer[1])
    return MemberView(rank=rank, clock=clock, in_step=in_step, offer=waiting)


def committed(rank, arrival=1, *, base_round=ROUND, clock=0):
    return member(rank, (base_round, arrival), clock=clock)


def view(*members, waited_s=0.0):
    return RoundView(round=ROUND, members=members, waited_s=waited_s)


@st.composite
def views(draw):
    """What a policy may be shown: ranks differ, and so do arrivals."""
    ranks = draw(st.lists(st.integers(0, 6), unique=True, max_size=5))
    arrivals = draw(st.permutations(range(len(ranks))))
    members = [
        member(
            rank,
            draw(st.none() | st.tuples(st.integers(ROUND - 4, ROUND), st.just(arrival))),
            in_step=draw(st.booleans()),
            clock=draw(st.integers(0, 4)),
        )
        for rank, arrival in zip(ranks, arrivals, strict=True)
    ]
    # A gradient of the last round can only come from a trainer that has been told of it.
    members = [
        dataclasses.replace(each, in_step=each.in_step or (each.offer is not None and each.offer.base_round == ROUND))
        for each in members
    ]
    return view(*members, waited_s=draw(st.sampled_from([0.0, 4.9, 5.0, 100.0])))


def offered(view):
    return {each.rank: each.offer for each in view.members if each.offer is not None}


policies = st.one_of(
    st.builds(
        Bsp,
        backup_workers=st.integers(0, 3),
        deadline=st.none() | st.just(5.0),
        absent=st.sampled_from(["exclude", "fail"]),
    ),
    st.builds(Ssp, max_lag=st.integers(0, 3)),
    st.builds(Async, max_staleness=st.none() | st.integers(0, 3)),
)


# Every policy


@given(policies, views())
def test_a_verdict_speaks_of_waiting_gradients_only_and_never_takes_what_it_refuses(policy, view):
    verdict = policy.verdict(view)
    assert verdict.take <= offered(view).keys()
    assert verdict.reject.keys() <= offered(view).keys()
    assert not (verdict.take and verdict.reject)
    assert all(verdict.reject.values())


@given(policies, views())
def test_nobody_waits_for_those_whose_gradients_are_there(policy, view):
    assert not policy.waiting_for(view) & offered(view).keys()
    assert policy.waiting_for(view) <= {each.rank for each in view.members}


@given(policies, views())
def test_when_everybody_s_gradient_is_there_something_is_decided(policy, view):
    """Otherwise all would wait for each other."""
    if view.members and len(offered(view)) == len(view.members):
        assert policy.verdict(view) != WAIT


@given(policies)
def test_without_trainers_every_policy_waits_for_nobody(policy):
    assert policy.verdict(view()) == WAIT
    assert policy.waiting_for(view()) == frozenset()


# Bsp


@given(views())
def test_bsp_takes_gradients_of_the_last_round_only_and_refuses_all_others(view):
    verdict = Bsp().verdict(view)
    late = {rank for rank, offer in offered(view).items() if offer.base_round != ROUND}
    assert verdict.reject.keys() == late
    assert all(offered(view)[rank].base_round == ROUND for rank in verdict.take)


@given(views())
def test_bsp_closes_a_round_when_everybody_who_is_in_step_has_committed(view):
    """A trainer that has not been told of the last round yet is at work for a round that is closed."""
    view = dataclasses.replace(
        view,
        members=tuple(each for each in view.members if each.offer is None or each.offer.base_round == ROUND),
    )
    complete = frozenset(offered(view))
    in_step = {each.rank for each in view.members if each.in_step}
    verdict = Bsp().verdict(view)
    assert verdict == (Verdict(take=complete) if complete and in_step <= complete else WAIT)
    assert Bsp().waiting_for(view) == in_step - complete


def test_bsp_says_why_it_refuses_a_late_gradient_and_raises_nothing():
    verdict = Bsp(backup_workers=1).verdict(view(committed(0), committed(1, base_round=8)))
    assert verdict.error == ""
    assert verdict.reject == {
        1: "it was computed on the parameters of round 8, but round 10 has been decided without it"
    }


@pytest.mark.parametrize(
    ("backup_workers", "num_committed", "closes"),
    [(0, 3, False), (0, 4, True), (1, 2, False), (1, 3, True), (2, 2, True), (4, 1, True), (4, 0, False), (9, 1, True)],
)
def test_with_backup_workers_a_round_closes_without_the_slowest(backup_workers, num_committed, closes):
    shown = view(
        *(committed(rank) for rank in range(num_committed)), *(member(rank) for rank in range(num_committed, 4))
    )
    verdict = Bsp(backup_workers=backup_workers).verdict(shown)
    assert verdict == (Verdict(take=frozenset(range(num_committed))) if closes else WAIT)


def test_everybody_who_has_committed_is_taken_even_if_fewer_were_enough():
    assert Bsp(backup_workers=2).verdict(view(*map(committed, range(4)))).take == {0, 1, 2, 3}


def test_a_trainer_that_is_late_counts_as_one_of_the_backup_workers():
    """Else a round would close without its backup workers and without those who are late."""
    late = member(3, in_step=False)
    policy = Bsp(backup_workers=1)
    assert policy.verdict(view(committed(0), committed(1), member(2), late)) == WAIT
    assert policy.verdict(view(committed(0), committed(1), committed(2), late)).take == {0, 1, 2}


def test_a_trainer_that_is_late_holds_nobody_up():
    late = [member(rank, in_step=False) for rank in (1, 2)]
    assert Bsp().waiting_for(view(committed(0), *late)) == frozenset()
    assert Bsp().verdict(view(committed(0), *late)).take == {0}


def test_until_the_deadline_a_round_waits_and_then_it_goes_on_without_the_absent():
    policy = Bsp(deadline=5.0)
    members = (committed(0), committed(1), member(2))
    assert policy.verdict(view(*members, waited_s=4.99)) == WAIT
    assert policy.verdict(view(*members, waited_s=5.0)) == Verdict(take=frozenset({0, 1}))
    assert policy.waiting_for(view(*members, waited_s=4.99)) == {2}


def test_a_round_that_is_complete_does_not_wait_for_its_deadline():
    assert Bsp(deadline=5.0, absent="fail").verdict(view(committed(0), committed(1))).take == {0, 1}


def test_at_the_deadline_a_policy_may_fail_the_round_and_name_the_absent():
    policy = Bsp(deadline=5.0, absent="fail")
    verdict = policy.verdict(view(committed(0), member(1), committed(2), member(3), waited_s=6.0))
    assert (verdict.take, verdict.error) == (frozenset(), "RoundFailed")
    assert verdict.reject.keys() == {0, 2}
    for reason in verdict.reject.values():
        assert reason.startswith("round 11 failed: the ranks [1, 3] had not committed 5 s after the first trainer")


def test_a_deadline_and_backup_workers_work_together():
    policy = Bsp(backup_workers=1, deadline=5.0)
    assert policy.verdict(view(committed(0), committed(1), member(2))).take == {0, 1}
    assert policy.verdict(view(committed(0), member(1), member(2), waited_s=4.0)) == WAIT
    assert policy.verdict(view(committed(0), member(1), member(2), waited_s=5.0)).take == {0}


def test_no_deadline_passes_while_nobody_has_committed():
    assert Bsp(deadline=5.0).verdict(view(member(0), member(1), waited_s=99.0)) == WAIT


# Ssp


@given(views(), st.integers(0, 3))
def test_ssp_takes_the_first_gradient_of_those_who_are_not_too_far_ahead(view, max_lag):
    slowest = min((each.clock for each in view.members), default=0)
    near = [each for each in view.members if each.offer is not None and each.clock - slowest <= max_lag]
    verdict = Ssp(max_lag=max_lag).verdict(view)
    assert not verdict.reject
    if near:
        assert verdict.take == {min(near, key=lambda each: each.offer.arrival).rank}
    else:
        assert verdict == WAIT


def test_ssp_waits_for_the_slowest_once_somebody_does():
    ahead, slow, slower = member(0, (3, 1), clock=5), member(1, clock=2), member(2, clock=1)
    assert Ssp(max_lag=1).waiting_for(view(ahead, slow, slower)) == {2}
    assert Ssp(max_lag=1).waiting_for(view(slow, slower)) == frozenset()


def test_ssp_refuses_nothing_however_old():
    assert Ssp(max_lag=0).verdict(view(committed(0, base_round=0))).take == {0}


# Async


@given(views())
def test_async_takes_gradients_one_by_one_as_they_came(view):
    verdict = Async().verdict(view)
    assert not verdict.reject
    if offers := offered(view):
        assert verdict.take == {min(offers, key=lambda rank: offers[rank].arrival)}
    else:
        assert verdict == WAIT


@given(views(), st.integers(0, 3))
def test_async_refuses_what_is_older_than_its_bound(view, max_staleness):
    verdict = Async(max_staleness=max_staleness).verdict(view)
    stale = {rank for rank, offer in offered(view).items() if ROUND - offer.base_round > max_staleness}
    assert verdict.reject.keys() == stale
    assert bool(verdict.take) == (bool(offered(view)) and not stale)
    assert not verdict.take & stale


def test_async_says_how_old_a_refused_gradient_is():
    verdict = Async(max_staleness=2).verdict(view(committed(4, base_round=7)))
    assert verdict == Verdict(reject={4: "it is 3 rounds old; the limit is 2"})


@given(views())
def test_async_waits_for_nobody(view):
    assert Async(max_staleness=1).waiting_for(view) == frozenset()


# What they are made of


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Bsp(backup_workers=-1), "backup_workers must be an integer, 0 or more, but is -1"),
        (lambda: Bsp(backup_workers=1.0), "backup_workers"),
        (lambda: Bsp(backup_workers=True), "backup_workers"),
        (lambda: Bsp(backup_workers=1 << 31), "backup_workers"),
        (lambda: Bsp(deadline=0), "deadline must be a positive number of seconds"),
        (lambda: Bsp(deadline=-1.0), "deadline"),
        (lambda: Bsp(deadline=math.nan), "deadline"),
        (lambda: Bsp(deadline=math.inf), "deadline"),
        (lambda: Bsp(deadline="5"), "deadline"),
        (lambda: Bsp(absent="wait"), 'absent must be "exclude" or "fail"'),
        (lambda: Ssp(max_lag=-1), "max_lag must be an integer, 0 or more"),
        (lambda: Ssp(max_lag=None), "max_lag"),
        (lambda: Async(max_staleness=-1), "max_staleness must be an integer, 0 or more"),
        (lambda: Async(max_staleness=0.5), "max_staleness"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_by_name(make, message):
    with pytest.raises(InvalidRequest, match=message):
        make()


@pytest.mark.parametrize(
    "policy",
    [
        Bsp(),
        Bsp(backup_workers=2, deadline=1.5, absent="fail"),
        Ssp(max_lag=0),
        Ssp(max_lag=7),
        Async(),
        Async(max_staleness=3),
    ],
    ids=repr,
)
def test_policies_travel_by_name_and_arguments(policy):
    assert isinstance(policy, SyncPolicy)
    assert POLICIES[policy.name] is type(policy)
    arguments = policy_arguments(policy)
    assert make_policy(policy.name, arguments) == policy
    assert policy_arguments(make_policy(policy.name, arguments)) == arguments
    with pytest.raises((dataclasses.FrozenInstanceError, AttributeError, TypeError)):
        policy.anything = 1


def test_only_policies_without_barriers_let_a_trainer_read_a_mix_of_rounds():
    assert {each.name for each in POLICIES.values() if each.mixed_rounds} == {"ssp", "async"}
    assert {each.name for each in POLICIES.values() if not each.gathers} == {"async"}


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (Bsp(), "Bsp()"),
        (Bsp(backup_workers=1, absent="fail"), "Bsp(backup_workers=1, absent='fail')"),
        (Ssp(max_lag=0), "Ssp(max_lag=0)"),
        (Async(max_staleness=2), "Async(max_staleness=2)"),
    ],
)
def test_a_policy_is_shown_as_a_user_would_write_it(policy, text):
    assert describe_policy(policy) == text


def test_an_unknown_policy_is_refused_and_the_known_ones_are_named():
    with pytest.raises(InvalidRequest, match=r"'gossip' is unknown; expected one of \['async', 'bsp', 'ssp'\]"):
        make_policy("gossip", {})


def test_arguments_that_a_policy_does_not_take_are_refused():
    with pytest.raises(InvalidRequest, match="'bsp' does not take"):
        make_policy("bsp", {"max_lag": 3})
    with pytest.raises(InvalidRequest, match="'ssp' does not take"):
        make_policy("ssp", {})
    with pytest.raises(InvalidRequest, match="max_lag must be an integer"):
        make_policy("ssp", {"max_lag": "3"})


@pytest.mark.parametrize("policy", [Bsp, "bsp", None])
def test_what_is_no_policy_is_refused(policy):
    with pytest.raises(InvalidRequest, match="sync policy"):
        policy_arguments(policy)
