"""Binds a process to its parent: `python -m benchmarks.bound PARENT_PID NAMESPACE PROGRAM ARGUMENT...`.

NAMESPACE is the path of the network namespace to run in, or empty for the parent's.
"""

import ctypes
import os
import signal
import sys

from benchmarks.namespace import enter_namespace

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """The kernel kills this process when the thread that started it ends, however it ends; survives exec. Linux only.

    Raises:
        OSError: the kernel refused.
        SystemExit: the parent had ended before the call.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    if os.getppid() != parent_pid:
        raise SystemExit("the process that started this one has ended")


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    if sys.argv[2]:
        enter_namespace(sys.argv[2])
    os.execvp(sys.argv[3], sys.argv[3:])
