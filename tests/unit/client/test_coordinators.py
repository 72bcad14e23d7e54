from pserver.client.coordinators import Coordinators


def test_the_first_is_asked_until_it_fails_and_then_the_next_in_turn():
    coordinators = Coordinators(["a:1", "b:1", "c:1"])
    assert coordinators.current == "a:1"
    coordinators.failed("a:1")
    assert coordinators.current == "b:1"
    coordinators.failed("b:1")
    coordinators.failed("c:1")
    assert coordinators.current == "a:1"


def test_a_late_failure_of_one_that_is_not_asked_any_more_changes_nothing():
    coordinators = Coordinators(["a:1", "b:1"])
    coordinators.failed("a:1")
    coordinators.failed("a:1")
    assert coordinators.current == "b:1"


def test_one_alone_is_asked_again():
    coordinators = Coordinators(["a:1"])
    coordinators.failed("a:1")
    assert coordinators.current == "a:1"
