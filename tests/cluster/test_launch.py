"""`pserver launch` with real servers and real scripts: the README's, one that fails, one that is interrupted, MNIST."""

import json
import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.processes import PSERVER, ROOT, START_S, Child, Start

LIMIT_S = 90.0
Launch = Callable[..., Child]
WriteScript = Callable[[str], Path]
README = ROOT / "README.md"

#: Its argument is the rank that fails; -1: none, and all wait for ever.
WAITS = """
import os
import signal
import sys
import pserver

print("pid", os.getpid())
with pserver.connect() as cluster:
    if cluster.rank == int(sys.argv[1]):
        raise ValueError("boom")
    print("connected")
    signal.pause()
"""


@pytest.fixture
def launch(start: Start) -> Launch:
    """Starts `pserver launch`; lines of all its children come on its stdout."""

    def launch(script: Path, *arguments: str, servers: int, trainers: int, timeout_s: float = LIMIT_S) -> Child:
        numbers = ("--servers", str(servers), "--trainers", str(trainers), "--timeout-s", str(timeout_s))
        return start(Child, "launch", [*PSERVER, "launch", *numbers, str(script), "--", *arguments])

    return launch


@pytest.fixture
def script(tmp_path: Path) -> WriteScript:
    """Writes a training script."""

    def script(text: str) -> Path:
        path = tmp_path / "train.py"
        path.write_text(text)
        return path

    return script


def assert_nothing_is_left(process: Child) -> None:
    """No server that said it was ready listens any more, and no trainer that told its pid is there."""
    output = "\n".join(process.stdout)
    addresses = re.findall(r"pserver ready name=\w+ address=([\d.]+):(\d+)", output)
    assert addresses
    for host, port in addresses:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)), timeout=5.0)
    for pid in re.findall(r"\[t\d\] pid (\d+)", output):
        assert not Path(f"/proc/{pid}").exists()


@pytest.mark.skipif(not README.exists(), reason="there is no README.md")
def test_script_of_the_readme_runs_to_its_end(launch: Launch, script: WriteScript) -> None:
    first_block = re.search(r"^```python\n(.*?)^```", README.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert first_block, "README.md has no block of Python"
    process = launch(script(first_block[1]), servers=1, trainers=2)
    assert process.wait(LIMIT_S) == 0
    for rank in (0, 1):
        process.wait_for(rf"^\[t{rank}\] \S")
        assert not [line for line in process.stdout if line.startswith(f"[t{rank}] Traceback")]
    rounds = process.wait_for(r"^\[launch\] \d+ rounds in ")
    assert int(rounds.split()[1]) > 0
    assert_nothing_is_left(process)


def test_a_trainer_that_fails_fails_the_run_and_its_traceback_is_shown(launch: Launch, script: WriteScript) -> None:
    process = launch(script(WAITS), "1", servers=1, trainers=2)
    assert process.wait(LIMIT_S) == 1
    _, summary = process.stderr.split("pserver: error: ")
    assert "t1 failed first, exit code 1" in summary
    assert "Traceback" in summary
    assert "ValueError: boom" in summary
    assert_nothing_is_left(process)


def test_control_c_stops_everything(launch: Launch, script: WriteScript) -> None:
    process = launch(script(WAITS), "-1", servers=1, trainers=1)
    process.wait_for("connected", LIMIT_S)
    process.send(signal.SIGINT)
    assert process.wait(20.0) == 130
    assert_nothing_is_left(process)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_mnist_worker_learns_and_leaves_its_results(launch: Launch, tmp_path: Path) -> None:
    out = tmp_path / "results"
    arguments = ("--epochs", "3", "--out", str(out), "--cache-dir", str(tmp_path / "cache"))
    process = launch(ROOT / "workers" / "mnist.py", *arguments, servers=2, trainers=2, timeout_s=240.0)
    assert process.wait(240.0 + START_S) == 0
    accuracy = process.wait_for(r"^\[t0\] held-out accuracy ")
    assert float(accuracy.split()[3]) > 80.0
    assert {path.name for path in out.iterdir()} >= {"curves.png", "model.safetensors", "summary.json"}
    assert list(out.glob("events.out.tfevents.*"))
    assert json.loads((out / "summary.json").read_text())["world_size"] == 2
    assert_nothing_is_left(process)
