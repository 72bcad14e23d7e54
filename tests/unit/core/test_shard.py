import pytest
import torch
from core_builders import OPTIONS, ShardUser, commit, model_spec, push_id, tensor_spec

from pserver.core.messages import Applied, Committed, Contribution, Decision, ShardCreated, ShardInitialised
from pserver.core.shard import Done, Pending
from pserver.core.staging import Staging
from pserver.errors import (
    InternalError,
    InvalidRequest,
    LayoutMismatch,
    ModelFailed,
    StaleEpoch,
    StalePush,
    UnknownContext,
)
from pserver.types import StepResult
from pserver.wire.layout import STORED

W = torch.arange(24.0)
ONE = torch.ones(24)
SPEC = model_spec()  # SGD with lr 0.5: a gradient of 1 takes 0.5 off
COMMITTED = Committed(model="m", epoch=1, trainer_id=1, step=1, samples=1, options=OPTIONS)


@pytest.fixture
def user():
    """A ready shard that owns the whole model: w = 0, 1, ... 23 and b = 0."""
    return ShardUser(SPEC).initialised({"w": W})


def decision(round_number, *steps, divisor=None, options=OPTIONS):
    """A round of (trainer, step, weight); ranks in the order given."""
    contributions = tuple(
        Contribution(trainer_id=trainer, rank=rank, step=step, weight=weight)
        for rank, (trainer, step, weight) in enumerate(steps)
    )
    total = sum(weight for _, _, weight in steps)
    return Decision(
        round=round_number, contributions=contributions, divisor=total if divisor is None else divisor, options=options
    )


def applied(round_number, version):
    return Applied(model="m", epoch=1, round=round_number, version=version)


# Making and initial values


@pytest.mark.parametrize("buckets", [range(-1, 2), range(2, 1), range(4)], ids=repr)
def test_buckets_that_the_model_does_not_have_are_refused(buckets):
    with pytest.raises(InvalidRequest, match="has 3 buckets"):
        ShardUser(SPEC, buckets=buckets)


def test_initial_values_are_read_back_bit_for_bit(user):
    assert torch.equal(user.values()["w"], W)
    assert torch.equal(user.values()["b"], torch.zeros(4))


def test_a_repeated_initialisation_changes_nothing_and_reports_again(user):
    report = user.shard.initialise(push_id(1), user.all({"w": ONE}))
    assert report == ShardInitialised(model="m", epoch=1, trainer_id=1)
    assert torch.equal(user.values()["w"], W)


@pytest.mark.parametrize("order", [(1, 2), (2, 1)], ids=["late", "early"])
def test_the_values_of_the_trainer_that_the_coordinator_settled_on_count_whoever_came_last(order):
    user = ShardUser(SPEC)
    for trainer in order:
        report = user.shard.initialise(push_id(1, trainer=trainer), user.all({"w": W if trainer == 1 else ONE}))
        assert report == ShardInitialised(model="m", epoch=1, trainer_id=trainer)
    user.shard.make_ready(2)
    assert torch.equal(user.values()["w"], ONE)
    user.shard.make_ready(1)
    assert torch.equal(user.values()["w"], ONE)


def test_a_shard_without_the_initialiser_s_values_cannot_become_ready():
    user = ShardUser(SPEC)
    user.shard.initialise(push_id(1), user.all({"w": W}))
    user.shard.end_trainer(1)
    assert not any(isinstance(report, ShardInitialised) for report in user.shard.reports())
    with pytest.raises(InternalError, match="lacks the initial values of trainer 1"):
        user.shard.make_ready(1)


def test_a_second_initialiser_is_refused_once_the_model_is_ready(user):
    with pytest.raises(InvalidRequest, match="'m' is ready and trained"):
        user.shard.initialise(push_id(1, trainer=2), user.all({"w": ONE}))
    assert torch.equal(user.values()["w"], W)


def test_initial_values_that_broke_off_change_nothing():
    user = ShardUser(SPEC)
    with pytest.raises(InvalidRequest, match="incomplete"):
        user.shard.initialise(push_id(1), Staging(user.shard.buckets))
    assert user.shard.outcome(push_id(1)) is None
    assert ShardCreated(model="m", epoch=1) in user.shard.reports()
    assert not any(isinstance(report, ShardInitialised) for report in user.shard.reports())


def test_gradients_before_the_model_is_ready_are_refused():
    user = ShardUser(SPEC)
    user.shard.initialise(push_id(1), user.all({"w": W}))
    with pytest.raises(InvalidRequest, match="not initialised yet"):
        user.push(2, {"w": ONE}, commit=commit(1))
    assert user.shard.num_contexts == 0


