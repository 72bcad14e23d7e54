"""Two trainers and two servers, each a process: they learn, agree to the bit, and can be watched."""

import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.cluster.processes import PSERVER, SOON_S, START_S, Cluster, Pool, Trainer

NUM_STEPS = 60


def train(trainers: Sequence[Trainer], name: str) -> list[dict[str, Any]]:
    """What each trainer's steps came to; rank 0 registers the model, so that its values are the initial ones."""
    for trainer in trainers:
        trainer.ask("model", name)
    for trainer in trainers:
        trainer.tell("steps", NUM_STEPS)
    replies = [trainer.reply() for trainer in trainers]
    assert [reply.error for reply in replies] == ["", ""]
    return [reply.result for reply in replies]


@pytest.fixture
def trainers(pool: Pool, cluster: Cluster) -> Iterator[list[Trainer]]:
    """Two, in a session; settings come from the environment, as `pserver launch` sets it."""
    with pool.trainers(2) as both:
        for rank, trainer in enumerate(both):
            assert trainer.ask("join", cluster.address, rank, 2, SOON_S) == {"rank": rank, "world_size": 2}
        yield both
        for trainer in both:
            trainer.ask("leave")


def test_trainers_learn_and_agree_to_the_bit_in_every_run(trainers: list[Trainer]) -> None:
    digests = set()
    for name in ("bits", "bits-again"):
        for result in train(trainers, name):
            assert result["round"] == NUM_STEPS
            assert result["losses"][-1] < 0.5 * result["losses"][0]
        digests |= {trainer.ask("digest")["digest"] for trainer in trainers}
    assert len(digests) == 1


def test_initial_values_are_sent_once_however_often_models_are_registered(pool: Pool, cluster: Cluster) -> None:
    """The shards' reports and the trainer's next question race to the coordinator; either may be first."""
    with pool.trainers(1) as (trainer,):
        trainer.join(cluster.address)
        for number in range(40):
            trainer.ask("model", f"registered-{number}")
        trainer.ask("leave")


def test_status_shows_models_shards_and_trainers(trainers: list[Trainer], cluster: Cluster) -> None:
    train(trainers, "watched")
    shown = subprocess.run(
        [*PSERVER, "status", cluster.address],
        check=True,
        capture_output=True,
        text=True,
        timeout=START_S,
        env={**os.environ, "COLUMNS": "200"},  # no cell is wrapped
    )
    tables = re.split(r"^(servers|models|shards|trainers) *$", shown.stdout, flags=re.MULTILINE)
    cells = {
        name: [[cell.strip() for cell in row.split("│")] for row in re.findall(r"^│(.*)│ *$", text, flags=re.MULTILINE)]
        for name, text in zip(tables[1::2], tables[2::2], strict=True)
    }

    assert [row[:3] for row in cells["servers"]] == [
        ["s0", cluster.address, "alive"],
        ["s1", cluster.other.address(), "alive"],
    ]
    (model,) = [row for row in cells["models"] if row[0] == "watched"]
    counts = [str(2 * NUM_STEPS), "0", "mean 0.0, max 0"]
    assert model[1:] == ["ready", "Bsp()", "Adam", str(NUM_STEPS), *counts, "ranks 0, 1"]
    shards = [row for row in cells["shards"] if row[0] == "watched"]
    assert [row[1:3] for row in shards] == [["0", "s0"], ["1", "s1"]]
    for row in shards:
        assert int(row[3]) > 0  # its epoch
        assert re.fullmatch(r"\d+\.\d kB|\d+ B", row[4])
        assert row[5:] == [str(NUM_STEPS), str(NUM_STEPS), "-"]
    assert [row[0] for row in cells["trainers"]] == ["0", "1"]
    for _, trainer_id, step, lease, lag, reported in cells["trainers"]:
        assert int(trainer_id) > 0
        assert re.fullmatch(r"\d\.\d s", lease)
        assert (step, lag) == (str(NUM_STEPS), "0")
        assert reported.startswith("loss ")
