import itertools
from dataclasses import replace

import pytest
import torch
from core_builders import model_spec, tensor_spec

from pserver.core import saved
from pserver.core.coordinator import Coordinator
from pserver.core.messages import ReplicaCaughtUp, SetReplicas, ShardCreated, ShardInitialised
from pserver.errors import ConfigError
from pserver.types import PushId
from pserver.wire.values import pack_value

SPEC = replace(
    model_spec(
        tensors=[tensor_spec("w", 24), tensor_spec("b", 4, dtype=torch.bfloat16)],
        optimizer_groups=[{"lr": 0.5, "betas": (0.9, 0.99)}],
        optimizer="Adam",
        sync_policy="ssp",
        sync_policy_arguments={"max_lag": 3},
    ),
    replicas=1,
)


def coordinator():
    return Coordinator(trainer_lease_s=10.0, server_lease_s=5.0, min_servers=2, first_trainer_id=100, now_s=0.0)


def report(core, server, kind, **about):
    core.report(server, kind(model="m", **about), 0.0)


@pytest.fixture
def busy():
    """A coordinator with two servers, a replicated model that is ready, and a trainer; and what it has kept."""
    core = coordinator()
    for server in ("s0", "s1"):
        core.server_joined(server, f"{server}:1", 7, 0.0, "alike")
    trainer = core.join("nonce", -1, 0.0).trainer_id
    sequence = itertools.count(1)

    def push_id():
        return PushId(trainer, next(sequence), 1)

    assert core.register(push_id(), SPEC) is None
    for server, shard in itertools.product(("s0", "s1"), (0, 1)):
        report(core, server, ShardCreated, shard=shard, epoch=1)
    assert core.register(push_id(), SPEC).initialise
    for shard in (0, 1):
        report(core, f"s{shard}", ShardInitialised, shard=shard, epoch=1, trainer_id=trainer)
    for _, command in core.take_commands():
        if isinstance(command, SetReplicas):
            for each in command.replicas:
                report(core, f"s{command.shard}", ReplicaCaughtUp, shard=command.shard, epoch=1, number=each.number)
    assert not core.register(push_id(), SPEC).initialise
    core.attach(push_id(), "m", 1, 0.0)
    return core, core.take_writes()


def test_a_coordinator_goes_on_with_what_another_one_has_kept(busy):
    before, kept = busy
    after = coordinator()
    after.restore(kept, 50.0)
    assert after.take_writes() == {}
    old, new = before.status(0.0), after.status(50.0)
    assert [replace(each, silent_s=0) for each in new.servers] == [replace(each, silent_s=0) for each in old.servers]
    assert new.models == old.models
    assert new.trainers == old.trainers
    assert new.models[0].shards[0].num_missing_replicas == 0


def test_what_is_kept_by_the_next_one_is_the_same_again(busy):
    _, kept = busy
    after = coordinator()
    after.restore(kept, 50.0)
    after._keep(*kept)
    assert after.take_writes() == kept


def test_ids_and_epochs_go_on(busy):
    before, kept = busy
    after = coordinator()
    after.restore(kept, 50.0)
    assert after.join("another", -1, 50.0).trainer_id == before.join("another", -1, 0.0).trainer_id == 101
    assert after._last_number == before._last_number > 1


def test_only_what_has_changed_is_written(busy):
    core, _ = busy
    assert core.take_writes() == {}
    core.join("another", -1, 0.0)
    assert core.take_writes().keys() == {"counters", "trainers/101"}
    core.leave(PushId(101, 1, 1), 0.0)
    assert core.take_writes()["trainers/101"] is None


def test_an_empty_place_is_a_new_cluster():
    core = coordinator()
    core.restore({}, 0.0)
    assert core.join("nonce", -1, 0.0).trainer_id == 100


@pytest.mark.parametrize("data", [pack_value({"form": 99}), pack_value([1, 2])], ids=["another form", "no map"])
def test_what_another_version_has_kept_is_refused_by_name(data):
    with pytest.raises(ConfigError, match="kept"):
        coordinator().restore({saved.COUNTERS: data}, 0.0)
