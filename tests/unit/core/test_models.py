import dataclasses

import pytest
import torch
from core_builders import ShardUser, commit, model_spec, tensor_spec
from hypothesis import given
from hypothesis import strategies as st

from pserver.core.messages import Committed, ModelSpec
from pserver.core.models import Model, ModelState
from pserver.errors import InvalidRequest, LayoutMismatch, UnsupportedModel, UnsupportedOptimizer
from pserver.wire.layout import STORED, build_layout

TRAINER, OTHER = 7, 8


def servers(number):
    return [f"s{index}" for index in range(number)]


def model_on(number=2, **spec):
    return Model(model_spec(**spec), servers(number), 1)


def created(model):
    for group in model.groups:
        model.shard_created(group)
    return model


@given(st.integers(1, 6))
def test_every_number_of_servers_shares_out_the_same_buckets(number):
    model = model_on(number)
    owned = [bucket for each in model.groups for run in each.runs for bucket in run]
    assert owned == list(range(len(build_layout(model.spec.tensors, model.spec.bucket_bytes).buckets)))
    assert sum(model.shard_bytes) == 192


def test_a_server_that_owns_nothing_has_no_shard():
    model = model_on(5)
    assert len(model.servers) == 3
    assert set(model.servers) < set(servers(5))
    assert all(each.runs for each in model.groups)
    assert [each.shard for each in model.groups] == [0, 1, 2]


def test_the_size_shown_for_a_shard_is_what_its_server_holds():
    """Masters of half precision take twice the bytes that travel."""
    spec = model_spec(tensors=(tensor_spec("h", 64, dtype=torch.float16), tensor_spec("w", 16)))
    assert Model(spec, servers(1), 1).shard_bytes == [ShardUser(spec).shard.num_bytes]


def test_a_model_is_made_when_every_shard_exists():
    model = model_on()
    model.shard_created(model.groups[0])
    model.shard_created(model.groups[0])
    assert model.state is ModelState.CREATING
    assert not model.may_initialise(TRAINER)
    model.shard_created(model.groups[1])
    assert model.state is ModelState.INITIALISING


def test_one_trainer_at_a_time_initialises():
    model = created(model_on())
    assert model.may_initialise(TRAINER)
    assert not model.may_initialise(OTHER)
    assert model.may_initialise(TRAINER)


def test_a_model_is_ready_when_every_shard_has_the_values_of_the_initialiser():
    model = created(model_on())
    model.may_initialise(TRAINER)
    assert not model.shard_initialised(model.groups[0], TRAINER)
    assert not model.shard_initialised(model.groups[0], TRAINER)
    assert not model.shard_initialised(model.groups[1], OTHER)
    assert model.shard_initialised(model.groups[1], TRAINER)
    assert model.state is ModelState.READY
    assert not model.shard_initialised(model.groups[1], TRAINER)
    assert not model.may_initialise(TRAINER)


def test_when_the_initialiser_ends_the_next_one_starts_over():
    model = created(model_on())
    model.may_initialise(TRAINER)
    model.shard_initialised(model.groups[0], TRAINER)
    model.trainer_ended(OTHER)
    assert not model.may_initialise(OTHER)
    model.trainer_ended(TRAINER)
    assert model.may_initialise(OTHER)
    assert not model.shard_initialised(model.groups[0], TRAINER)
    assert not model.shard_initialised(model.groups[1], OTHER)
    assert model.state is ModelState.INITIALISING
    assert model.shard_initialised(model.groups[0], OTHER)


def test_the_end_of_the_initialiser_does_not_matter_once_the_model_is_ready():
    model = created(model_on(1))
    model.may_initialise(TRAINER)
    model.shard_initialised(model.groups[0], TRAINER)
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
        ("buffers", "mean"),
        ("replicas", 1),
    ],
)
def test_every_other_difference_is_named(field, value):
    with pytest.raises(LayoutMismatch, match=f"{field}: expected .*, got"):
        model_on().require_same(dataclasses.replace(model_spec(), **{field: value}))


