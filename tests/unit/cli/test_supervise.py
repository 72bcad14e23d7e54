import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pserver.cli import supervise
from pserver.cli.supervise import Supervisor, describe_exit, failure_summary

ROOT = Path(__file__).parents[3]
LIMIT_S = 30.0

#: Opens the FIFO argv[1] for writing, as does what it starts, says so, and stays.
HOLD_WITH_GRANDCHILD = """
import os, signal, subprocess, sys
fd = os.open(sys.argv[1], os.O_WRONLY)
subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], pass_fds=[fd])
print("holding", flush=True)
signal.pause()
"""


class Holders:
    """A FIFO: the processes that have it open for writing are gone when its reading end hangs up."""

    def __init__(self, path):
        self.path = str(path)
        os.mkfifo(path)
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    def gone(self):
        """Whether all holders, of which there has been at least one, end within the limit."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(LIMIT_S * 1000))

    def close(self):
        os.close(self._fd)


@pytest.fixture
def holders(tmp_path):
    fifo = Holders(tmp_path / "holders")
    yield fifo
    fifo.close()


@pytest.fixture
def lines():
    return []


@pytest.fixture
def supervisor(lines):
    with Supervisor(lambda name, line: lines.append((name, line)), grace_s=LIMIT_S) as supervisor:
        yield supervisor


def python(program, *arguments):
    return [sys.executable, "-c", program, *arguments]


def test_a_run_is_done_when_every_worker_has_exited_with_zero(supervisor, lines):
    service = supervisor.start("s0", python("import signal; signal.pause()"), service=True)
    workers = [supervisor.start(f"t{rank}", python(f"print('hello from', {rank})")) for rank in range(2)]
    assert supervisor.wait(supervisor.workers_ended, timeout_s=LIMIT_S)
    assert [worker.exit_code for worker in workers] == [0, 0]
    assert sorted(lines) == [("t0", "hello from 0"), ("t1", "hello from 1")]
    assert list(supervisor.running) == [service]
    assert not supervisor.failures


def test_output_comes_line_by_line_from_both_streams_and_keeps_an_unfinished_end(supervisor, lines):
    program = "import os; os.write(1, b'one\\n\\n10%\\r20%\\r\\n'); os.write(2, b'\\xff and no end')"
    supervisor.start("t0", python(program))
    assert supervisor.wait(supervisor.workers_ended, timeout_s=LIMIT_S)
    assert [line for _, line in lines] == ["one", "", "10%", "20%", "\N{REPLACEMENT CHARACTER} and no end"]


def test_much_output_arrives_whole(supervisor, lines):
    supervisor.start("t0", python("for i in range(100_000): print(i)"))
    assert supervisor.wait(supervisor.workers_ended, timeout_s=LIMIT_S)
    assert [line for _, line in lines] == [str(i) for i in range(100_000)]


def test_a_child_gets_the_environment_that_it_was_given(supervisor, lines):
    supervisor.start("t0", python("import os; print(os.environ['GIVEN'])"), environ={**os.environ, "GIVEN": "yes"})
    assert supervisor.wait(supervisor.workers_ended, timeout_s=LIMIT_S)
    assert lines == [("t0", "yes")]


def test_the_summary_of_a_failure_has_exit_code_and_traceback(supervisor):
    supervisor.start("t0", python("raise ValueError('boom')"))
    assert not supervisor.wait(supervisor.workers_ended, timeout_s=LIMIT_S)
    summary = failure_summary(supervisor.failures)
    assert summary.startswith("t0 failed first, exit code 1, its last lines:")
    assert "Traceback" in summary
    assert "ValueError: boom" in summary


def test_a_summary_is_short_however_much_was_said(supervisor):
    supervisor.start("t0", python("for i in range(1000): print('line', i)\nraise SystemExit(3)"))
    assert not supervisor.wait(supervisor.workers_ended, timeout_s=LIMIT_S)
    summary = failure_summary(supervisor.failures).splitlines()
    assert len(summary) == 1 + supervise.NUM_LAST_LINES
    assert summary[-1].strip() == "line 999"


def test_what_fails_because_of_a_failure_is_reported_behind_it(supervisor, tmp_path):
    fifo = str(tmp_path / "fifo")
    os.mkfifo(fifo)  # each side's open waits for the other side
    supervisor.start("t0", python("import os, sys; os.open(sys.argv[1], os.O_WRONLY); sys.exit(3)", fifo))
    supervisor.start("t1", python("import sys; open(sys.argv[1]).read(); sys.exit(4)", fifo))
    assert not supervisor.wait(supervisor.workers_ended, timeout_s=LIMIT_S)
    assert [(child.name, child.exit_code) for child in supervisor.failures] == [("t0", 3), ("t1", 4)]


def test_those_that_do_not_fail_by_themselves_are_stopped_and_not_blamed(lines):
    with Supervisor(lambda name, line: lines.append((name, line)), grace_s=0.2) as supervisor:
        stuck = supervisor.start("t0", python("import signal; signal.pause()"))
        supervisor.start("t1", python("raise SystemExit(3)"))
        assert not supervisor.wait(supervisor.workers_ended, timeout_s=LIMIT_S)
        supervisor.abort()
        assert stuck.exit_code == -signal.SIGTERM
        assert [child.name for child in supervisor.failures] == ["t1"]


def test_a_service_that_ends_by_itself_is_a_failure_whatever_its_exit_code(supervisor):
    supervisor.start("s0", python("pass"), service=True)
    assert not supervisor.wait(lambda: False, timeout_s=LIMIT_S)
    assert [(child.name, child.exit_code) for child in supervisor.failures] == [("s0", 0)]


DIES_ONCE = """
import os, pathlib, signal, sys
flag = pathlib.Path(sys.argv[1])
if flag.exists():
    print("here again", flush=True)
    signal.pause()
