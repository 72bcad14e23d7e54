"""Starts processes, streams their output line by line and leaves none of them behind.

Each child leads a session, and so a process group, of its own: what it starts belongs to the group and ends with it.
Three things see to it that nothing is left:

- `Supervisor.__exit__` kills every group that is still there, whatever ended the `with` block.
- The kernel kills a child whose supervisor dies (prctl PR_SET_PDEATHSIG, see prctl(2)); it does not reach what the
  child has started.
- A guard process knows the groups and waits at a pipe that only the supervisor holds open; when the supervisor dies,
  even by SIGKILL, the guard kills every group that is left.

A group is signalled only while its leader has not been reaped, so its number cannot have passed to a stranger. A
process that leaves its group (a daemon that calls setsid) is out of reach.

This file also runs as a script, for the guard and for the first moments of each child. That is why it imports nothing
outside the standard library.
"""

import contextlib
import ctypes
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import IO, Any, Final

#: How many of its last lines a child is remembered by.
NUM_LAST_LINES: Final = 30

_TICK_S: Final = 0.1
_WORKERS_STOP_S: Final = 3.0
_SERVICES_STOP_S: Final = 2.5
_KILL_S: Final = 5.0
_READ_BYTES: Final = 1 << 16  # what a pipe holds: one read empties it
_LINE_END: Final = re.compile(rb"\r\n|\n|\r")
_PR_SET_PDEATHSIG: Final = 1

#: An interpreter that runs this file as a script, and starts fast: isolated, without site packages.
_THIS_SCRIPT: Final = (sys.executable, "-I", "-S", __file__)


@dataclass(slots=True, kw_only=True, eq=False)
class Child:
    """One process of a `Supervisor`.

    `command` is what it is started with again, up to `restarts` times, if a signal ends it. `exit_code` is None while
    it runs and, as in `subprocess`, -N when signal N ended it. `last_lines` are the last `NUM_LAST_LINES` lines that
    it wrote to stdout or stderr.
    """

    name: str
    service: bool
    command: Sequence[str]
    environ: Mapping[str, str] | None
    restarts: int
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    exit_code: int | None = None
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=NUM_LAST_LINES))
    unfinished_line: bytes = b""


