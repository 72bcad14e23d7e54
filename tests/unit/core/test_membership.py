from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pserver.core import membership as module
from pserver.core.membership import MAX_NONCE_LENGTH, MAX_RANK, Membership, check_figures
from pserver.errors import InvalidRequest, PserverError, RankTaken, TrainerEnded


@pytest.fixture
def members():
    return Membership(lease_s=10.0, first_id=100)


def test_ids_start_where_the_last_coordinator_ended_and_grow(members):
    assert [members.join(nonce, -1, 0.0).trainer_id for nonce in "abc"] == [100, 101, 102]


def test_a_nonce_that_joins_twice_gets_the_same_id_and_a_longer_lease(members):
    first = members.join("a", 3, 0.0)
    again = members.join("a", 3, 4.0)
    assert (again.trainer_id, again.rank, again.lease_ends_s) == (first.trainer_id, 3, 14.0)
    assert len(members.members) == 1


def test_a_nonce_whose_lease_has_ended_does_not_come_back(members):
    members.end(members.join("a", 0, 0.0).trainer_id)
    with pytest.raises(TrainerEnded, match="connect again"):
        members.join("a", 0, 1.0)


def test_a_rank_that_a_living_trainer_holds_is_refused_and_named(members):
    members.join("a", 3, 0.0)
    with pytest.raises(RankTaken, match=r"rank 3 belongs to trainer 100, whose lease runs for another 7\.0 s"):
        members.join("b", 3, 3.0)


def test_a_rank_is_free_again_when_the_lease_has_ended(members):
    members.end(members.join("a", 3, 0.0).trainer_id)
    assert members.join("b", 3, 1.0).rank == 3


def test_without_a_rank_the_lowest_free_one_is_taken(members):
    members.join("a", 0, 0.0)
    members.join("c", 2, 0.0)
    assert members.join("b", -1, 0.0).rank == 1
    assert members.join("d", -1, 0.0).rank == 3


@pytest.mark.parametrize(("nonce", "rank"), [("", 0), ("n" * (MAX_NONCE_LENGTH + 1), 0), ("a", -2), ("a", MAX_RANK)])
def test_requests_without_a_reasonable_nonce_or_with_an_absurd_rank_are_refused(members, nonce, rank):
    with pytest.raises(InvalidRequest):
        members.join(nonce, rank, 0.0)


def test_the_number_of_living_trainers_is_bounded(members, monkeypatch):
    monkeypatch.setattr(module, "MAX_TRAINERS", 2)
    first = members.join("a", -1, 0.0)
    members.join("b", -1, 0.0)
    with pytest.raises(InvalidRequest, match="2 trainers have joined"):
        members.join("c", -1, 0.0)
    assert members.join("a", -1, 0.0) is first
    members.end(first.trainer_id)
    members.join("c", -1, 0.0)


def test_of_trainers_that_have_ended_the_latest_nonces_are_remembered(members, monkeypatch):
    monkeypatch.setattr(module, "MAX_ENDED_NONCES", 3)
    living = members.join("living", -1, 0.0)
    for number in range(50):
        members.end(members.join(f"nonce {number}", -1, 0.0).trainer_id)
    assert members.join("living", -1, 0.0) is living
    with pytest.raises(TrainerEnded):
        members.join("nonce 49", -1, 0.0)
    assert members.join("nonce 0", -1, 0.0).trainer_id > 100 + 50


def test_figures_that_are_too_much_to_keep_are_refused():
    check_figures({"loss": float("nan"), "x" * module.MAX_FIGURE_NAME_LENGTH: 1.0}, 0, 5)
    for reported in (
        {"": 1.0},
        {"x" * (module.MAX_FIGURE_NAME_LENGTH + 1): 1.0},
        {str(number): 1.0 for number in range(module.MAX_FIGURES + 1)},
    ):
        with pytest.raises(InvalidRequest, match="figure"):
            check_figures(reported)
    for counts in ((-1, 0), (0, -1)):
        with pytest.raises(InvalidRequest, match="must not be negative"):
            check_figures({}, *counts)


def test_renewing_moves_the_end_of_the_lease(members):
    trainer_id = members.join("a", 0, 0.0).trainer_id
    assert members.renew(trainer_id, 9.0).lease_ends_s == 19.0
    assert members.overdue(18.9) == []
    assert members.overdue(19.0) == [trainer_id]


def test_an_ended_id_is_refused_for_ever(members):
    trainer_id = members.join("a", 0, 0.0).trainer_id
    assert members.end(trainer_id)
    assert not members.end(trainer_id)
    for call in (members.require, lambda each: members.renew(each, 1.0)):
        with pytest.raises(TrainerEnded, match=f"trainer {trainer_id} has ended"):
            call(trainer_id)
    assert members.members == ()


@pytest.mark.parametrize("trainer_id", [5, 99, 101, -1])
def test_an_id_that_was_never_given_out_is_another_error(members, trainer_id):
    members.end(members.join("a", 0, 0.0).trainer_id)
    with pytest.raises(InvalidRequest, match=f"trainer {trainer_id} is unknown"):
        members.require(trainer_id)


@given(
    st.lists(st.tuples(st.sampled_from(["join", "end", "renew"]), st.integers(0, 9), st.integers(-1, 3)), max_size=40)
)
def test_ids_are_never_reused_and_ranks_of_the_living_differ(actions):
    members = Membership(lease_s=10.0, first_id=1)
    given_out: dict[int, str] = {}
    ended: set[int] = set()
    for action, number, rank in actions:
        nonce = f"nonce {number}"
        with suppress(PserverError):
            if action == "join":
                member = members.join(nonce, rank, 0.0)
                assert given_out.setdefault(member.trainer_id, nonce) == nonce
            elif action == "end":
                if members.end(number):
                    ended.add(number)
            else:
                members.renew(number, 1.0)
        ranks = [member.rank for member in members.members]
        assert len(set(ranks)) == len(ranks)
        assert not ended & {member.trainer_id for member in members.members}
        for trainer_id in ended:
            with pytest.raises(TrainerEnded):
                members.require(trainer_id)
