"""Processes that start at once: forked from one that has imported everything, and has done nothing else."""

import contextlib
import ctypes
import importlib
import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Sequence
from multiprocessing import forkserver
from pathlib import Path

from pserver.wire import shm

_NUM_LINES_SHOWN = 100
_KILL_S = 10.0
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG

_context = multiprocessing.get_context("forkserver")
forkserver.set_forkserver_preload(["tests.chaos.preloaded"])


class Child:
    """One process; what it says goes to a file.

    Args:
        name: for messages.
        command: module with a `main`, and its arguments.
        log: where its output goes.
        segments: directory of its shared memory.
        network: name of the network namespace that it runs in; "": that of this process.
    """

    def __init__(self, name: str, command: Sequence[str], *, log: Path, segments: Path, network: str = "") -> None:
        self.name = name
        self._log = log
        self._process = _context.Process(target=_run, args=(tuple(command), log, segments, network), daemon=True)
        self._process.start()

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    @property
    def lines(self) -> list[str]:
        """What it has said until now."""
        return self._log.read_text(errors="replace").splitlines() if self._log.exists() else []

    def find(self, pattern: str) -> str | None:
        """The first line in which the pattern is found."""
        return next((line for line in self.lines if re.search(pattern, line)), None)

    def send(self, number: signal.Signals) -> None:
        """Sends it a signal, if it still runs."""
        if self.alive:
            assert self._process.pid is not None
            os.kill(self._process.pid, number)

    def wait(self, timeout_s: float) -> int | None:
        """The exit code, as in `subprocess`; None: it still runs."""
        self._process.join(timeout_s)
        return self._process.exitcode

    def kill(self) -> None:
        """Ends it by SIGKILL, if it still runs; returns once it has ended."""
        self.send(signal.SIGKILL)
        assert self.wait(_KILL_S) is not None, f"{self.name} cannot be killed"

    def transcript(self) -> str:
        """Who it is, how it ended, and its last lines."""
        code = self._process.exitcode
        head = f"{self.name} (pid {self._process.pid}): {'running' if code is None else f'exit code {code}'}"
        return "\n".join([head, *(f"  {line}" for line in self.lines[-_NUM_LINES_SHOWN:])])


def _run(command: Sequence[str], log: Path, segments: Path, network: str) -> None:
    """The life of a child. It ends with the process that it was forked from, and that one with the run."""
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    if network:
        _enter(network)
    shm.DIRECTORY = segments
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    sys.argv = list(command)
    importlib.import_module(command[0]).main()


def _enter(network: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with contextlib.closing(open(f"/run/netns/{network}")) as space:
        if libc.setns(space.fileno(), _NEW_NETWORK) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"network namespace {network}: {os.strerror(number)}")
