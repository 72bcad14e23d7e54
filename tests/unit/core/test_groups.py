import pytest

from pserver.core.groups import Replica, ReplicaState, ShardGroup

IN_SYNC, CATCHING_UP, MAKING = ReplicaState.IN_SYNC, ReplicaState.CATCHING_UP, ReplicaState.MAKING


def group_of(**states):
    """A shard whose primary is on s0, and its replicas by server."""
    replicas = {
        server: Replica(number=number, server=server, state=state)
        for number, (server, state) in enumerate(states.items(), start=10)
    }
    return ShardGroup(shard=3, runs=(range(2),), epoch=5, primary="s0", created=True, replicas=replicas)


def test_a_group_without_replicas_has_only_its_primary():
    group = group_of()
    assert (group.members, group.in_sync, group.settling, group.electing) == (["s0"], [], False, False)


def test_only_replicas_in_sync_count():
    group = group_of(s1=IN_SYNC, s2=CATCHING_UP, s3=MAKING)
    assert group.members == ["s0", "s1", "s2", "s3"]
    assert [each.server for each in group.in_sync] == ["s1"]
    assert group.settling
    group.remove("s2")
    group.remove("s3")
    assert not group.settling


def test_replicas_are_found_by_number_as_long_as_they_count():
    group = group_of(s1=IN_SYNC, s2=IN_SYNC)
    assert group.replica(11).server == "s2"
    assert group.remove("s2").number == 11
    assert group.replica(11) is None
    assert group.remove("s2") is None


def test_an_election_is_among_replicas_in_sync_under_another_epoch():
    group = group_of(s1=IN_SYNC, s2=CATCHING_UP, s3=IN_SYNC)
    assert group.begin_election(6)
    assert (group.epoch, group.created, group.electing) == (6, False, True)
    assert group.positions == {"s1": None, "s3": None}
    assert "s2" not in group.members


def test_without_a_replica_in_sync_nobody_goes_on():
    group = group_of(s1=CATCHING_UP)
    assert not group.begin_election(6)
    assert not group.electing
    assert group.elect() is None


def test_the_longest_log_goes_on_once_all_have_said_how_long_theirs_is():
    group = group_of(s1=IN_SYNC, s2=IN_SYNC, s3=IN_SYNC)
    group.begin_election(6)
    for server, position in (("s1", 4), ("s3", 7)):
        group.fenced(server, position)
        assert group.elect() is None
    group.fenced("s2", 6)
    assert group.elect().server == "s3"
    assert group.primary == "s3"
    assert (group.electing, group.members) == (False, ["s3", "s1", "s2"])
    assert group.elect() is None


def test_of_logs_that_are_equally_long_that_of_the_first_server_by_name_goes_on():
    group = group_of(s2=IN_SYNC, s1=IN_SYNC)
    group.begin_election(6)
    for server in ("s2", "s1"):
        group.fenced(server, 0)
    assert group.elect().server == "s1"


@pytest.mark.parametrize("gone_first", [True, False], ids=["before it answers", "after it has answered"])
def test_a_replica_that_is_lost_meanwhile_is_not_waited_for_and_not_elected(gone_first):
    group = group_of(s1=IN_SYNC, s2=IN_SYNC)
    group.begin_election(6)
    if not gone_first:
        group.fenced("s2", 9)
    group.remove("s2")
    group.fenced("s1", 3)
    assert group.elect().server == "s1"
    assert group.members == ["s1"]


def test_when_the_last_one_is_lost_as_well_nobody_is_elected():
    group = group_of(s1=IN_SYNC)
    group.begin_election(6)
    group.remove("s1")
    assert not group.electing
    assert group.elect() is None


def test_answers_of_others_do_not_count():
    group = group_of(s1=IN_SYNC)
    group.begin_election(6)
    group.fenced("s9", 100)
    group.fenced("s0", 100)
    assert group.elect() is None
    assert group.positions == {"s1": None}
    group.fenced("s1", 0)
    group.fenced("s1", 2)
    assert group.elect().server == "s1"
