"""One server process, from its start to its ready line to its end."""

import os
import queue
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

READY_PREFIX = "pserver ready "
READY_DEADLINE_S = 60.0
# Longer than a server waits by default for work under way.
STOP_DEADLINE_S = 20.0

#: How many of its last lines an error shows.
_LINES_KEPT = 40


@contextmanager
def server_process(command: Sequence[str], *, namespace: str | None = None) -> Iterator[Mapping[str, str]]:
    """Runs `command` for as long as the block lasts; yields the fields of its ready line, {"name": "s0", ...}.

    They have its "pid" among them. `namespace` is the path of the network namespace that it runs in; None: this one's.
    Leaving the block sends SIGTERM and, after `STOP_DEADLINE_S`, SIGKILL; the process also dies with this one. An
    error that leaves the block carries the last lines that the process wrote.

    Raises:
        ChildProcessError: it ended before it was ready.
        TimeoutError: it was not ready within `READY_DEADLINE_S`.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.bound", str(os.getpid()), namespace or "", *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    output = _Output(process)
    try:
        yield {"pid": str(process.pid), **output.wait_until_ready()}
    except BaseException as error:
        error.add_note(f"the last lines of {' '.join(command)}:\n{output.tail()}")
        raise
    finally:
        _stop(process)
        output.close()


class _Output:
    """Reads all that a process writes, so that it never blocks on a full pipe."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._lines: deque[str] = deque(maxlen=_LINES_KEPT)
        self._ready: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read, name="server-output", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line)
            if line.startswith(READY_PREFIX):
                self._ready.put(line)
        self._ready.put(None)

    def wait_until_ready(self) -> Mapping[str, str]:
        try:
            line = self._ready.get(timeout=READY_DEADLINE_S)
        except queue.Empty:
            raise TimeoutError(f"the server was not ready within {READY_DEADLINE_S:.0f} s") from None
        if line is None:
            raise ChildProcessError("the server ended before it was ready")
        return dict(field.split("=", 1) for field in line.removeprefix(READY_PREFIX).split())

    def tail(self) -> str:
        return "".join(tuple(self._lines))

    def close(self) -> None:
        """Call once the process has ended."""
        self._thread.join()
        assert self._process.stdout is not None
        self._process.stdout.close()


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(STOP_DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
