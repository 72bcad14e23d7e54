import grpc
import pytest

from pserver import errors
from pserver.errors import ERRORS, InternalError, LayoutMismatch, PserverError, ServerErrors
from pserver.transport import status
from pserver.transport.status import ERROR_KEY, MAX_ENCODED_BYTES, from_rpc_error, from_wire, status_code, to_wire

#: grpcio refuses a message whose headers are larger; some room is left for the other headers.
HEADER_LIMIT_BYTES = 16384 - 1024


def rpc_error(code, details="", trailing=()):
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details)


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_of_a_server_arrives_with_class_and_message(name):
    raised = ERRORS[name]("expected 3, got 4; do this")
    code = status_code(raised)
    assert code.name == raised.status
    sent_name, sent_message = to_wire(raised)
    arrived = from_rpc_error(rpc_error(code, sent_message, [(ERROR_KEY, sent_name)]), "host:1")
    assert type(arrived) is ERRORS[name]
    assert str(arrived) == "expected 3, got 4; do this"


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
def test_every_failure_of_the_connection_becomes_an_error_that_names_the_server(code):
    arrived = from_rpc_error(rpc_error(code, "details of it"), "host:1")
    assert isinstance(arrived, PserverError)
    for part in ("host:1", code.name, "details of it"):
        assert part in str(arrived)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("UNAVAILABLE", "ServerUnavailable"),
        ("CANCELLED", "ServerUnavailable"),
        ("DEADLINE_EXCEEDED", "DeadlineExceeded"),
        ("UNIMPLEMENTED", "ProtocolMismatch"),
        ("RESOURCE_EXHAUSTED", "InvalidRequest"),
        ("UNKNOWN", "InternalError"),
    ],
)
def test_failures_of_the_connection_have_the_class_that_says_what_to_do(code, error):
    assert type(from_rpc_error(rpc_error(grpc.StatusCode[code]), "host:1")) is ERRORS[error]


def test_a_broken_connection_may_be_retried_and_a_refused_message_may_not():
    assert from_rpc_error(rpc_error(grpc.StatusCode.UNAVAILABLE), "host:1").retryable
    assert not from_rpc_error(rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED), "host:1").retryable


def test_a_failure_without_any_detail_is_no_failure_of_its_own():
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, None, None, None)
    assert "host:1" in str(from_rpc_error(error, "host:1"))


@pytest.mark.parametrize("name", ["NoSuchError", "", "ServerErrors", "object"])
def test_a_class_that_does_not_cross_the_wire_arrives_as_an_internal_error(name):
    arrived = from_wire(name, "text")
    assert type(arrived) is InternalError
    assert str(arrived) == "text"


def test_several_errors_cross_as_the_text_of_all():
    both = ServerErrors("2 servers failed", [LayoutMismatch("s0: b"), errors.StaleEpoch("s1: c")])
    assert str(from_wire(*to_wire(both))) == "2 servers failed; s0: b; s1: c"


def test_a_long_message_is_cut():
    _, message = to_wire(LayoutMismatch("x" * 10_000))
    assert message == "x" * MAX_ENCODED_BYTES


@pytest.mark.parametrize("character", ["x", "\n", "%", "\N{LATIN SMALL LETTER E WITH ACUTE}", "\N{ROCKET}"], ids=ascii)
def test_a_long_message_in_any_script_fits_into_the_headers(character):
    """A header carries printable ASCII as it is and every other byte as three characters, for example %0A."""
    _, message = to_wire(LayoutMismatch(character * 10_000))
    encoded = sum(1 if 0x20 <= byte <= 0x7E and byte != 0x25 else 3 for byte in message.encode())
    assert 1000 <= encoded <= HEADER_LIMIT_BYTES


def test_every_remedy_is_for_a_code_that_grpc_has():
    assert {*status._BY_CODE, *status._REMEDY} <= {code.name for code in grpc.StatusCode}
