"""A server that tells what it has in memory."""

import json
import sys
from pathlib import Path

from tests.cluster.processes import START_S, Child
from tests.waiting import until


class CountedServer(Child):
    """`pserver serve`, in a process that can be asked for counts; see counted_server.py."""

    def __init__(self, name: str, *arguments: str) -> None:
        script = str(Path(__file__).with_name("counted_server.py"))
        super().__init__(name, [sys.executable, script, "serve", "--name", name, *arguments])
        self._num_asked = 0

    def address(self) -> str:
        """Where it listens; waits until it is ready."""
        return self.wait_for(r"^pserver ready ", START_S).split("address=")[1].split()[0]

    def counts(self) -> dict[str, int]:
        """What it has in memory, after a garbage collection."""
        self.say("count")
        line = self.wait_for("^count ", START_S, skip=self._num_asked)
        self._num_asked += 1
        found: dict[str, int] = json.loads(line.removeprefix("count "))
        return found

    def counts_with(self, **expected: int) -> dict[str, int]:
        """The counts, once these are among them: what a server hears over its link, it hears a moment later.

        Raises:
            AssertionError: they are not in time.
        """
        found: dict[str, int] = {}

        def as_expected() -> bool:
            nonlocal found
            found = self.counts()
            return found.items() >= expected.items()

        until(as_expected, lambda: f"{expected}; the counts are {found}")
        return found
