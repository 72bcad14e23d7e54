from collections.abc import Callable, Mapping

import pytest

from pserver.types import ClusterStatus, ModelStatus, ServerStatus, ShardStatus, TrainerStatus

MakeStatus = Callable[..., ClusterStatus]


def _make_status(
    *, round: int = 240, sent_bytes: int = 0, reported: tuple[Mapping[str, float], ...] = ({"loss": 0.25},)
) -> ClusterStatus:
    shard = ShardStatus(
        shard=0,
        server="s0",
        epoch=1,
        num_bytes=1_500_000,
        round=round,
        version=round,
        replicas=(),
        num_missing_replicas=0,
        electing=False,
    )
    model = ModelStatus(
        name="mnist",
        state="ready",
        failure="",
        sync_policy="Bsp(backup_workers=1)",
        optimizer="SGD",
        round=round,
        waiting_for_ranks=(0, 1),
        missing_trainers=0,
        num_accepted=2 * round,
        num_rejected=3,
        num_skipped=1,
        staleness={0: round, 2: round},
        shards=(shard,),
    )
    trainers = [
        TrainerStatus(
            trainer_id=70 + rank,
            rank=rank,
            step=round,
            lease_s=9.5,
            lag_rounds=0,
            sent_bytes=sent_bytes,
            received_bytes=2 * sent_bytes,
            reported=figures,
        )
        for rank, figures in enumerate(reported)
    ]
    server = ServerStatus(name="s0", address="127.0.0.1:43211", alive=True, silent_s=0.2)
    return ClusterStatus(servers=(server,), models=(model,), trainers=tuple(trainers))


@pytest.fixture
def make_status() -> MakeStatus:
    """A cluster with one server, one model at `round`, and a trainer for each of `reported`."""
    return _make_status