def test_no_field_of_a_description_may_differ():
    fields = {field.name for field in dataclasses.fields(ModelSpec)}
    for field in fields - {"tensors"}:
        other = dataclasses.replace(model_spec(), **{field: "something else"})
        with pytest.raises(LayoutMismatch, match=f"{field}: expected .*, got something else"):
            model_on().require_same(other)


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ({"name": ""}, InvalidRequest, "name must have 1 to 255"),
        ({"name": "n" * 256}, InvalidRequest, "name must have 1 to 255"),
        ({"world_size": 0}, InvalidRequest, "world_size"),
        ({"world_size": (1 << 20) + 1}, InvalidRequest, "world_size"),
        ({"replicas": -1}, InvalidRequest, r"replicas must be in 0\.\.16, but is -1"),
        ({"replicas": 17}, InvalidRequest, r"replicas must be in 0\.\.16, but is 17"),
        ({"bucket_bytes": 10}, InvalidRequest, "multiple of 64"),
        ({"tensors": (tensor_spec("w", 3, group=1),)}, InvalidRequest, "tensors name 2 groups, but 1 were described"),
        ({"tensors": (tensor_spec("w", 3, group=STORED),)}, UnsupportedModel, "no parameter to train"),
        ({"tensors": (tensor_spec("w", 3, dtype=torch.float8_e5m2),)}, UnsupportedModel, "float8_e5m2"),
        ({"optimizer": "Lion"}, UnsupportedOptimizer, "Lion"),
        ({"optimizer_groups": ()}, UnsupportedOptimizer, "at least one parameter group"),
        ({"optimizer_groups": ({"lr": -1.0},)}, UnsupportedOptimizer, "learning rate"),
        ({"sync_policy": "gossip"}, InvalidRequest, "gossip"),
        ({"sync_policy": "ssp"}, InvalidRequest, "'ssp' does not take"),
        ({"sync_policy": "async", "sync_policy_arguments": {"max_staleness": -1}}, InvalidRequest, "max_staleness"),
        ({"buffers": "highest"}, InvalidRequest, r"buffers must be one of \['lowest', 'mean', 'local'\]"),
    ],
)
def test_models_that_cannot_be_distributed_are_refused_before_a_shard_is_made(spec, error, message):
    with pytest.raises(error, match=message):
        model_on(**spec)


# Another description in a model's place


OTHER_SPEC = model_spec(bucket_bytes=128)


def ready(*trainers, number=2, **spec):
    """A model that these trainers are attached to, with the ranks 0, 1, ...; it has done one round."""
    model = created(model_on(number, **spec))
    model.may_initialise(trainers[0])
    for group in model.groups:
        model.shard_initialised(group, trainers[0])
    for rank, trainer in enumerate(trainers):
        model.rounds.attach(trainer, rank, 0.0)
    for trainer in trainers:
        for group in model.groups:
            committed = Committed(model="m", shard=group.shard, epoch=1, trainer_id=trainer, commit=commit(1))
            model.rounds.committed(committed, 0.0)
    model.rounds.advance(0.0)
    return model


def in_place_of(model, *, number=2):
    spec, model_initialiser = model.proposal
    successor = Model(spec, servers(number), 2, replaced=model)
    successor.initialiser = model_initialiser
    return successor


def test_every_attached_trainer_must_propose_before_a_model_is_replaced():
    model = ready(TRAINER, OTHER)
    assert model.not_proposed == [0, 1]
    assert not model.propose(OTHER, OTHER_SPEC)
    assert not model.propose(OTHER, OTHER_SPEC)
    assert model.not_proposed == [0]
    assert model.propose(TRAINER, OTHER_SPEC)
    assert model.proposal == (OTHER_SPEC, TRAINER)
    assert model.not_proposed == []


def test_the_values_of_the_lowest_rank_count_whoever_proposed_first():
    model = ready(OTHER, TRAINER)
    for trainer in (TRAINER, OTHER):
        model.propose(trainer, OTHER_SPEC)
    assert model.proposal == (OTHER_SPEC, OTHER)


def test_of_those_who_proposed_the_one_with_the_latest_values_counts():
    """Where trainers step one by one, the lowest rank's values may be old."""
    model = ready(TRAINER, OTHER, sync_policy="async")
    for group in model.groups:
        committed = Committed(model="m", shard=group.shard, epoch=1, trainer_id=OTHER, commit=commit(2))
        model.rounds.committed(committed, 0.0)
    model.rounds.advance(0.0)
    for trainer in (TRAINER, OTHER):
        model.propose(trainer, dataclasses.replace(OTHER_SPEC, sync_policy="async"))
    assert model.proposal[1] == OTHER


def test_a_proposal_that_differs_from_another_one_is_refused_and_the_difference_named():
    model = ready(TRAINER, OTHER)
    model.propose(OTHER, OTHER_SPEC)
    with pytest.raises(
        LayoutMismatch, match=r"changed by other trainers in another way; bucket_bytes: expected 128, got 64"
    ):
        model.propose(TRAINER, model_spec())
    assert model.not_proposed == [0]


