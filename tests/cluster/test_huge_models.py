"""A model of one tensor of more than 2 or 4 GiB: registered, stepped and pulled, through shared memory and in messages.

Numbers of bytes and offsets on the way do not fit into 31 or 32 bits. At once there are its parameter, what has come on
the servers, their values, and what is to be sent or has been received. The gradient takes no memory, since its elements
are one.
"""

from pathlib import Path

import pytest
import torch

import pserver
from pserver.client.cluster import Cluster as Session
from pserver.config import TrainerSettings
from tests.cluster.processes import Server, Start

#: Elements after which the initial values repeat: no multiple of a bucket's, so that no two places are alike.
PERIOD = 1_000_003
#: As many periods as make 5 GB, more than 4 GiB, and more than 2 GiB.
SIZES = (1250, 1075, 540)
#: Of the model in all processes together, at most.
COPIES = {"grpc": 5.5, "tcp": 5.1, "shm": 4.1}
#: Of three processes with torch, and for everybody else.
OTHER_BYTES = 10**9
LEASE_S = 120.0
TIMEOUT_S = 600.0


def num_periods(transport: str) -> int:
    """The largest model that this machine has room for now; skips the test if it has for none."""
    (line,) = [each for each in Path("/proc/meminfo").read_text().splitlines() if each.startswith("MemAvailable:")]
    available = int(line.split()[1]) << 10
    needed = [COPIES[transport] * each * PERIOD * 4 + OTHER_BYTES for each in SIZES]
    for periods, num_bytes in zip(SIZES, needed, strict=True):
        if num_bytes < available:
            return periods
    pytest.skip(f"needs {needed[-1] / 1e9:.1f} GB of memory, but {available / 1e9:.1f} GB are available")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("transport", ["grpc", "tcp", "shm"])
def test_a_tensor_of_gigabytes_is_registered_stepped_and_pulled(
    start: Start, transport: str, capsys: pytest.CaptureFixture[str]
) -> None:
    periods = num_periods(transport)
    leases = ("--trainer-lease-s", str(LEASE_S), "--server-lease-s", str(LEASE_S))
    memory = () if transport == "shm" else ("--no-shared-memory",)
    first = start(Server, "s0", "--coordinator", "--min-servers", "2", *leases, *memory)
    second = start(Server, "s1", "--join", first.address(), *leases, *memory)
    second.address()

    pattern = torch.arange(PERIOD, dtype=torch.float32)
    weight = torch.nn.Parameter(torch.empty(periods * PERIOD))
    rows = weight.detach().view(periods, PERIOD)
    rows.copy_(pattern)
    num_bytes = weight.numel() * 4
    assert num_bytes > 1 << 31
    settings = TrainerSettings.resolve(first.address(), rank=0, world_size=1, timeout_s=TIMEOUT_S, transport=transport)
    with Session(settings) as session:
        optimizer = pserver.optim.RemoteOptimizer(
            torch.optim.SGD, [("weight", weight)], lr=1.0, name="huge", cluster=session
        )
        weight.grad = torch.full((1,), 2.0).expand_as(weight)
        optimizer.step()
        assert all(torch.equal(row, pattern - 2) for row in rows)

        rows.zero_()
        assert optimizer._model is not None
        assert optimizer._model._shards.pull_(1, {0: weight}) == 1
        assert all(torch.equal(row, pattern - 2) for row in rows)
        assert session.statistics().num_retries == 0
        session.drop_model("huge")
    with capsys.disabled():
        print(f"\n  {num_bytes / 1e9:.2f} GB by {transport}", end="")
