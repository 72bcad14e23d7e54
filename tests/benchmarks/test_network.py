"""A link joins two namespaces and nothing else, and leaves nothing behind."""

import socket
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from benchmarks.children import child
from benchmarks.harness import Skip
from benchmarks.network import link


def answer_one_caller(connection: Connection, host: str) -> None:
    with socket.create_server((host, 0)) as listener:
        listener.settimeout(30)
        connection.send(listener.getsockname())
        caller, _ = listener.accept()
        caller.sendall(b"across")
        caller.close()


def call(connection: Connection, address: tuple[str, int]) -> None:
    with socket.create_connection(address, timeout=30) as server:
        connection.send(server.recv(100))


def test_link_is_skipped_with_the_reason_where_its_programs_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    with pytest.raises(Skip, match="ip, tc"):
        with link("10gbit"):
            pass


def test_link_is_skipped_with_the_reason_for_others_than_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(Skip, match="need root"):
        with link("10gbit"):
            pass


def test_link_carries_bytes_between_its_ends_and_is_gone_afterwards() -> None:
    try:
        with link("10gbit") as network:
            host = network.servers.host
            with child(answer_one_caller, host, namespace=network.servers.namespace) as server:
                address = server.receive()
                with child(call, address, namespace=network.trainers.namespace) as caller:
                    assert caller.receive() == b"across"
    except Skip as error:
        pytest.skip(str(error))
    assert not Path(network.servers.namespace).exists()
    assert not Path(network.trainers.namespace).exists()


def test_rate_that_tc_refuses_is_a_reason_to_skip() -> None:
    with pytest.raises(Skip):
        with link("as fast as it gets"):
            pass
