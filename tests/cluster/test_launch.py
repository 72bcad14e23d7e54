"""`pserver launch` with real servers and a real script."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_S = 90.0

#: Arguments: the number of steps (-1: for ever), and the rank that fails at step 3 (-1: none).
SCRIPT = """
import os
import sys

import torch

import pserver
from pserver.optim import RemoteOptimizer

num_steps, failing_rank = int(sys.argv[1]), int(sys.argv[2])
rank = int(os.environ["PSERVER_RANK"])
print("pid", os.getpid())
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
inputs = torch.randn(32, 4)
targets = inputs.sum(dim=1, keepdim=True)
with pserver.connect() as cluster:
    optimizer = RemoteOptimizer(torch.optim.SGD, model, lr=0.1)
    losses = []
    while len(losses) != num_steps:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if len(losses) == 3:
            print("three steps done")
            if rank == failing_rank:
                raise ValueError("boom")
print("learned" if losses[-1] < 0.1 * losses[0] else f"did not learn: {losses}")
"""


@pytest.fixture
def launch(tmp_path):
    """Starts `pserver launch` with two servers and two trainers of SCRIPT; stdout and stderr come through one pipe."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    started = []

    def launch(num_steps, failing_rank=-1):
        command = [sys.executable, "-m", "pserver.cli.main", "launch", "--servers", "2", "--trainers", "2"]
        process = subprocess.Popen(
            [*command, "--timeout-s", str(LIMIT_S), str(script), "--", str(num_steps), str(failing_rank)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield launch
    for process in started:
        process.kill()
        process.communicate()


def assert_nothing_is_left(output):
    """No server that said it was ready listens any more, and no trainer that told its pid is there."""
    addresses = re.findall(r"pserver ready name=\w+ address=([\d.]+):(\d+)", output)
    pids = re.findall(r"\[t\d\] pid (\d+)", output)
    assert addresses, output
    assert pids, output
    for host, port in addresses:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)), timeout=5.0)
    for pid in pids:
        assert not Path(f"/proc/{pid}").exists(), output


def test_a_run_that_succeeds_exits_with_zero_and_sums_up(launch):
    process = launch(num_steps=40)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output
    assert "[t0] learned" in output
    assert "[t1] learned" in output
    assert re.search(r"\[launch\] \d+ rounds in ", output), output
    assert_nothing_is_left(output)


def test_a_trainer_that_fails_fails_the_run_and_its_traceback_is_shown(launch):
    process = launch(num_steps=-1, failing_rank=1)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1, output
    _, summary = output.split("pserver: error: ")
    assert "t1 failed first, exit code 1" in summary
    assert "Traceback" in summary
    assert "ValueError: boom" in summary
    assert_nothing_is_left(output)


def test_control_c_stops_everything(launch):
    process = launch(num_steps=-1)
    seen = []
    for line in process.stdout:  # bounded by --timeout-s
        seen.append(line)
        if "three steps done" in line:
            break
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=20.0)
    output = "".join(seen) + rest
    assert process.returncode == 130, output
    assert_nothing_is_left(output)
