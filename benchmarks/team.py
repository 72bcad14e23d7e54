"""Child processes that take their turns together: the trainers of one side."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection

from benchmarks.children import Child, child, messages
from benchmarks.harness import Side


@contextmanager
def team(
    size: int, target: Callable[..., None], *arguments: object, namespace: str | None = None
) -> Iterator[Callable[[str], Side]]:
    """Runs `target(connection, rank, *arguments)`, which ends in `take_turns`, in `size` child processes.

    Yields, once all are ready, what makes a side of one of the names that they take turns by: all members start
    together, and the slowest one's seconds count.
    """
    with ExitStack() as stack:
        members = [stack.enter_context(child(target, rank, *arguments, namespace=namespace)) for rank in range(size)]
        # All at once: some wait for each other before they end.
        stack.callback(lambda: [member.hang_up() for member in members])
        for member in members:
            member.receive()
        yield lambda name: partial(_take_turn, members, name)


def take_turns(connection: Connection, sides: Mapping[str, Side]) -> None:
    """In a member: says that it is ready, then gives a side its turn for each name that comes; ends with the pipe."""
    connection.send("ready")
    for name in messages(connection):
        connection.send(sides[name]())


def _take_turn(members: Sequence[Child], name: str) -> float:
    for member in members:
        member.send(name)
    return max(member.receive() for member in members)
