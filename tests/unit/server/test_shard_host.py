"""Shards that a server keeps for a while: whom it answers, and what becomes of those that ask too early or too late."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch

from pserver.core.changes import TrainerGone
from pserver.core.messages import CreateShard, DropShard, LivingTrainers, ModelSpec
from pserver.errors import LayoutMismatch, StaleEpoch, TrainerEnded, UnknownModel
from pserver.server.shard_host import ShardHost
from pserver.transport.changes import Arrived
from pserver.types import PushId
from pserver.wire.layout import TensorSpec
from tests.waiting import run_limited

LIMIT_S = 10.0
SPEC = ModelSpec(
    name="m",
    tensors=(TensorSpec(name="w", shape=(8,), dtype=torch.float32, group=0),),
    bucket_bytes=64,
    optimizer="SGD",
    optimizer_groups=({"lr": 1.0},),
    sync_policy="bsp",
    sync_policy_arguments={},
    world_size=1,
    buffers="lowest",
    replicas=1,
)
FINGERPRINT = SPEC.layout().fingerprint


@asynccontextmanager
async def hosting(*, replica: bool = False) -> AsyncIterator[ShardHost]:
    """A server with shard 2 of a model, epoch 5, or a copy of it; trainers 3 and 4 live."""
    host = ShardHost("s0", shared_memory=False)
    try:
        await host.handle(LivingTrainers(trainer_ids=(3, 4)))
        await host.handle(CreateShard(spec=SPEC, shard=2, epoch=5, runs=(range(1),), replica=replica))
        yield host
    finally:
        await host.close()


async def rest() -> None:
    await asyncio.sleep(0.05)


def test_a_shard_is_found_by_its_model_and_its_number() -> None:
    async def scenario() -> None:
        async with hosting() as host:
            hosted = await host.require("m", 2, 5, FINGERPRINT, 3)
            assert (hosted.model, hosted.number, hosted.epoch) == ("m", 2, 5)
            with pytest.raises(UnknownModel, match="does not hold shard 1 of model 'm'"):
                await host.require("m", 1, 5, FINGERPRINT, 3)
            with pytest.raises(StaleEpoch):
                await host.require("m", 2, 4, FINGERPRINT, 3)

    run_limited(scenario(), LIMIT_S)


def test_trainers_are_not_answered_by_a_replica() -> None:
    async def scenario() -> None:
        async with hosting(replica=True) as host:
            with pytest.raises(StaleEpoch, match="server s0 has a replica of shard 2 of model 'm'; ask its primary"):
                await host.require("m", 2, 5, FINGERPRINT, 3)

    run_limited(scenario(), LIMIT_S)


def test_a_primary_of_a_later_epoch_is_followed_and_those_before_it_no_more() -> None:
    async def scenario() -> None:
        async with hosting(replica=True) as host:
            hosted, first = await host.require_replica("m", 2, 5, FINGERPRINT)
            _, second = await host.require_replica("m", 2, 6, FINGERPRINT)
            assert hosted.epoch == 6
            assert first != second
            with pytest.raises(StaleEpoch, match="hears of it from somebody else"):
                await hosted.redo(first, Arrived(1, 0, 0, TrainerGone(trainer_id=3)))
            await hosted.redo(second, Arrived(1, 0, 0, TrainerGone(trainer_id=3)))
            with pytest.raises(StaleEpoch, match="is of epoch 6, not 5"):
                await host.require_replica("m", 2, 5, FINGERPRINT)

    run_limited(scenario(), LIMIT_S)


def test_a_primary_of_another_layout_is_none_whatever_its_epoch() -> None:
    """Else it would take the place of the one that there is."""

    async def scenario() -> None:
        async with hosting(replica=True) as host:
            with pytest.raises(LayoutMismatch):
                await host.require_replica("m", 2, 1 << 60, FINGERPRINT ^ 1)
            hosted, _ = await host.require_replica("m", 2, 5, FINGERPRINT)
            assert hosted.epoch == 5

    run_limited(scenario(), LIMIT_S)


def test_a_shard_that_is_a_primary_follows_nobody() -> None:
    async def scenario() -> None:
        async with hosting() as host:
            with pytest.raises(StaleEpoch):
                await host.require_replica("m", 2, 9, FINGERPRINT)
            assert (await host.require("m", 2, 5, FINGERPRINT, 3)).epoch == 5

    run_limited(scenario(), LIMIT_S)


def test_whoever_waits_for_a_shard_that_goes_asks_elsewhere() -> None:
    async def scenario() -> None:
        async with hosting() as host:
            hosted = await host.require("m", 2, 5, FINGERPRINT, 3)
            waiting = asyncio.create_task(hosted.reach(7, LIMIT_S))
            await rest()
            await host.handle(DropShard(model="m", shard=2, epoch=5))
            with pytest.raises(StaleEpoch, match="placed anew, replaced or dropped"):
                await waiting

    run_limited(scenario(), LIMIT_S)


def test_a_server_whose_lease_has_ended_refuses_no_trainer_that_lives() -> None:
    """It does not know who does until it has joined again; those who ask meanwhile find their shard elsewhere."""

    async def scenario() -> None:
        async with hosting() as host:
            hosted = await host.require("m", 2, 5, FINGERPRINT, 3)
            waiting = asyncio.create_task(hosted.reach(7, LIMIT_S))
            await rest()
            await host.drop_all()
            with pytest.raises(StaleEpoch, match="its lease has ended, and others have its shards"):
                await waiting
            asking = [asyncio.create_task(host.require("m", 2, 5, FINGERPRINT, each)) for each in (3, 4)]
            await rest()
            assert not any(each.done() for each in asking)
            await host.handle(LivingTrainers(trainer_ids=(4,)))
            with pytest.raises(UnknownModel):
                await asking[1]
            with pytest.raises(TrainerEnded, match="trainer 3 has ended"):
                await asking[0]
            assert await host.reports() == []

    run_limited(scenario(), LIMIT_S)


def test_a_push_that_nobody_knows_is_lost_if_its_trainer_lives_and_else_its_trainer_has_ended() -> None:
    async def scenario() -> None:
        async with hosting() as host:
            hosted = await host.require("m", 2, 5, FINGERPRINT, 3)
            for trainer_id, error in ((3, "PushLost"), (9, "TrainerEnded")):
                with pytest.raises(Exception, match=f"trainer {trainer_id}") as raised:
                    await host.outcome(hosted, PushId(trainer_id, 1, 1), LIMIT_S)
                assert type(raised.value).__name__ == error

    run_limited(scenario(), LIMIT_S)
