import re

import grpc
import pytest

from pserver import errors
from pserver.errors import ERRORS, DeadlineExceeded, InternalError, PserverError, ServerErrors, ServerUnavailable
from pserver.transport.status import from_wire, status_code, to_wire

CLASSES = {
    name: value for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, PserverError)
}
#: The tree of the module's docstring: name -> what it says.
TREE = dict(re.findall(r"^\s*(?:[|`]-- )?(\w+)(?: {2,}(.*))?$", errors.__doc__.partition("\n\n    ")[2], re.MULTILINE))


def raised(cls):
    return cls("two failed", [ServerUnavailable("s0")]) if cls is ServerErrors else cls("expected 3, got 4")


def test_every_class_that_crosses_the_wire_is_exported_once_under_its_own_name():
    assert sorted(cls.__name__ for cls in ERRORS.values()) == sorted(ERRORS)
    assert len(set(ERRORS.values())) == len(ERRORS)
    assert set(ERRORS.values()) == set(CLASSES.values()) - {ServerErrors}


def test_the_tree_in_the_docstring_names_every_class_and_no_other():
    assert set(TREE) == set(CLASSES)
    assert all(TREE[name] for name in TREE if name != "PserverError")


@pytest.mark.parametrize("name", CLASSES)
def test_what_may_be_retried_is_what_the_docstring_says(name):
    assert CLASSES[name].retryable == ("may be retried" in TREE[name])


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_has_a_grpc_status_and_is_caught_as_one_of_ours(name):
    error = raised(CLASSES[name])
    assert isinstance(status_code(error), grpc.StatusCode)
    assert status_code(error) is not grpc.StatusCode.OK
    assert isinstance(error, PserverError)


@pytest.mark.parametrize("name", ERRORS)
def test_every_class_crosses_the_wire_with_its_message(name):
    sent = ERRORS[name]("expected 3, got 4")
    arrived = from_wire(*to_wire(sent))
    assert type(arrived) is type(sent)
    assert str(arrived) == str(sent) == "expected 3, got 4"


def test_several_errors_have_no_class_on_the_wire():
    assert type(from_wire(*to_wire(raised(ServerErrors)))) is InternalError


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_says_what_it_means(name):
    assert CLASSES[name].__doc__
    assert CLASSES[name].__doc__ != PserverError.__doc__ or name == "PserverError"


def test_a_deadline_is_a_timeout_for_python_as_well():
    with pytest.raises(TimeoutError, match="waited 3 s"):
        raise DeadlineExceeded("waited 3 s")


def test_several_errors_are_one_of_ours_and_a_group():
    members = [ServerUnavailable("server s0: no route"), DeadlineExceeded("server s1: slow")]
    error = ServerErrors("2 of 3 servers failed", members)
    assert isinstance(error, PserverError)
    assert isinstance(error, ExceptionGroup)
    assert list(error.exceptions) == members
    assert str(error) == "2 of 3 servers failed; server s0: no route; server s1: slow"


def test_several_errors_are_caught_one_by_one():
    caught = []
    try:
        raise ServerErrors("failed", [ServerUnavailable("s0"), DeadlineExceeded("s1")])
    except* ServerUnavailable as group:
        caught += [str(each) for each in group.exceptions]
    except* TimeoutError as group:
        caught += [str(each) for each in group.exceptions]
    assert caught == ["s0", "s1"]
