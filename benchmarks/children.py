"""Python functions in child processes: spawned, driven through a pipe, and never left behind."""

import gc
import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.bound import die_with_parent
from benchmarks.namespace import enter_namespace

#: How long a child may take to answer, and to end once its pipe is closed.
ANSWER_DEADLINE_S = 120.0
STOP_DEADLINE_S = 10.0


class Child:
    """The driver's end of a child process. One thread at a time."""

    def __init__(self, name: str, connection: Connection) -> None:
        self._name = name
        self._connection = connection

    def send(self, message: object) -> None:
        """Hands the child its next message; does not wait for it."""
        self._connection.send(message)

    def receive(self) -> Any:
        """Waits for what the child sends next.

        Raises:
            TimeoutError: nothing came within `ANSWER_DEADLINE_S`.
            ChildProcessError: the child ended.
        """
        if not self._connection.poll(ANSWER_DEADLINE_S):
            raise TimeoutError(f"child process {self._name} sent nothing for {ANSWER_DEADLINE_S:.0f} s")
        try:
            return self._connection.recv()
        except EOFError:
            raise ChildProcessError(
                f"child process {self._name} ended while an answer was due; see its traceback on stderr"
            ) from None

    def hang_up(self) -> None:
        """Closes the pipe, which tells the child to end, and does not wait for it; again is no error."""
        self._connection.close()


@contextmanager
def child(target: Callable[..., None], *arguments: object, namespace: str | None = None) -> Iterator[Child]:
    """Runs `target(connection, *arguments)` in a child process for as long as the block lasts.

    Leaving the block closes the pipe, which tells the child to end (see `messages`); one that does not is killed.
    `namespace` is the path of the network namespace that it runs in; None: this process's.
    """
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    name = f"{target.__module__}.{target.__name__}"
    process = context.Process(
        target=_run, args=(os.getpid(), namespace, target, far, arguments), name=name, daemon=True
    )
    process.start()
    far.close()
    try:
        yield Child(name, near)
    finally:
        near.close()
        process.join(STOP_DEADLINE_S)
        process.kill()
        process.join()
        process.close()


def messages(connection: Connection) -> Iterator[Any]:
    """In the child: what the driver sends, until it closes the pipe."""
    while True:
        try:
            yield connection.recv()
        except EOFError:
            return


def _run(
    parent_pid: int,
    namespace: str | None,
    target: Callable[..., None],
    connection: Connection,
    arguments: tuple[object, ...],
) -> None:
    die_with_parent(parent_pid)
    if namespace is not None:
        enter_namespace(namespace)
    try:
        target(connection, *arguments)
    finally:
        # Python would otherwise collect all of torch once more on its way out, which takes a second or two.
        gc.freeze()
