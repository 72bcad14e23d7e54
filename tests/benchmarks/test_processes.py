"""Nothing that a benchmark starts outlives it."""

import os
import signal
import sys
from multiprocessing.connection import Connection

import pytest

from benchmarks import server_process as server_process_module
from benchmarks.children import child, messages
from benchmarks.server_process import server_process

_ANNOUNCE = (
    "import os; print(f'pserver ready name=s0 address=127.0.0.1:1 coordinator=h:2 pid={os.getpid()}', flush=True)"
)
_WAIT = "import signal; signal.pause()"
_IGNORE_SIGTERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"


def python(*statements: str) -> list[str]:
    return [sys.executable, "-c", "\n".join(statements)]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def answer_double(connection: Connection) -> None:
    connection.send(os.getpid())
    for number in messages(connection):
        connection.send(number * 2)


def end_at_once(_connection: Connection) -> None:
    pass


def wait_for_ever(connection: Connection) -> None:
    connection.send(os.getpid())
    signal.pause()


@pytest.fixture
def short_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_process_module, "STOP_DEADLINE_S", 0.2)
    monkeypatch.setattr("benchmarks.children.STOP_DEADLINE_S", 0.2)


def test_ready_line_is_read_and_the_process_ends_with_the_block() -> None:
    with server_process(python(_ANNOUNCE, _WAIT)) as ready:
        assert (ready["name"], ready["address"], ready["coordinator"]) == ("s0", "127.0.0.1:1", "h:2")
        assert is_alive(int(ready["pid"]))
    assert not is_alive(int(ready["pid"]))


@pytest.mark.usefixtures("short_stop")
def test_server_that_ignores_sigterm_is_killed() -> None:
    with server_process(python(_IGNORE_SIGTERM, _ANNOUNCE, _WAIT)) as ready:
        pass
    assert not is_alive(int(ready["pid"]))


def test_server_that_fails_at_its_start_is_reported_with_its_output() -> None:
    with pytest.raises(ChildProcessError, match="before it was ready") as raised:
        with server_process(python("raise SystemExit('port taken')")):
            pass
    assert "port taken" in raised.value.__notes__[0]


def test_server_ends_when_the_block_fails() -> None:
    with pytest.raises(RuntimeError, match="step failed"):
        with server_process(python(_ANNOUNCE, _WAIT)) as ready:
            raise RuntimeError("step failed")
    assert not is_alive(int(ready["pid"]))


def test_child_answers_and_ends_when_its_pipe_closes() -> None:
    with child(answer_double) as worker:
        pid = worker.receive()
        worker.send(21)
        assert worker.receive() == 42
    assert not is_alive(pid)


def test_child_that_has_ended_is_reported() -> None:
    with child(end_at_once) as worker, pytest.raises(ChildProcessError, match="end_at_once"):
        worker.receive()


@pytest.mark.usefixtures("short_stop")
def test_child_that_does_not_end_is_killed() -> None:
    with child(wait_for_ever) as worker:
        pid = worker.receive()
    assert not is_alive(pid)