def test_a_trainer_that_is_not_attached_cannot_propose():
    model = ready(TRAINER)
    with pytest.raises(InvalidRequest, match="trainer 8 is not attached to model 'm'; attach first"):
        model.propose(OTHER, OTHER_SPEC)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "n"),
        ("sync_policy", "async"),
        ("sync_policy_arguments", {"backup_workers": 1}),
        ("world_size", 2),
        ("buffers", "mean"),
        ("replicas", 1),
    ],
)
def test_what_cannot_change_while_a_model_is_trained_is_refused_by_name(field, value):
    model = ready(TRAINER)
    with pytest.raises(InvalidRequest, match=f"{field} cannot be changed from .* to .* while it is trained"):
        model.propose(TRAINER, dataclasses.replace(OTHER_SPEC, **{field: value}))
    assert model.not_proposed == [0]


def test_the_death_of_a_trainer_completes_a_barrier_that_waited_for_it():
    model = ready(TRAINER, OTHER)
    model.propose(OTHER, OTHER_SPEC)
    model.trainer_ended(TRAINER)
    assert model.propose(OTHER, OTHER_SPEC)
    assert model.proposal == (OTHER_SPEC, OTHER)


def test_a_dead_trainer_s_proposal_does_not_count():
    model = ready(TRAINER, OTHER)
    model.propose(TRAINER, dataclasses.replace(OTHER_SPEC, bucket_bytes=192))
    model.trainer_ended(TRAINER)
    assert model.propose(OTHER, OTHER_SPEC)
    assert model.proposal == (OTHER_SPEC, OTHER)


def test_a_new_step_takes_a_proposal_back_and_a_repeated_one_does_not():
    model = ready(TRAINER, OTHER)
    model.propose(TRAINER, OTHER_SPEC)
    model.stepped(TRAINER, 1)
    model.stepped(OTHER, 9)
    assert model.not_proposed == [1]
    model.stepped(TRAINER, 2)
    assert model.not_proposed == [0, 1]


def test_a_successor_goes_on_at_the_same_round_with_the_same_trainers():
    model = ready(TRAINER, OTHER)
    for trainer in (TRAINER, OTHER):
        model.propose(trainer, OTHER_SPEC)
    successor = in_place_of(model, number=1)
    assert (successor.first_round, successor.first_version, successor.rounds.round) == (1, 1, 1)
    assert successor.rounds.attached == {TRAINER, OTHER}
    assert (successor.shard_rounds, successor.versions) == ({0: 1}, {0: 1})
    assert successor.not_proposed == [0, 1]
    assert successor.state is ModelState.CREATING


def test_a_new_model_begins_at_round_zero():
    model = model_on()
    assert (model.first_round, model.first_version) == (0, 0)
    assert not model.deserted


def test_a_successor_takes_the_values_of_the_initialiser_that_was_chosen():
    model = ready(TRAINER, OTHER)
    for trainer in (TRAINER, OTHER):
        model.propose(trainer, OTHER_SPEC)
    successor = created(in_place_of(model))
    assert not successor.may_initialise(OTHER)
    assert successor.may_initialise(TRAINER)


@pytest.mark.parametrize("shards_made", [False, True])
def test_if_the_chosen_initialiser_ends_another_trainer_of_the_old_model_takes_its_place(shards_made):
    model = ready(TRAINER, OTHER)
    for trainer in (TRAINER, OTHER):
        model.propose(trainer, OTHER_SPEC)
    successor = in_place_of(model)
    if shards_made:
        created(successor)
    successor.trainer_ended(TRAINER)
    created(successor)
    assert not successor.may_initialise(99)
    assert successor.may_initialise(OTHER)


def test_a_successor_is_deserted_when_nobody_is_left_who_has_the_values():
    model = ready(TRAINER, OTHER)
    for trainer in (TRAINER, OTHER):
        model.propose(trainer, OTHER_SPEC)
    successor = created(in_place_of(model))
    successor.trainer_ended(TRAINER)
    assert not successor.deserted
    successor.trainer_ended(OTHER)
    assert successor.deserted


def test_a_model_that_is_ready_is_not_deserted_when_all_have_left():
    model = ready(TRAINER)
    model.propose(TRAINER, OTHER_SPEC)
    successor = created(in_place_of(model))
    for group in successor.groups:
        successor.shard_initialised(group, TRAINER)
    successor.trainer_ended(TRAINER)
    assert successor.state is ModelState.READY
    assert not successor.deserted
