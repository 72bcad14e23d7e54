import dataclasses

import pytest
import torch
from core_builders import ShardUser, model_spec, tensor_spec
from hypothesis import given
from hypothesis import strategies as st

from pserver.core.models import Model, ModelState
from pserver.errors import InvalidRequest, LayoutMismatch, UnsupportedModel, UnsupportedOptimizer
from pserver.wire.layout import STORED, build_layout

TRAINER, OTHER = 7, 8


def servers(number):
    return [(f"s{index}", f"host{index}:1") for index in range(number)]


def model_on(number=2, **spec):
    return Model(model_spec(**spec), servers(number), 1)


def created(model):
    for server in model.servers:
        model.shard_created(server)
    return model


@given(st.integers(1, 6))
def test_every_number_of_servers_shares_out_the_same_buckets(number):
    model = model_on(number)
    owned = [bucket for each in model.placement for bucket in range(each.first_bucket, each.last_bucket)]
    assert owned == list(range(len(build_layout(model.spec.tensors, model.spec.bucket_bytes).buckets)))
    assert sum(model.shard_bytes.values()) == 192


def test_a_server_that_owns_nothing_has_no_shard():
    model = model_on(5)
    assert len(model.servers) == 3
    assert set(model.servers) < {name for name, _ in servers(5)}
    assert all(each.first_bucket < each.last_bucket for each in model.placement)


def test_the_size_shown_for_a_shard_is_what_its_server_holds():
    """Masters of half precision take twice the bytes that travel."""
    spec = model_spec(tensors=(tensor_spec("h", 64, dtype=torch.float16), tensor_spec("w", 16)))
    assert Model(spec, servers(1), 1).shard_bytes == {"s0": ShardUser(spec).shard.num_bytes}


def test_a_model_is_made_when_every_shard_exists():
    model = model_on()
    model.shard_created("s0")
    model.shard_created("s0")
    assert model.state is ModelState.CREATING
    assert not model.may_initialise(TRAINER)
    model.shard_created("s1")
    assert model.state is ModelState.INITIALISING


def test_one_trainer_at_a_time_initialises():
    model = created(model_on())
    assert model.may_initialise(TRAINER)
    assert not model.may_initialise(OTHER)
    assert model.may_initialise(TRAINER)


def test_a_model_is_ready_when_every_shard_has_the_values_of_the_initialiser():
    model = created(model_on())
    model.may_initialise(TRAINER)
    assert not model.shard_initialised("s0", TRAINER)
    assert not model.shard_initialised("s0", TRAINER)
    assert not model.shard_initialised("s1", OTHER)
    assert model.shard_initialised("s1", TRAINER)
    assert model.state is ModelState.READY
    assert not model.shard_initialised("s1", TRAINER)
    assert not model.may_initialise(TRAINER)


def test_when_the_initialiser_ends_the_next_one_starts_over():
    model = created(model_on())
    model.may_initialise(TRAINER)
    model.shard_initialised("s0", TRAINER)
    model.trainer_ended(OTHER)
    assert not model.may_initialise(OTHER)
    model.trainer_ended(TRAINER)
    assert model.may_initialise(OTHER)
    assert not model.shard_initialised("s0", TRAINER)
    assert not model.shard_initialised("s1", OTHER)
    assert model.state is ModelState.INITIALISING
    assert model.shard_initialised("s0", OTHER)


def test_the_end_of_the_initialiser_does_not_matter_once_the_model_is_ready():
    model = created(model_on(1))
    model.may_initialise(TRAINER)
    model.shard_initialised("s0", TRAINER)
    model.trainer_ended(TRAINER)
    assert model.state is ModelState.READY


def test_the_first_failure_is_kept():
    model = model_on()
    model.fail("disk")
    model.fail("network")
    assert (model.state, model.failure) == (ModelState.FAILED, "disk")


def test_the_same_description_is_accepted():
    model_on().require_same(model_spec())


def test_parameter_order_that_differs_between_workers_is_refused_and_named():
    model = model_on(tensors=(tensor_spec("a", 2), tensor_spec("b", 3)))
    with pytest.raises(LayoutMismatch, match=r"tensor 0: expected 'a' \[2\] float32 group 0, got 'b' \[3\] float32"):
        model.require_same(model_spec(tensors=(tensor_spec("b", 3), tensor_spec("a", 2))))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("optimizer", "Adam"),
        ("optimizer_groups", ({"lr": 0.25},)),
        ("sync_policy", "ssp"),
        ("sync_policy_arguments", {"max_lag": 1}),
        ("bucket_bytes", 128),
        ("world_size", 2),
    ],
)
def test_every_other_difference_is_named(field, value):
    with pytest.raises(LayoutMismatch, match=f"{field}: expected .*, got"):
        model_on().require_same(dataclasses.replace(model_spec(), **{field: value}))


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ({"name": ""}, InvalidRequest, "name must have 1 to 255"),
        ({"name": "n" * 256}, InvalidRequest, "name must have 1 to 255"),
        ({"world_size": 0}, InvalidRequest, "world_size"),
        ({"world_size": (1 << 20) + 1}, InvalidRequest, "world_size"),
        ({"bucket_bytes": 10}, InvalidRequest, "multiple of 64"),
        ({"tensors": (tensor_spec("w", 3, group=1),)}, InvalidRequest, "tensors name 2 groups, but 1 were described"),
        ({"tensors": (tensor_spec("w", 3, group=STORED),)}, UnsupportedModel, "no parameter to train"),
        ({"tensors": (tensor_spec("w", 3, dtype=torch.float8_e5m2),)}, UnsupportedModel, "float8_e5m2"),
        ({"optimizer": "Lion"}, UnsupportedOptimizer, "Lion"),
        ({"optimizer_groups": ()}, UnsupportedOptimizer, "at least one parameter group"),
        ({"optimizer_groups": ({"lr": -1.0},)}, UnsupportedOptimizer, "learning rate"),
        ({"sync_policy": "gossip"}, InvalidRequest, "gossip"),
    ],
)
def test_models_that_cannot_be_distributed_are_refused_before_a_shard_is_made(spec, error, message):
    with pytest.raises(error, match=message):
        model_on(**spec)