# Fences


def test_messages_of_another_epoch_or_layout_are_refused_by_name(user):
    fingerprint = user.layout.fingerprint
    user.shard.check(1, fingerprint)
    with pytest.raises(StaleEpoch, match="this shard is of epoch 1, the message of 2"):
        user.shard.check(2, fingerprint)
    with pytest.raises(LayoutMismatch, match=f"{fingerprint:016x}"):
        user.shard.check(1, fingerprint ^ 1)
    user.shard.failure = "model 'm' has failed: disk"
    with pytest.raises(ModelFailed, match="disk"):
        user.shard.check(1, fingerprint)


# Pushes


def test_a_committed_gradient_is_stepped_with_when_its_round_is_decided(user):
    assert user.push(2, {"w": ONE}, commit=commit(1)) == COMMITTED
    assert user.shard.outcome(push_id(2)) == Pending()
    assert torch.equal(user.values()["w"], W)
    assert user.shard.apply(decision(1, (1, 1, 1))) == applied(1, 1)
    assert torch.equal(user.values()["w"], W - 0.5)
    assert user.shard.outcome(push_id(2)) == StepResult(
        round=1, accepted=True, reason="", num_trainers=1, options=OPTIONS
    )
    assert user.shard.num_contexts == 0


def test_a_repeated_push_is_applied_once(user):
    for _ in range(3):
        assert user.push(2, {"w": ONE}) is None
    assert user.shard.outcome(push_id(2)) == Done()
    for _ in range(3):
        assert user.push(3, {"w": ONE}, commit=commit(1)) == COMMITTED
    user.shard.apply(decision(1, (1, 1, 1)))
    assert torch.equal(user.values()["w"], W - 1.0)
    assert user.push(3, {"w": ONE}, commit=commit(1)) is None
    assert torch.equal(user.values()["w"], W - 1.0)
    assert user.shard.num_contexts == 0


def test_a_push_that_was_acknowledged_is_refused_and_never_applied(user):
    user.push(2, {"w": ONE}, commit=commit(1))
    user.shard.apply(decision(1, (1, 1, 1)))
    user.shard.push(push_id(3, acknowledged=3), 2, user.gradients({"w": ONE}), frozenset(), None)
    with pytest.raises(StalePush, match="repeats mutation 2"):
        user.push(2, {"w": ONE}, context=9, commit=commit(2))
    assert user.shard.num_contexts == 1


def test_gradients_accumulate_in_a_context_over_several_pushes(user):
    user.push(2, {"w": ONE, "b": torch.ones(4)})
    user.push(3, {"w": 2 * ONE})
    user.push(4, {"w": 3 * ONE}, commit=commit(1))
    user.shard.apply(decision(1, (1, 1, 1)))
    assert torch.equal(user.values()["w"], W - 3.0)
    assert torch.equal(user.values()["b"], torch.full((4,), -0.5))


def test_a_commit_without_gradients_takes_what_earlier_pushes_brought(user):
    user.push(2, {"w": ONE})
    assert user.shard.push(push_id(3), 1, user.nothing(), frozenset(), commit(1)) == COMMITTED
    user.shard.apply(decision(1, (1, 1, 1)))
    assert torch.equal(user.values()["w"], W - 0.5)


def test_contexts_do_not_mix(user):
    user.push(2, {"w": 10 * ONE}, context=1)
    user.push(3, {"w": ONE}, context=2, commit=commit(1))
    user.push(2, {"w": 5 * ONE}, context=1, trainer=2)
    user.shard.apply(decision(1, (1, 1, 1)))
    assert torch.equal(user.values()["w"], W - 0.5)
    assert user.shard.num_contexts == 2


def test_a_stream_that_broke_off_leaves_nothing_behind(user):
    staging = Staging(user.shard.trained)
    staging.add_chunk(0, 0, 1, bytes(64))
    for last in (commit(1), None):
        with pytest.raises(InvalidRequest, match="incomplete"):
            user.shard.push(push_id(2), 1, staging, frozenset(), last)
    assert user.shard.outcome(push_id(2)) is None
    assert user.shard.num_contexts == 0
    assert user.push(2, {"w": ONE}, commit=commit(1)) == COMMITTED


def test_a_commit_of_a_context_that_nothing_was_pushed_into_is_refused_and_leaves_nothing_behind(user):
    with pytest.raises(InvalidRequest, match="incomplete"):
        user.shard.push(push_id(2), 1, user.nothing(), frozenset(), commit(1))
    assert user.shard.num_contexts == 0


