"""A process that writes values all the time, and processes that read them: what they get is never torn."""

import json
import sys
import time
from pathlib import Path

import pytest

from pserver.wire.shm import why_not
from tests.cluster.processes import SOON_S, START_S, Child, Start

NUM_READERS = 2
SCRIPT = str(Path(__file__).with_name("hammer.py"))


@pytest.mark.skipif(bool(why_not()), reason="this machine cannot share memory")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("duration_s", [2.5, pytest.param(60.0, marks=pytest.mark.slow)])
def test_readers_of_values_that_are_written_all_the_time_get_no_torn_bucket(
    start: Start, duration_s: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor buckets of several rounds, unless they allow it. They go on until each has raced the writer often enough."""
    writer = start(Child, "writer", [sys.executable, SCRIPT, "write", str(NUM_READERS)])
    _, values, *mailboxes = writer.wait_for("^ready ", START_S).split()
    readers = [
        start(Child, f"reader-{number}", [sys.executable, SCRIPT, "read", values, mailbox])
        for number, mailbox in enumerate(mailboxes)
    ]
    for reader in readers:
        reader.wait_for("^raced$", START_S)
    time.sleep(duration_s)  # it decides how much is tried, and nothing else
    for child in (*readers, writer):
        child.say("end")
    found = {reader.name: json.loads(reader.wait_for("^findings ", SOON_S).split(" ", 1)[1]) for reader in readers}
    rounds = int(writer.wait_for("^rounds ", SOON_S).split()[1])
    for child in (*readers, writer):
        assert child.wait() == 0
    with capsys.disabled():
        for name, ways in found.items():
            print(f"\n  {name}, {rounds} rounds: {ways}", end="")
    for ways in found.values():
        for way in ways.values():
            assert (way["torn_buckets"], way["of_other_rounds"]) == (0, 0)
