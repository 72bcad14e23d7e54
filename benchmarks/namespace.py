"""Linux network namespaces; Python has these calls from 3.12 on only."""

import ctypes
import os

_CLONE_NEWNET = 0x40000000


def enter_namespace(path: str) -> None:
    """Moves this thread, and threads and processes that it starts from now on, into the network namespace at `path`.

    Raises:
        OSError: there is none, or this process may not.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _call("setns", descriptor, _CLONE_NEWNET)
    finally:
        os.close(descriptor)


def make_namespace() -> str:
    """Moves this thread, as `enter_namespace` does, into a new network namespace; returns its path.

    The namespace has no name: with the last process in it, it is gone, and so is every device in it.

    Raises:
        OSError: this process may not.
    """
    _call("unshare", _CLONE_NEWNET)
    return f"/proc/{os.getpid()}/ns/net"


def _call(function: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, function)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")