def test_a_second_push_that_breaks_off_keeps_what_the_first_one_brought(user):
    user.push(2, {"w": ONE})
    with pytest.raises(InvalidRequest, match="incomplete"):
        user.shard.push(push_id(3), 1, user.nothing(), frozenset(), None)
    user.shard.push(push_id(3), 1, user.nothing(), frozenset(), commit(1))
    user.shard.apply(decision(1, (1, 1, 1)))
    assert torch.equal(user.values()["w"], W - 0.5)


@pytest.mark.parametrize("absent", [{2}, {-1}])
def test_absent_tensors_that_the_model_does_not_have_are_refused(user, absent):
    with pytest.raises(InvalidRequest, match="indices below 2"):
        user.push(2, {}, absent=frozenset(absent))
    assert user.shard.num_contexts == 0


@pytest.mark.parametrize("step", [1, 2])
def test_steps_out_of_order_are_refused(user, step):
    user.push(2, {"w": ONE}, context=1, commit=commit(2))
    with pytest.raises(InvalidRequest, match=f"has committed step 2; expected a later one, got {step}"):
        user.push(3, {"w": ONE}, context=2, commit=commit(step))
    assert user.shard.num_contexts == 1
    user.push(2, {"w": ONE}, trainer=2, commit=commit(1))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (commit(1, samples=-1), "samples"),
        (commit(1, samples=1 << 40), "samples"),
        (commit(1, options=()), "has 1 parameter groups; options came for 0"),
        (commit(1, options=({}, {})), "has 1 parameter groups; options came for 2"),
        (commit(0), "expected a later one"),
    ],
)
def test_commits_that_no_client_sends_are_refused_and_leave_nothing_behind(user, made, message):
    with pytest.raises(InvalidRequest, match=message):
        user.push(2, {"w": ONE}, commit=made)
    assert user.shard.num_contexts == 0
    assert user.shard.outcome(push_id(2)) is None


@pytest.mark.parametrize(("name", "value"), [("params", 3), ("fused", False), ("lr", "fast")])
def test_options_that_the_optimizer_does_not_take_are_refused_before_they_can_fail_a_round(user, name, value):
    with pytest.raises(InvalidRequest, match=name):
        user.push(2, {"w": ONE}, commit=commit(1, options=({"lr": 0.5} | {name: value},)))


# Rounds


def test_a_repeated_decision_changes_nothing(user):
    user.push(2, {"w": ONE}, commit=commit(1))
    decided = decision(1, (1, 1, 1))
    assert user.shard.apply(decided) == user.shard.apply(decided) == applied(1, 1)
    assert torch.equal(user.values()["w"], W - 0.5)


def test_a_gap_in_the_rounds_is_refused(user):
    user.push(2, {"w": ONE}, commit=commit(1))
    with pytest.raises(InternalError, match="round 2 came after round 0"):
        user.shard.apply(decision(2, (1, 1, 1)))
    assert (user.shard.round, user.shard.version) == (0, 0)
    assert torch.equal(user.values()["w"], W)


@pytest.mark.parametrize("missing", [(1, 2, 1), (2, 1, 1)])
def test_a_decision_that_counts_what_this_shard_does_not_have_is_refused(user, missing):
    user.push(2, {"w": ONE}, commit=commit(1))
    with pytest.raises(InternalError, match=f"counts step {missing[1]} of trainer {missing[0]}"):
        user.shard.apply(decision(1, missing))
    assert torch.equal(user.values()["w"], W)


def test_gradients_are_averaged_by_weight_in_order_of_rank(user):
    user.push(2, {"w": 1 * ONE}, trainer=1, commit=commit(1))
    user.push(2, {"w": 4 * ONE}, trainer=2, commit=commit(1))
    user.shard.apply(decision(1, (2, 1, 1), (1, 1, 3)))
    assert torch.equal(user.values()["w"], W - 0.5 * (4 + 3 * 1) / 4)


def test_the_sum_goes_in_the_order_of_the_decision(user):
    """In single precision the order shows: 1 is lost beside 2**25 unless the two 1s meet first."""
    for trainer, gradient in ((1, 2.0**25), (2, 1.0), (3, 2.0), (4, 1.0)):
        user.push(2, {"w": gradient * ONE}, trainer=trainer, commit=commit(1))
    order = [(2, 1, 1), (4, 1, 1), (3, 1, 1), (1, 1, 1)]
    user.shard.apply(decision(1, *order))
    assert torch.equal(user.values()["w"], W - 0.5 * (2.0**25 + 4.0) / 4)


