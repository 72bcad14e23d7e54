import asyncio
import logging
from types import SimpleNamespace

import pytest

from pserver.clock import ManualClock
from pserver.errors import DeadlineExceeded, LayoutMismatch, RankTaken, ServerUnavailable
from pserver.transport import deadline as deadline_module
from pserver.transport.deadline import FIRST_BACKOFF_S, LONGEST_BACKOFF_S, SAY_SO_AFTER_S, Deadline, retry


@pytest.fixture
def clock(monkeypatch):
    """The time that deadlines see; a pause of `retry` moves it on, and lasts as long as it may."""
    clock = ManualClock(1000.0)

    async def sleep(pause_s):
        clock.pauses.append(pause_s)
        clock.advance(pause_s)

    clock.pauses = []
    monkeypatch.setattr(deadline_module, "time", SimpleNamespace(monotonic=clock.now_s))
    clock.sleep = sleep
    monkeypatch.setattr(deadline_module, "random", SimpleNamespace(uniform=lambda low, high: high))
    return clock


class Attempts:
    """Fails with each of the given errors in turn, the last one again and again; None succeeds."""

    def __init__(self, *outcomes, clock=None, lasting_s=0.0):
        self.outcomes = list(outcomes)
        self.remaining = []
        self._clock, self._lasting_s = clock, lasting_s

    async def __call__(self, remaining_s):
        self.remaining.append(remaining_s)
        if self._clock is not None:
            self._clock.advance(self._lasting_s)
        outcome = self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0]
        if outcome is not None:
            raise outcome
        return "done"


@pytest.fixture
def run(clock):
    """Makes attempts, with that clock between two of them."""

    def run(attempts, timeout_s=10.0):
        what = "joining the coordinator at host:1"
        return asyncio.run(retry(attempts, deadline=Deadline(timeout_s), what=what, pause=clock.sleep))

    return run


def test_a_deadline_counts_down_and_stops_at_zero(clock):
    deadline = Deadline(5.0)
    clock.advance(2.0)
    assert (deadline.remaining_s(), deadline.elapsed_s(), deadline.timeout_s) == (3.0, 2.0, 5.0)
    clock.advance(4.0)
    assert (deadline.remaining_s(), deadline.elapsed_s()) == (0.0, 6.0)


def test_an_attempt_that_succeeds_is_made_once_and_told_what_is_left(clock, run):
    attempts = Attempts(None)
    assert run(attempts) == "done"
    assert attempts.remaining == [10.0]
    assert clock.pauses == []


def test_failures_that_may_pass_are_repeated_until_one_succeeds(clock, run):
    attempts = Attempts(ServerUnavailable("a"), RankTaken("b"), None)
    assert run(attempts) == "done"
    assert attempts.remaining == pytest.approx([10.0, 10.0 - clock.pauses[0], 10.0 - sum(clock.pauses)])


@pytest.mark.parametrize("error", [LayoutMismatch("a"), DeadlineExceeded("b"), ValueError("c")], ids=repr)
def test_failures_that_repeating_cannot_mend_are_raised_at_once(clock, error, run):
    attempts = Attempts(error)
    with pytest.raises(type(error)) as raised:
        run(attempts)
    assert raised.value is error
    assert len(attempts.remaining) == 1


def test_pauses_grow_to_their_limit(clock, run):
    with pytest.raises(ServerUnavailable):
        run(Attempts(ServerUnavailable("down")), timeout_s=60.0)
    expected = FIRST_BACKOFF_S
    for pause_s in clock.pauses[:-1]:
        assert pause_s == expected
        expected = min(2 * expected, LONGEST_BACKOFF_S)
    assert clock.pauses[-2] == LONGEST_BACKOFF_S


def test_the_last_pause_ends_at_the_deadline_and_no_attempt_follows(clock, run):
    attempts = Attempts(ServerUnavailable("down"))
    with pytest.raises(ServerUnavailable):
        run(attempts, timeout_s=7.0)
    assert sum(clock.pauses) == pytest.approx(7.0)
    assert len(attempts.remaining) == len(clock.pauses)


def test_an_attempt_that_used_up_the_time_is_the_last(clock, run):
    attempts = Attempts(ServerUnavailable("down"), clock=clock, lasting_s=10.0)
    with pytest.raises(ServerUnavailable):
        run(attempts)
    assert len(attempts.remaining) == 1


@pytest.mark.parametrize(
    ("last", "raised"), [(ServerUnavailable("no route"), ServerUnavailable), (RankTaken("rank 0"), DeadlineExceeded)]
)
def test_at_the_deadline_the_last_failure_is_named(clock, last, raised, run):
    with pytest.raises(raised, match=f"joining the coordinator at host:1: gave up after 3 s; last failure: {last}"):
        run(Attempts(ServerUnavailable("first"), last), timeout_s=3.0)


def test_a_long_wait_is_mentioned_once(clock, caplog, run):
    with caplog.at_level(logging.WARNING), pytest.raises(ServerUnavailable):
        run(Attempts(ServerUnavailable("down")), timeout_s=30.0)
    (record,) = caplog.records
    assert record.getMessage().startswith("joining the coordinator at host:1: still trying")
    assert "down" in record.getMessage()


def test_a_short_wait_is_not_mentioned(clock, caplog, run):
    attempts = Attempts(*[ServerUnavailable("down")] * 3, None)
    with caplog.at_level(logging.WARNING):
        run(attempts)
    assert sum(clock.pauses) < SAY_SO_AFTER_S
    assert caplog.records == []


def test_pauses_are_random_so_that_clients_do_not_return_all_at_once(clock, monkeypatch, run):
    asked = []

    def uniform(low, high):
        asked.append((low, high))
        return low

    monkeypatch.setattr(deadline_module, "random", SimpleNamespace(uniform=uniform))
    run(Attempts(ServerUnavailable("a"), ServerUnavailable("b"), None))
    assert asked == [(0, FIRST_BACKOFF_S), (0, 2 * FIRST_BACKOFF_S)]
