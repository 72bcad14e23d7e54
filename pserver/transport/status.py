"""Errors <-> gRPC status. An error crosses as its status code, its message, and its class name in trailing metadata."""

from urllib.parse import quote

import grpc

from pserver.errors import (
    ERRORS,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    ProtocolMismatch,
    PserverError,
    ServerUnavailable,
)

ERROR_KEY = "pserver-error"
#: Headers have a limit of their own, and carry a message percent-encoded; a longer one is cut.
MAX_ENCODED_BYTES = 6000
_PLAIN = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")

_BY_CODE: dict[str, type[PserverError]] = {
    # Without a class name it is gRPC's own, about a connection that broke in the middle of a write.
    "INTERNAL": ServerUnavailable,
    "UNAVAILABLE": ServerUnavailable,
    "CANCELLED": ServerUnavailable,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "UNIMPLEMENTED": ProtocolMismatch,
    "RESOURCE_EXHAUSTED": InvalidRequest,
    "INVALID_ARGUMENT": InvalidRequest,
}
_REMEDY = {
    "UNAVAILABLE": "check that it runs and that the address is right (`pserver status` shows the cluster)",
    "CANCELLED": "the connection was closed while the call was under way",
    "DEADLINE_EXCEEDED": "it did not answer in time; it may be overloaded, stopped or cut off",
    "UNIMPLEMENTED": "the server speaks another version of the protocol; install the same pserver on both",
}


def status_code(error: PserverError) -> grpc.StatusCode:
    """The gRPC status code that carries an error."""
    code: grpc.StatusCode = grpc.StatusCode[error.status]
    return code


def to_wire(error: PserverError) -> tuple[str, str]:
    """The class name and the message that travel."""
    message = str(error)[:MAX_ENCODED_BYTES]  # encoding a long one takes long
    while (encoded := len(quote(message, safe=_PLAIN))) > MAX_ENCODED_BYTES:
        message = message[: len(message) * MAX_ENCODED_BYTES // encoded]
    return type(error).__name__, message


def from_wire(name: str, message: str) -> PserverError:
    """The error that `to_wire` described."""
    return ERRORS.get(name, InternalError)(message)


def unanswered(address: str, path: str, timeout_s: float) -> DeadlineExceeded:
    """The error of a call that a server did not answer in time."""
    return DeadlineExceeded(
        f"server at {address}: {path} was not answered within {timeout_s:g} s; it may be overloaded, stopped or cut off"
    )


def from_rpc_error(error: grpc.aio.AioRpcError, address: str) -> PserverError:
    """The error that a failed call stands for: the server's own if it raised one, else one about the connection."""
    name = dict(error.trailing_metadata() or ()).get(ERROR_KEY)
    details = error.details() or ""
    if name is not None:
        return from_wire(str(name), details)
    code = error.code().name
    remedy = _REMEDY.get(code, "see the server's log")
    return _BY_CODE.get(code, InternalError)(f"server at {address}: {code}: {details}; {remedy}")
