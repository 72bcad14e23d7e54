"""Trainers and servers that die by SIGKILL while training goes on."""

import json
import signal
import subprocess
import time
from collections.abc import Sequence

from tests.cluster.processes import PSERVER, SERVER_LEASE_S, START_S, TRAINER_LEASE_S, Cluster, Pool, Server, Trainer

#: On top of a deadline, for a machine that is busy with something else.
SLACK_S = 3.0
TIMEOUT_S = 10.0
LEAVE_S = 6.0


def test_the_others_go_on_when_a_trainer_is_killed(pool: Pool, cluster: Cluster) -> None:
    with pool.trainers(2) as (survivor, killed):
        for rank, trainer in enumerate((survivor, killed)):
            trainer.join(cluster.address, rank=rank, world_size=2, timeout_s=TIMEOUT_S)
            trainer.ask("model", "bereaved")
        survivor.tell("steps", 100)
        killed.train_on("bereaved")
        killed.send(signal.SIGKILL)
        cluster.wait_until(lambda status: len(status.trainers) == 1, TRAINER_LEASE_S + SLACK_S)
        reply = survivor.reply()
        assert not reply.error
        assert reply.result["round"] == 100

        shown = subprocess.run(
            [*PSERVER, "status", cluster.address, "--json"], check=True, capture_output=True, timeout=START_S
        )
        (trainer,) = json.loads(shown.stdout)["trainers"]
        assert (trainer["rank"], trainer["step"], trainer["lag_rounds"]) == (0, 100, 0)
        survivor.ask("leave")


def test_a_killed_server_is_named_by_every_trainer(pool: Pool, cluster: Cluster) -> None:
    """First one that only holds shards, then the one that has the coordinator as well."""
    with pool.trainers(2) as trainers:
        for rank, trainer in enumerate(trainers):
            trainer.join(cluster.address, rank=rank, world_size=2, timeout_s=TIMEOUT_S)
            trainer.tell("model", "on-both")
        for trainer in trainers:
            assert not trainer.reply().error
        for error in errors_after_kill(cluster.other, trainers, "on-both", within_s=SERVER_LEASE_S + SLACK_S):
            assert "server s1" in error
            assert cluster.other.address() in error

        for trainer in trainers:
            trainer.tell("model", "on-the-other")
        for trainer in trainers:
            assert not trainer.reply().error
        for error in errors_after_kill(cluster.coordinator, trainers, "on-the-other", within_s=TIMEOUT_S + SLACK_S):
            assert cluster.address in error

        for trainer in trainers:
            trainer.tell("leave")
            reply = trainer.reply()
            assert not reply.error
            assert reply.seconds < LEAVE_S


def errors_after_kill(server: Server, trainers: Sequence[Trainer], model: str, *, within_s: float) -> list[str]:
    """What each trainer's steps fail with once the server is killed in the middle of them."""
    for trainer in trainers:
        trainer.tell("steps", -1)
    for trainer in trainers:
        trainer.wait_for(f"^{model}: first step done")
    server.send(signal.SIGKILL)
    begin_s = time.monotonic()
    replies = [trainer.reply() for trainer in trainers]
    assert time.monotonic() - begin_s < within_s
    for reply in replies:
        assert reply.error
    return [reply.error for reply in replies]