class Supervisor:
    """Runs workers, whose end is the end of the run, and services, which must outlive the workers.

    Use it in a `with` block, in the main thread: it takes over SIGINT, SIGTERM and SIGHUP (an ignored SIGHUP, as under
    nohup, stays ignored). Nothing runs in the background: output moves, and ends are noticed, inside `wait`, `drain`
    and `abort`. `on_line(child name, line)` gets each line of output, without its line end.
    """

    def __init__(self, on_line: Callable[[str, str], None], *, grace_s: float = 3.0) -> None:
        self._on_line = on_line
        self._grace_s = grace_s
        self._children: list[Child] = []
        self._failures: list[Child] = []
        self._signals: list[int] = []
        self._stopping = False
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> "Supervisor":
        self._guard = subprocess.Popen(
            [*_THIS_SCRIPT, "guard"],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._selector = selectors.DefaultSelector()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._handlers[number] = signal.signal(number, self._note_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Kills and reaps whatever is still there."""
        for child in self._running(self._children):
            os.killpg(child.process.pid, signal.SIGKILL)
            self._tell_guard(f"-{child.process.pid}")
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(_KILL_S)
            child.output.close()
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait(_KILL_S)
        self._selector.close()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    @property
    def failures(self) -> Sequence[Child]:
        """The children that failed before anything was stopped, in the order in which they ended.

        A failure is an exit code other than 0, an end by a signal, or any end of a service.
        """
        return self._failures

    @property
    def running(self) -> Sequence[Child]:
        """The children that have not ended."""
        return self._running(self._children)

    @property
    def interrupted_by(self) -> int | None:
        """The first of SIGINT, SIGTERM and SIGHUP that came, or None."""
        return self._signals[0] if self._signals else None

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        environ: Mapping[str, str] | None = None,
        service: bool = False,
        restarts: int = 0,
    ) -> Child:
        """Starts one child with stdin closed.

        Args:
            environ: of the child; None: it inherits this process's environment.
            restarts: how often it is started again, as `Child.command` says by then, if a signal ends it.
        """
        # The kernel ties a child's life to the thread that started it; the main thread lives longest.
        process = subprocess.Popen(
            [*_THIS_SCRIPT, "child", str(os.getpid()), *command],
            bufsize=0,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._tell_guard(f"+{process.pid}")
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        child = Child(
            name=name,
            service=service,
            command=command,
            environ=environ,
            restarts=restarts,
            process=process,
            output=process.stdout,
        )
        self._selector.register(child.output, selectors.EVENT_READ, child)
        self._children.append(child)
        return child

    def workers_ended(self) -> bool:
        """Whether no worker runs (any more)."""
        return all(child.service or child.exit_code is not None for child in self._children)

    def wait(self, done: Callable[[], bool], *, timeout_s: float) -> bool:
        """Streams output until `done()`; True if that came first, before a failure, a signal or the time limit.

        After a failure the others have `grace_s` to fail by themselves, so that `failures` shows what they say too.
        """
        self._tick_until(lambda: done() or bool(self._failures or self._signals), timeout_s)
        if self._failures:
            self._tick_until(lambda: self.workers_ended() or bool(self._signals), self._grace_s)
        return done() and not self._failures and not self._signals

    def drain(self, timeout_s: float) -> Sequence[Child]:
        """Ends the services by SIGTERM, and after `timeout_s` by SIGKILL; returns those that did not exit with 0."""
        services = [child for child in self._children if child.service]
        self._stop(services, signal.SIGTERM, timeout_s)
        return [child for child in services if child.exit_code != 0]

    def abort(self) -> None:
        """Ends everything within about 5 s: workers by SIGTERM, then services by SIGINT, the stubborn by SIGKILL.

        Another SIGINT, SIGTERM or SIGHUP to this process cuts the wait short.
        """
        self._stop([child for child in self._children if not child.service], signal.SIGTERM, _WORKERS_STOP_S)
        self._stop([child for child in self._children if child.service], signal.SIGINT, _SERVICES_STOP_S)

    def _stop(self, children: Sequence[Child], number: int, timeout_s: float) -> None:
        self._stopping = True
        for child in self._running(children):
            # Only the leader: its helpers (data loaders, say) would otherwise vanish under it while it ends in order.
            os.kill(child.process.pid, number)
        self._tick_until(lambda: not self._running(children), timeout_s)
        for child in self._running(children):
            os.killpg(child.process.pid, signal.SIGKILL)
        self._tick_until(lambda: not self._running(children), _KILL_S)

    def _tick_until(self, done: Callable[[], bool], timeout_s: float) -> None:
        """Returns when `done()`, when the time is over, or when another signal has come."""
        deadline = time.monotonic() + timeout_s
        num_signals = len(self._signals)
        while not done() and len(self._signals) == num_signals and time.monotonic() < deadline:
            self._tick()

    def _tick(self) -> None:
        for key, _ in self._selector.select(_TICK_S):
            self._read(key.data)
        for child in self._running(self._children):
            if os.waitid(os.P_PID, child.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                self._bury(child)

    def _bury(self, child: Child) -> None:
        """Ends what an ended child has left behind and takes its last output; only then gives up its pid."""
        os.killpg(child.process.pid, signal.SIGKILL)
        self._read(child)
        self._close_output(child)
        self._tell_guard(f"-{child.process.pid}")
        child.exit_code = child.process.wait()
        if self._stopping or not (child.service or child.exit_code != 0):
            return
        if child.exit_code < 0 and child.restarts:
            self._on_line(child.name, f"{describe_exit(child.exit_code)}; it is started again")
            self._children.remove(child)
            self.start(
                child.name,
                child.command,
                environ=child.environ,
                service=child.service,
                restarts=child.restarts - 1,
            )
        else:
            self._failures.append(child)

    def _read(self, child: Child) -> None:
        if child.output.closed:
            return
        try:
            data = os.read(child.output.fileno(), _READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._close_output(child)
            return
        *lines, child.unfinished_line = _LINE_END.split(child.unfinished_line + data)
        if len(child.unfinished_line) > _READ_BYTES:
            lines.append(child.unfinished_line)
            child.unfinished_line = b""
        for line in lines:
            self._emit(child, line)

    def _close_output(self, child: Child) -> None:
        if child.output.closed:
            return
        self._selector.unregister(child.output)
        child.output.close()
        if child.unfinished_line:
            self._emit(child, child.unfinished_line)

    def _emit(self, child: Child, line: bytes) -> None:
        text = line.decode(errors="replace")
        child.last_lines.append(text)
        self._on_line(child.name, text)

    def _tell_guard(self, message: str) -> None:
        assert self._guard.stdin is not None
        # A guard that somebody has killed must not end the run: only the last of three precautions is lost.
        with contextlib.suppress(BrokenPipeError):
            self._guard.stdin.write(f"{message}\n".encode())

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    @staticmethod
    def _running(children: Iterable[Child]) -> list[Child]:
        return [child for child in children if child.exit_code is None]


def describe_exit(exit_code: int | None) -> str:
    """For people: "exit code 3", "signal SIGKILL", or "still running" for None."""
    if exit_code is None:
        return "still running"
    if exit_code >= 0:
        return f"exit code {exit_code}"
    names = {int(number): number.name for number in signal.Signals}
    return f"signal {names.get(-exit_code, -exit_code)}"


def failure_summary(failures: Sequence[Child]) -> str:
    """Several lines that name each failed child, how it ended and what it said last."""
    parts = []
    for index, child in enumerate(failures):
        order = "failed first" if index == 0 else "failed then"
        said = "its last lines:" if child.last_lines else "without any output"
        parts.append(f"{child.name} {order}, {describe_exit(child.exit_code)}, {said}")
        parts.extend(f"    {line}" for line in child.last_lines)
    return "\n".join(parts)


def _become_child(supervisor_pid: int, command: Sequence[str]) -> None:
    """Turns this process into `command`, to be killed when the supervisor dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() == supervisor_pid:  # else it died before the call above, and nothing would tell us any more
        os.execvp(command[0], list(command))


def _guard_groups() -> None:
    """Reads "+group" and "-group" lines from stdin; at its end kills the groups that were added and not taken away."""
    groups: set[int] = set()
    for line in sys.stdin:
        if line[0] == "+":
            groups.add(int(line[1:]))
        else:
            groups.discard(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    if sys.argv[1] == "guard":
        _guard_groups()
    else:
        _become_child(int(sys.argv[2]), sys.argv[3:])
