"""What comparisons on MNIST have in common: a run in processes of its own, snapshots of it, and a table."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mnist import DigitsNet, accuracy_on
from mnist_data import Digits, random_shift
from torch import Tensor
from torch.nn.functional import cross_entropy

import pserver

NUM_SNAPSHOTS = 20
#: One run may take this long, in seconds, also on a machine that is busy.
TIMEOUT_S = 900


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The parameters at one moment: seconds since the first step, the round, and bytes that this trainer has sent."""

    seconds: float
    round: int
    sent_bytes: int
    values: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a snapshot is worth: its accuracy on held-out digits."""

    seconds: float
    round: int
    sent_bytes: int
    accuracy: float


def batches(digits: Digits, *, size: int, seed: int, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Shifted random batches without end, other ones on every rank."""
    rng = np.random.default_rng([seed, rank])
    while True:
        batch = digits.subset(torch.from_numpy(rng.integers(len(digits), size=size)))
        yield random_shift(batch.images, rng), batch.labels


def train(
    cluster: pserver.Cluster,
    model: DigitsNet,
    optimizer: pserver.optim.RemoteOptimizer,
    examples: Iterator[tuple[Tensor, Tensor]],
    *,
    num_rounds: int,
    step_s: float = 0.0,
) -> list[Snapshot]:
    """Takes steps of at least `step_s` seconds until so many rounds are decided; snapshots at equal distances.

    The learning rate falls along a cosine over the rounds.
    """
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=num_rounds)
    snapshots: list[Snapshot] = []
    sent_before, start_s = cluster.statistics().sent_bytes, time.monotonic()
    for images, labels in examples:
        begun_s = time.monotonic()
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        time.sleep(max(0.0, begun_s + step_s - time.monotonic()))
        optimizer.step()
        cluster.report(loss=loss.item())
        if optimizer.round >= num_rounds * len(snapshots) / NUM_SNAPSHOTS:
            sent_bytes = cluster.statistics().sent_bytes - sent_before
            values = {name: value.clone() for name, value in model.state_dict().items()}
            snapshots.append(Snapshot(time.monotonic() - start_s, optimizer.round, sent_bytes, values))
        if optimizer.round >= num_rounds:
            return snapshots
        while schedule.last_epoch < optimizer.round:
            schedule.step()
    raise ValueError(f"expected examples for {num_rounds} rounds; they ended after round {optimizer.round}")


def measure(snapshots: Sequence[Snapshot], held_out: Digits) -> list[Measurement]:
    """The accuracy of each snapshot."""
    model = DigitsNet()
    found = []
    for each in snapshots:
        model.load_state_dict(each.values)
        found.append(Measurement(each.seconds, each.round, each.sent_bytes, accuracy_on(model, held_out)))
    return found


def launch(script: str, arguments: Sequence[str], result: Path, *, trainers: int, **environment: str) -> Any:
    """Runs a script that lies beside this one with two servers; what it leaves in `result`, as JSON."""
    command = [sys.executable, "-m", "pserver.cli.main", "launch", "--servers", "2", "--trainers", str(trainers)]
    command += ["--no-live", "--timeout-s", str(TIMEOUT_S), str(Path(__file__).with_name(script)), "--", *arguments]
    subprocess.run(command, check=True, env={**os.environ, **environment})
    return json.loads(result.read_text())


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    lines = [f"| {' | '.join(cells)} |\n" for cells in (header, *rows)]
    return "".join([lines[0], "|---" * len(header) + "|\n", *lines[1:]])