def test_a_trainer_without_samples_is_in_the_round_and_not_in_the_mean(user):
    user.push(2, {"w": ONE}, trainer=1, commit=commit(1))
    user.push(2, {"w": 99 * ONE}, trainer=2, commit=commit(1, samples=0))
    user.shard.apply(decision(1, (1, 1, 1), (2, 1, 0)))
    assert torch.equal(user.values()["w"], W - 0.5)
    for trainer in (1, 2):
        outcome = user.shard.outcome(push_id(2, trainer=trainer))
        assert (outcome.round, outcome.num_trainers) == (1, 2)


def test_a_round_without_samples_advances_the_round_and_nothing_else(user):
    user.push(2, {"w": ONE}, commit=commit(1, samples=0))
    assert user.shard.apply(decision(1, (1, 1, 0))) == applied(1, 0)
    assert torch.equal(user.values()["w"], W)
    assert user.shard.num_contexts == 0


def test_the_options_of_the_decision_are_used(user):
    user.push(2, {"w": ONE}, commit=commit(1))
    user.shard.apply(decision(1, (1, 1, 1), options=({"lr": 2.0},)))
    assert torch.equal(user.values()["w"], W - 2.0)


def test_a_tensor_without_a_gradient_anywhere_is_not_stepped():
    user = ShardUser(model_spec(optimizer_groups=({"lr": 0.5, "weight_decay": 1.0},))).initialised({"w": W, "b": W[:4]})
    options = ({"lr": 0.5, "weight_decay": 1.0},)
    user.push(2, {"w": ONE}, absent=frozenset({1}), trainer=1, commit=commit(1, options=options))
    user.push(2, {"w": ONE}, absent=frozenset({1}), trainer=2, commit=commit(1, options=options))
    user.shard.apply(decision(1, (1, 1, 1), (2, 1, 1), options=options))
    assert torch.equal(user.values()["b"], W[:4])
    assert torch.equal(user.values()["w"], W - 0.5 * (1 + W))


def test_a_tensor_without_a_gradient_on_one_trainer_counts_as_zero_there(user):
    user.push(2, {"w": ONE, "b": torch.ones(4)}, trainer=1, commit=commit(1))
    user.push(2, {"w": ONE}, absent=frozenset({1}), trainer=2, commit=commit(1))
    user.shard.apply(decision(1, (1, 1, 1), (2, 1, 1)))
    assert torch.equal(user.values()["b"], torch.full((4,), -0.25))


def test_a_trainer_without_samples_does_not_make_a_tensor_present(user):
    user.push(2, {"w": ONE}, absent=frozenset({1}), trainer=1, commit=commit(1))
    user.push(2, {"w": ONE, "b": torch.ones(4)}, trainer=2, commit=commit(1, samples=0))
    user.shard.apply(decision(1, (1, 1, 1), (2, 1, 0)))
    assert torch.equal(user.values()["b"], torch.zeros(4))


# What a shard holds


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_parameters_have_single_precision_masters(dtype):
    spec = model_spec(tensors=(tensor_spec("w", 32, dtype=dtype),), bucket_bytes=0)
    user = ShardUser(spec).initialised({"w": torch.ones(32)})
    tiny = 2.0**-12  # too small a step for the parameter's own dtype: 1 - tiny rounds to 1
    assert torch.tensor(1 - tiny, dtype=dtype) == 1
    options = ({"lr": tiny},)
    for step in range(1, 65):
        user.push(step + 1, {"w": torch.ones(32)}, context=step, commit=commit(step, options=options))
        user.shard.apply(decision(step, (1, step, 1), options=options))
    assert torch.equal(user.values()["w"], torch.full((32,), 1 - 64 * tiny, dtype=dtype))
    assert user.shard.num_bytes == 32 * 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_gradients_of_several_trainers_are_summed_in_single_precision(dtype):
    spec = model_spec(tensors=(tensor_spec("w", 32, dtype=dtype),), bucket_bytes=0)
    user = ShardUser(spec).initialised()
    large, one = 2.0**11, 1.0
    for trainer, gradient in ((1, large), (2, one), (3, one), (4, -large)):
        user.push(2, {"w": torch.full((32,), gradient)}, trainer=trainer, commit=commit(1))
    user.shard.apply(decision(1, *((trainer, 1, 1) for trainer in (1, 2, 3, 4))))
    assert torch.equal(user.values()["w"], torch.full((32,), -0.25, dtype=dtype))