flag.touch()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_service_that_a_signal_ends_is_started_again(supervisor, lines, tmp_path):
    supervisor.start("s0", [*python(DIES_ONCE), str(tmp_path / "flag")], service=True, restarts=1)
    assert supervisor.wait(lambda: ("s0", "here again") in lines, timeout_s=LIMIT_S)
    assert ("s0", "signal SIGKILL; it is started again") in lines
    assert [child.name for child in supervisor.running] == ["s0"]


def test_a_service_is_not_started_more_often_than_it_may(supervisor):
    dies = python("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    supervisor.start("s0", dies, service=True, restarts=2)
    assert not supervisor.wait(lambda: False, timeout_s=LIMIT_S)
    assert [child.restarts for child in supervisor.failures] == [0]


def test_a_service_that_ends_by_itself_is_not_started_again(supervisor):
    supervisor.start("s0", python("raise SystemExit(3)"), service=True, restarts=2)
    assert not supervisor.wait(lambda: False, timeout_s=LIMIT_S)
    assert [child.exit_code for child in supervisor.failures] == [3]


def test_a_death_by_signal_is_named(supervisor):
    supervisor.start("t0", python("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"))
    assert not supervisor.wait(supervisor.workers_ended, timeout_s=LIMIT_S)
    assert failure_summary(supervisor.failures) == "t0 failed first, signal SIGKILL, without any output"


def test_exit_codes_are_described_for_people():
    assert describe_exit(None) == "still running"
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-signal.SIGSEGV) == "signal SIGSEGV"
    assert describe_exit(-40) == "signal 40"


def test_a_wait_ends_with_its_time(supervisor):
    supervisor.start("t0", python("import signal; signal.pause()"))
    assert not supervisor.wait(supervisor.workers_ended, timeout_s=0.2)
    assert not supervisor.failures


def test_services_are_drained_by_sigterm(supervisor, lines):
    end = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('drained')))"
    program = f"import signal, sys; {end}; print('up', flush=True); signal.pause()"
    supervisor.start("s0", python(program), service=True)
    assert supervisor.wait(lambda: bool(lines), timeout_s=LIMIT_S)
    assert supervisor.drain(LIMIT_S) == []
    assert lines == [("s0", "up"), ("s0", "drained")]


