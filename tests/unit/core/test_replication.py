import pytest
from hypothesis import given
from hypothesis import strategies as st

from pserver.core.replication import Entry, Log
from pserver.errors import InternalError


def log_of(*replicas, entries=0):
    """A primary's log that these replicas follow from the start."""
    log = Log()
    for replica in replicas:
        log.admit(replica, 0)
    for number in range(1, entries + 1):
        log.append(f"change {number}", required=True)
    return log


def indices(entries):
    return None if entries is None else [each.index for each in entries]


# The primary's part


def test_entries_are_numbered_from_one_without_gaps():
    log = log_of()
    assert log.position == 0
    assert [log.append(change, required=False) for change in "abc"] == [Entry(1, "a"), Entry(2, "b"), Entry(3, "c")]
    assert log.position == 3


def test_only_what_is_required_must_be_there_before_anything_is_shown():
    log = log_of(7)
    for required in (False, True, False):
        log.append("change", required=required)
    assert (log.required, log.position) == (2, 3)


def test_without_replicas_everything_is_replicated_and_nothing_kept():
    log = log_of(entries=3)
    assert (log.replicated, log.replicas) == (3, frozenset())
    assert log.since(3) == []
    assert log.since(2) is None


def test_an_entry_is_replicated_when_every_replica_has_it():
    log = log_of(7, 8, entries=3)
    log.acknowledge(7, 3)
    assert log.replicated == 0
    log.acknowledge(8, 2)
    assert log.replicated == 2
    assert (log.lag_of(7), log.lag_of(8)) == (0, 1)


def test_acknowledgements_never_go_back_and_those_of_strangers_do_not_count():
    log = log_of(7, entries=3)
    log.acknowledge(7, 2)
    log.acknowledge(7, 1)
    log.acknowledge(99, 0)
    assert (log.replicated, log.replicas) == (2, {7})


def test_entries_are_kept_until_every_replica_has_them():
    log = log_of(7, 8, entries=4)
    log.acknowledge(7, 4)
    assert indices(log.since(0)) == [1, 2, 3, 4]
    log.acknowledge(8, 3)
    assert indices(log.since(3)) == [4]
    assert log.since(2) is None


def test_a_replica_that_counts_no_more_holds_up_nothing():
    log = log_of(7, 8, entries=4)
    log.acknowledge(7, 4)
    log.dismiss(8)
    log.dismiss(8)
    assert (log.replicated, log.replicas) == (4, {7})
    assert log.since(3) is None
    log.dismiss(7)
    assert log.replicated == 4


def test_a_replica_that_is_admitted_later_has_what_came_before():
    log = log_of(7, entries=4)
    log.acknowledge(7, 3)
    log.admit(8, 4)
    assert log.replicated == 3
    log.append("change 5", required=True)
    log.acknowledge(7, 5)
    assert (log.replicated, log.lag_of(8)) == (4, 1)


def test_admitting_again_takes_nothing_back():
    log = log_of(7, entries=4)
    log.acknowledge(7, 3)
    log.admit(7, 0)
    assert log.replicated == 3


def test_what_the_log_does_not_have_is_not_made_up():
    log = log_of(7, entries=2)
    assert log.since(3) is None
    assert log.since(2) == []
    assert indices(log.since(0)) == [1, 2]


# A replica's part


def test_a_replica_stores_entries_in_order_and_once():
    log = Log()
    assert log.store(Entry(1, "a"), released=0)
    assert log.store(Entry(2, "b"), released=0)
    assert not log.store(Entry(1, "a"), released=0)
    assert not log.store(Entry(2, "b"), released=0)
    assert (log.position, log.required) == (2, 2)
    assert indices(log.since(0)) == [1, 2]


def test_a_gap_is_found():
    log = Log()
    log.store(Entry(1, "a"), released=0)
    with pytest.raises(InternalError, match="entry 3 of a log came after entry 1: one is missing"):
        log.store(Entry(3, "c"), released=0)
    assert log.position == 1


def test_a_replica_keeps_what_others_may_lack():
    log = Log()
    for index in range(1, 5):
        log.store(Entry(index, "change"), released=index - 2)
    assert indices(log.since(2)) == [3, 4]
    assert log.since(1) is None


def test_a_replica_that_is_brought_up_begins_in_the_middle():
    log = Log()
    log.store(Entry(1, "old"), released=0)
    log.begin_at(41)
    assert (log.position, log.since(41), log.since(40)) == (41, [], None)
    assert not log.store(Entry(41, "before"), released=0)
    assert log.store(Entry(42, "after"), released=0)
    with pytest.raises(InternalError, match="one is missing"):
        log.store(Entry(44, "later"), released=0)


# From one primary to the next


def test_a_replica_that_is_primary_brings_the_others_what_they_lack():
    primary, longest, other = log_of(7, 8), Log(), Log()
    for number in range(1, 6):
        entry = primary.append(number, required=True)
        longest.store(entry, primary.replicated)
        if number <= 3:
            other.store(entry, primary.replicated)
    longest.admit(8, 0)
    assert longest.replicated == 0
    for entry in longest.since(other.position):
        other.store(entry, longest.replicated)
    longest.acknowledge(8, other.position)
    assert (other.position, longest.replicated) == (5, 5)
    assert longest.append("next", required=True).index == 6
    assert indices(longest.since(5)) == [6]


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("append"), st.booleans()),
            st.tuples(st.just("take"), st.sampled_from((7, 8)), st.integers(1, 4)),
            st.tuples(st.just("acknowledge"), st.sampled_from((7, 8))),
            st.tuples(st.just("dismiss"), st.sampled_from((7, 8))),
        ),
        max_size=40,
    )
)
def test_whoever_lags_can_always_be_brought_what_it_lacks(actions):
    """And each replica has a beginning of what happened, in order; at least what is said to be replicated."""
    log, happened = log_of(7, 8), []
    replicas = {7: Log(), 8: Log()}
    stored = {7: [], 8: []}
    for action, *about in actions:
        if action == "append":
            happened.append(len(happened))
            assert log.append(happened[-1], required=about[0]) == Entry(len(happened), happened[-1])
        elif action == "dismiss":
            log.dismiss(about[0])
        elif about[0] in log.replicas and action == "take":
            number, most = about
            coming = log.since(replicas[number].position)
            assert coming is not None
            for entry in coming[:most]:
                assert replicas[number].store(entry, log.replicated)
                stored[number].append(entry.change)
        elif about[0] in log.replicas:
            log.acknowledge(about[0], replicas[about[0]].position)
        for number in (7, 8):
            assert stored[number] == happened[: replicas[number].position]
        assert all(replicas[number].position >= log.replicated for number in log.replicas)
        assert log.required <= log.position == len(happened)
