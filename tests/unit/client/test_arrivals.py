"""Buckets that arrive on one thread and are taken on another."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError

import pytest

from pserver.client.arrivals import Arrivals

#: Everything here that is to happen does at once; this ends a test in which it does not.
LIMIT_S = 10.0
#: So long nothing may happen that is to wait; the tests pass all the same if a thread is late by more.
MOMENT_S = 0.05


def took(arrivals: Arrivals, *buckets: int) -> bool:
    """Waits for some buckets; whether they came."""
    with arrivals.taking(set(buckets)) as round_number:
        return round_number is not None


def assert_waits(future: "Future[object]") -> None:
    with pytest.raises(TimeoutError):
        future.result(MOMENT_S)


def test_what_has_arrived_is_taken_at_once() -> None:
    arrivals = Arrivals()
    arrivals.begin({0, 1})
    arrivals.add(0, 5)
    assert took(arrivals, 0)


def test_buckets_are_as_old_as_the_oldest_of_them() -> None:
    arrivals = Arrivals()
    arrivals.begin({0, 1})
    arrivals.add(0, 5)
    arrivals.add(1, 4)
    for buckets, expected in (({0}, 5), ({1}, 4), ({0, 1}, 4)):
        with arrivals.taking(buckets) as round_number:
            assert round_number == expected
    arrivals.begin({1})
    arrivals.add(1, 6)
    with arrivals.taking({0, 1}) as round_number:
        assert round_number == 5


def test_who_takes_waits_for_all_it_wants_and_for_nothing_else() -> None:
    arrivals = Arrivals()
    arrivals.begin({0, 1, 2})
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(took, arrivals, 0, 2)
        arrivals.add(0, 5)
        assert_waits(taking)
        arrivals.add(2, 5)
        assert taking.result(LIMIT_S)


def test_who_takes_what_will_never_arrive_is_told_so_at_the_end() -> None:
    arrivals = Arrivals()
    arrivals.begin({0, 1})
    arrivals.add(0, 5)
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(took, arrivals, 0, 1)
        assert_waits(taking)
        arrivals.end()
        assert not taking.result(LIMIT_S)
    assert took(arrivals, 0), "what had arrived by then is there"


def test_a_call_that_is_repeated_brings_everything_anew() -> None:
    arrivals = Arrivals()
    arrivals.begin({0, 1})
    arrivals.add(0, 5)
    arrivals.begin({0, 1})
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(took, arrivals, 0)
        assert_waits(taking)
        arrivals.add(0, 5)
        assert taking.result(LIMIT_S)


def test_the_shards_of_a_model_begin_one_by_one() -> None:
    arrivals = Arrivals()
    arrivals.begin({0})
    arrivals.add(0, 5)
    arrivals.begin({1})
    assert took(arrivals, 0)


def test_nobody_writes_to_what_is_being_taken() -> None:
    arrivals = Arrivals()
    arrivals.begin({0})
    arrivals.add(0, 5)
    begun = threading.Event()

    def begin_again() -> None:
        begun.set()
        arrivals.begin({0})

    with ThreadPoolExecutor(1) as pool:
        with arrivals.taking({0}) as round_number:
            assert round_number == 5
            again = pool.submit(begin_again)
            assert begun.wait(LIMIT_S)
            assert_waits(again)
        again.result(LIMIT_S)


def test_a_take_that_raises_lets_writers_go_on() -> None:
    arrivals = Arrivals()
    arrivals.add(0, 5)
    with pytest.raises(ValueError, match="x"), arrivals.taking({0}):
        raise ValueError("x")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(arrivals.begin, {0}).result(LIMIT_S)
