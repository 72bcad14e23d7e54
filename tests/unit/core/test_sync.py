import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pserver.core.sync import POLICIES, Bsp, RoundView, SyncPolicy, Verdict, make_policy, policy_arguments
from pserver.errors import InvalidRequest

ranks = st.frozensets(st.integers(0, 5))


@given(ranks, ranks)
def test_bsp_closes_a_round_when_everybody_who_is_expected_has_committed(expected, complete):
    verdict = Bsp().verdict(RoundView(expected=expected, complete=complete))
    assert (verdict is Verdict.CLOSE) == (bool(expected) and expected <= complete)


def test_bsp_without_trainers_waits():
    assert Bsp().verdict(RoundView(expected=frozenset(), complete=frozenset())) is Verdict.WAIT


@pytest.mark.parametrize("name", POLICIES)
def test_policies_travel_by_name_and_arguments(name):
    policy = POLICIES[name]()
    assert isinstance(policy, SyncPolicy)
    assert policy.name == name
    assert make_policy(name, policy_arguments(policy)) == policy
    assert dataclasses.fields(policy) is not None
    with pytest.raises((dataclasses.FrozenInstanceError, AttributeError, TypeError)):
        policy.anything = 1


def test_an_unknown_policy_is_refused_and_the_known_ones_are_named():
    with pytest.raises(InvalidRequest, match=r"'gossip' is unknown; expected one of \['bsp'"):
        make_policy("gossip", {})


def test_arguments_that_a_policy_does_not_take_are_refused():
    with pytest.raises(InvalidRequest, match="'bsp' does not take"):
        make_policy("bsp", {"max_lag": 3})


@pytest.mark.parametrize("policy", [Bsp, "bsp", None])
def test_what_is_no_policy_is_refused(policy):
    with pytest.raises(InvalidRequest, match="sync policy"):
        policy_arguments(policy)
