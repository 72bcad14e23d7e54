"""The bytes of a step over bare TCP: from a trainer process to a server process and back, nothing else."""

import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection

from benchmarks.children import child
from benchmarks.harness import Side, timed
from benchmarks.team import take_turns, team

_TIMEOUT_S = 60


@contextmanager
def socket_floor(*, num_bytes: int) -> Iterator[Mapping[str, Side]]:
    """Runs server and trainer, connected over loopback, for as long as the block lasts.

    Yields one side: the trainer sends `num_bytes`, and then receives as many from the server.
    """
    with child(_serve, num_bytes) as server, team(1, _train, server.receive(), num_bytes) as sides:
        yield {"bare sockets": sides("there and back")}


def _serve(connection: Connection, num_bytes: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(_TIMEOUT_S)
        connection.send(listener.getsockname())
        client, _ = listener.accept()
    buffer = memoryview(bytearray(num_bytes))
    with client:
        _bound_waits(client)
        while receive_into(client, buffer):
            client.sendall(buffer)


def _train(connection: Connection, _rank: int, address: tuple[str, int], num_bytes: int) -> None:
    outgoing, incoming = memoryview(bytearray(num_bytes)), memoryview(bytearray(num_bytes))
    with socket.create_connection(address, timeout=_TIMEOUT_S) as server:
        _bound_waits(server)

        def there_and_back() -> None:
            server.sendall(outgoing)
            if not receive_into(server, incoming):
                raise ConnectionError("the server closed the connection instead of answering")

        take_turns(connection, {"there and back": timed(there_and_back)})


def receive_into(source: socket.socket, buffer: memoryview) -> bool:
    """Fills `buffer`; False if the other side has closed the connection instead."""
    received = 0
    while received < len(buffer):
        count = source.recv_into(buffer[received:], flags=socket.MSG_WAITALL)
        if count == 0:
            return False
        received += count
    return True


def _bound_waits(connected: socket.socket) -> None:
    # The kernel's own timeout: Python's would ask for readiness before every call.
    connected.settimeout(None)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connected.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", _TIMEOUT_S, 0))
