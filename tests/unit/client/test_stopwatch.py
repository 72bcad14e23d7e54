"""Time during which something was under way, on a clock that the test sets."""

import pytest

from pserver.client.step_counts import StepCounts
from pserver.client.stopwatch import Stopwatch


class Hand:
    """A clock's hand, moved by the test."""

    def __init__(self) -> None:
        self.at_s = 100.0

    def now_s(self) -> float:
        return self.at_s


@pytest.fixture
def hand() -> Hand:
    return Hand()


@pytest.fixture
def watch(hand: Hand) -> Stopwatch:
    return Stopwatch(hand.now_s)


def test_nothing_has_taken_no_time(watch: Stopwatch, hand: Hand) -> None:
    hand.at_s += 5
    assert watch.seconds == 0.0


def test_what_overlaps_counts_once_and_what_follows_is_added(watch: Stopwatch, hand: Hand) -> None:
    with watch.running():
        hand.at_s += 1
        with watch.running():
            hand.at_s += 2
        hand.at_s += 4
    hand.at_s += 8
    with watch.running():
        hand.at_s += 16
    assert watch.seconds == 1 + 2 + 4 + 16


def test_things_may_end_in_another_order_than_they_began(watch: Stopwatch, hand: Hand) -> None:
    watch.start()
    hand.at_s += 1
    watch.start()
    hand.at_s += 2
    watch.stop()
    hand.at_s += 4
    watch.stop()
    assert watch.seconds == 7


def test_what_is_under_way_counts_until_now(watch: Stopwatch, hand: Hand) -> None:
    watch.start()
    hand.at_s += 3
    assert watch.seconds == 3
    hand.at_s += 3
    assert watch.seconds == 6


def test_a_block_that_raises_is_over(watch: Stopwatch, hand: Hand) -> None:
    def fail() -> None:
        with watch.running():
            hand.at_s += 1
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        fail()
    hand.at_s += 1
    assert watch.seconds == 1


def test_what_is_hidden_is_the_share_of_communication_that_nobody_waited_for(hand: Hand) -> None:
    counts = StepCounts()
    counts.communicating, counts.waiting = Stopwatch(hand.now_s), Stopwatch(hand.now_s)
    assert counts.statistics().hidden_share == 0.0
    with counts.standing_still():
        hand.at_s += 1
    assert counts.statistics().hidden_share == 0.0
    with counts.communicating.running():
        hand.at_s += 2
        with counts.standing_still():
            hand.at_s += 1
    found = counts.statistics()
    assert (found.communication_s, found.waited_s, found.hidden_share) == (4.0, 2.0, 0.5)