def test_a_service_that_does_not_drain_in_time_is_killed(supervisor, lines):
    program = "import signal; signal.signal(15, signal.SIG_IGN); print('up', flush=True)\nwhile True: signal.pause()"
    service = supervisor.start("s0", python(program), service=True)
    assert supervisor.wait(lambda: bool(lines), timeout_s=LIMIT_S)
    assert supervisor.drain(0.2) == [service]
    assert service.exit_code == -signal.SIGKILL


def test_abort_stops_even_those_that_ignore_signals(supervisor, lines, monkeypatch):
    monkeypatch.setattr(supervise, "_WORKERS_STOP_S", 0.2)
    monkeypatch.setattr(supervise, "_SERVICES_STOP_S", 0.2)
    ignore = "import signal; signal.signal(15, signal.SIG_IGN); signal.signal(2, signal.SIG_IGN)"
    program = f"{ignore}; print('up', flush=True)\nwhile True: signal.pause()"
    children = [supervisor.start("s0", python(program), service=True), supervisor.start("t0", python(program))]
    assert supervisor.wait(lambda: len(lines) == 2, timeout_s=LIMIT_S)
    supervisor.abort()
    assert [child.exit_code for child in children] == [-signal.SIGKILL, -signal.SIGKILL]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_wait_and_is_remembered(number):
    before = signal.getsignal(number)
    with Supervisor(lambda name, line: os.kill(os.getpid(), number)) as supervisor:
        supervisor.start("t0", python("import signal; print('up', flush=True); signal.pause()"))
        assert not supervisor.wait(supervisor.workers_ended, timeout_s=LIMIT_S)
        assert supervisor.interrupted_by == number
    assert signal.getsignal(number) == before


def test_under_nohup_a_hangup_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Supervisor(lambda name, line: os.kill(os.getpid(), signal.SIGHUP)) as supervisor:
            supervisor.start("t0", python("print('up')"))
            assert supervisor.wait(supervisor.workers_ended, timeout_s=LIMIT_S)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_a_child_started_ends_with_it(supervisor, holders):
    program = HOLD_WITH_GRANDCHILD.replace("signal.pause()\n", "")
    assert "signal.pause()" in program  # the grandchild stays, its parent does not
    supervisor.start("t0", python(program, holders.path))
    assert supervisor.wait(supervisor.workers_ended, timeout_s=LIMIT_S)
    assert holders.gone()


def test_an_exception_leaves_nothing_behind(holders):
    def fail(name, line):
        raise BrokenPipeError(line)

    def run():
        with Supervisor(fail) as supervisor:
            supervisor.start("t0", python(HOLD_WITH_GRANDCHILD, holders.path))
            supervisor.wait(supervisor.workers_ended, timeout_s=LIMIT_S)

    with pytest.raises(BrokenPipeError, match="holding"):
        run()
    assert holders.gone()


@pytest.mark.parametrize("kill_guard_first", [False, True])
def test_a_supervisor_that_is_killed_leaves_nothing_behind(holders, kill_guard_first):
    hold = "import os, signal, sys; os.open(sys.argv[1], os.O_WRONLY); print('holding', flush=True); signal.pause()"
    launcher = f"""
import os, signal, sys
from pserver.cli.supervise import Supervisor
with Supervisor(lambda name, line: print(name, line, flush=True)) as supervisor:
    if {kill_guard_first}:  # then the kernel still ends the children themselves
        os.kill(supervisor._guard.pid, signal.SIGKILL)
        supervisor._guard.wait()
    for name in ("s0", "t0"):
        supervisor.start(name, [sys.executable, "-c", *sys.argv[1:]])
    supervisor.wait(supervisor.workers_ended, timeout_s={LIMIT_S})
"""
    program = hold if kill_guard_first else HOLD_WITH_GRANDCHILD
    with subprocess.Popen(
        python(launcher, program, holders.path), cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            held = {process.stdout.readline().strip() for _ in range(2)}
        finally:
            process.kill()
    assert held == {"s0 holding", "t0 holding"}
    assert holders.gone()