def test_buffers_and_frozen_parameters_are_held_and_never_stepped():
    tensors = (
        tensor_spec("w", 24),
        tensor_spec("count", dtype=torch.int64, group=STORED),
        tensor_spec("mask", 3, dtype=torch.bool, group=STORED),
        tensor_spec("frozen", 4, group=STORED),
    )
    user = ShardUser(model_spec(tensors=tensors))
    given = {
        "w": W,
        "count": torch.tensor((1 << 62) + 1),
        "mask": torch.tensor([True, False, True]),
        "frozen": torch.arange(4.0),
    }
    user.initialised(given)
    assert {bucket.group for bucket in user.shard.trained} == {0}
    user.push(2, {"w": ONE}, commit=commit(1))
    user.shard.apply(decision(1, (1, 1, 1)))
    values = user.values()
    for name in ("count", "mask", "frozen"):
        assert torch.equal(values[name], given[name])
        assert values[name].dtype == given[name].dtype


def test_each_parameter_group_has_its_own_options():
    tensors = (tensor_spec("w", 24), tensor_spec("b", 4, group=1))
    user = ShardUser(model_spec(tensors=tensors, optimizer_groups=({"lr": 0.5}, {"lr": 0.25}))).initialised()
    options = ({"lr": 1.0}, {"lr": 2.0})
    user.push(2, {"w": ONE, "b": torch.ones(4)}, commit=commit(1, options=options))
    user.shard.apply(decision(1, (1, 1, 1), options=options))
    assert user.values()["w"][0] == -1.0
    assert user.values()["b"][0] == -2.0


def test_shards_of_one_model_together_do_what_one_shard_does(user):
    parts = [ShardUser(SPEC, buckets=run).initialised({"w": W}) for run in (range(1), range(1, 1), range(1, 3))]
    for each in (user, *parts):
        each.push(2, {"w": W}, commit=commit(1))
        each.shard.apply(decision(1, (1, 1, 1)))
    for name, value in user.values().items():
        assert torch.equal(sum(part.values()[name] for part in parts), value)


def test_a_shard_that_owns_nothing_takes_part_all_the_same():
    user = ShardUser(SPEC, buckets=range(3, 3)).initialised()
    assert user.push(2, {}, commit=commit(1)) == COMMITTED
    assert user.shard.apply(decision(1, (1, 1, 1))).round == 1
    assert user.shard.num_bytes == 0


# Freeing


def test_a_dropped_context_is_freed(user):
    user.push(2, {"w": ONE})
    user.shard.drop_context(push_id(3), 1)
    assert user.shard.num_contexts == 0
    user.push(4, {"w": 2 * ONE}, commit=commit(1))
    user.shard.apply(decision(1, (1, 1, 1)))
    assert torch.equal(user.values()["w"], W - 1.0)


def test_a_repeated_drop_does_not_free_a_newer_context_of_the_same_id(user):
    user.shard.drop_context(push_id(2), 1)
    user.push(3, {"w": ONE})
    user.shard.drop_context(push_id(2), 1)
    assert user.shard.num_contexts == 1


def test_a_committed_context_cannot_be_dropped(user):
    user.push(2, {"w": ONE}, commit=commit(1))
    with pytest.raises(UnknownContext, match="committed for step 1"):
        user.shard.drop_context(push_id(3), 1)
    user.shard.apply(decision(1, (1, 1, 1)))


def test_everything_of_an_ended_trainer_is_freed_and_others_keep_theirs(user):
    user.push(2, {"w": ONE}, context=1)
    user.push(3, {"w": ONE}, context=2, commit=commit(1))
    user.push(2, {"w": ONE}, trainer=2, commit=commit(1))
    user.shard.end_trainer(1)
    assert user.shard.num_contexts == 1
    assert user.shard.outcome(push_id(3)) is None
    assert user.shard.outcome(push_id(2, trainer=2)) == Pending()
    user.shard.apply(decision(1, (2, 1, 1)))
    assert torch.equal(user.values()["w"], W - 0.5)


# After a broken link


def test_everything_the_coordinator_may_have_missed_is_reported_again():
    user = ShardUser(SPEC)
    assert user.shard.reports() == [ShardCreated(model="m", epoch=1), applied(0, 0)]
    user.shard.initialise(push_id(1), user.all({}))
    assert ShardInitialised(model="m", epoch=1, trainer_id=1) in user.shard.reports()
    user.shard.make_ready(1)
    user.push(2, {"w": ONE}, commit=commit(1))
    user.push(2, {"w": ONE}, trainer=2)
    assert user.shard.reports() == [ShardCreated(model="m", epoch=1), applied(0, 0), COMMITTED]
    user.shard.apply(decision(1, (1, 1, 1)))
    assert user.shard.reports() == [ShardCreated(model="m", epoch=1), applied(1, 1)]
