"""One bare grpcio unary call: the least that a request and its reply cost in Python."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection

import grpc

from benchmarks.children import child, messages

MESSAGE_BYTES = 100

_SERVICE = "benchmarks.Echo"
_METHOD = "Call"


@contextmanager
def grpc_call() -> Iterator[Callable[[], bytes]]:
    """Runs an echo server in a child process for as long as the block lasts; yields a function that calls it once.

    Client and server are synchronous, nothing is encoded, and the connection is open before the block starts.
    """
    with child(_serve) as server:
        address = server.receive()
        with grpc.insecure_channel(address) as channel:
            call = channel.unary_unary(f"/{_SERVICE}/{_METHOD}")
            message = bytes(MESSAGE_BYTES)
            call(message, wait_for_ready=True, timeout=60)
            yield lambda: call(message)


def _serve(connection: Connection) -> None:
    handler = grpc.unary_unary_rpc_method_handler(lambda request, _context: request)
    server = grpc.server(ThreadPoolExecutor(max_workers=2))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    connection.send(f"127.0.0.1:{port}")
    for message in messages(connection):
        raise ValueError(f"the echo server takes no messages, but got {message!r}")
    server.stop(grace=1.0).wait()
