import dataclasses

import pytest
import torch
from core_builders import OPTIONS, ShardUser, commit, model_spec, push_id, tensor_spec

from pserver.core.messages import (
    Applied,
    Committed,
    Contribution,
    Decision,
    Plan,
    Prepared,
    Refusal,
    ShardCreated,
    ShardInitialised,
)
from pserver.core.optimizer_state import MASTER_KEY, StatePiece
from pserver.core.rules import GradientRules, NonFinite
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
from pserver.wire.layout import BUFFERS, STORED
from tests.results import step_result

W = torch.arange(24.0)
ONE = torch.ones(24)
CLIPPED = GradientRules(max_norm=1.0)
SKIPPING = GradientRules(nonfinite="skip")
SPEC = model_spec()  # SGD with lr 0.5: a gradient of 1 takes 0.5 off
COMMITTED = Committed(model="m", shard=0, epoch=1, trainer_id=1, commit=commit(1))


@pytest.fixture
def user():
    """A ready shard that owns the whole model: w = 0, 1, ... 23 and b = 0."""
    return ShardUser(SPEC).initialised({"w": W})


def decision(round_number, *steps, divisor=None, options=OPTIONS, **about):
    """A round of (trainer, step, weight); ranks in the order given."""
    contributions = tuple(
        Contribution(trainer_id=trainer, rank=rank, step=step, weight=weight)
        for rank, (trainer, step, weight) in enumerate(steps)
    )
    total = sum(weight for _, _, weight in steps)
    return Decision(
        round=round_number,
        contributions=contributions,
        divisor=total if divisor is None else divisor,
        options=options,
        **about,
    )


def prepare(plan, *, rules=CLIPPED, attempt=1):
    """A plan for a round of which shards must know the norm, or what its rules ask for."""
    return Plan(plan=plan, attempt=attempt, rules=rules)


def reject(trainer, step, **about):
    about = {"round": 0, "staleness": 0, "reason": "too late", "error": "", **about}
    return Refusal(trainer_id=trainer, step=step, **about)


def accepted(round_number, **about):
    """What a trainer hears of a step that was counted."""
    return step_result(round_number, **{"options": OPTIONS, **about})


def applied(round_number, version):
    return Applied(model="m", shard=0, epoch=1, round=round_number, version=version)


# Making and initial values


@pytest.mark.parametrize(
    "runs",
    [
        (range(-1, 2),),
        (range(2, 1),),
        (range(1, 1),),
        (range(4),),
        (range(2, 3), range(1)),
        (range(2), range(1, 3)),
        (range(0, 3, 2),),
    ],
    ids=repr,
)
def test_buckets_that_the_model_does_not_have_are_refused(runs):
    with pytest.raises(InvalidRequest, match="has 3 buckets"):
        ShardUser(SPEC, runs=runs)


def test_a_shard_that_replaces_another_one_counts_on_from_its_round_and_version():
    user = ShardUser(SPEC, epoch=4, round=7, version=5)
    assert user.shard.reports()[1] == Applied(model="m", shard=0, epoch=4, round=7, version=5)
    user.initialised({"w": W})
    user.push(2, {"w": ONE}, commit=commit(9))
    assert user.shard.apply(decision(8, (1, 9, 1))) == Applied(model="m", shard=0, epoch=4, round=8, version=6)


def test_initial_values_are_read_back_bit_for_bit(user):
    assert torch.equal(user.values()["w"], W)
    assert torch.equal(user.values()["b"], torch.zeros(4))


def test_a_repeated_initialisation_changes_nothing_and_reports_again(user):
    report = user.initialise({"w": ONE})
    assert report == ShardInitialised(model="m", shard=0, epoch=1, trainer_id=1)
    assert torch.equal(user.values()["w"], W)


@pytest.mark.parametrize("order", [(1, 2), (2, 1)], ids=["late", "early"])
def test_the_values_of_the_trainer_that_the_coordinator_settled_on_count_whoever_came_last(order):
    user = ShardUser(SPEC)
    for trainer in order:
        report = user.initialise({"w": W if trainer == 1 else ONE}, trainer=trainer)
        assert report == ShardInitialised(model="m", shard=0, epoch=1, trainer_id=trainer)
    user.shard.make_ready(2)
    assert torch.equal(user.values()["w"], ONE)
    user.shard.make_ready(1)
    assert torch.equal(user.values()["w"], ONE)


def test_a_shard_without_the_initialiser_s_values_cannot_become_ready():
    user = ShardUser(SPEC)
    user.initialise({"w": W})
    user.shard.end_trainer(1)
    assert not any(isinstance(report, ShardInitialised) for report in user.shard.reports())
    with pytest.raises(InternalError, match="lacks the initial values of trainer 1"):
        user.shard.make_ready(1)


@pytest.mark.parametrize("ready", [False, True])
def test_a_shard_that_has_failed_does_not_become_ready(ready):
    """Its failure may have been lost with the link: the coordinator must hear it when it repeats itself."""
    user = ShardUser(SPEC)
    user.initialise({"w": W})
    if ready:
        user.shard.make_ready(1)
    user.shard.failure = "disk"
    with pytest.raises(ModelFailed, match="disk"):
        user.shard.make_ready(1)
    assert user.shard.ready == ready


def test_a_second_initialiser_is_refused_once_the_model_is_ready(user):
    with pytest.raises(InvalidRequest, match="'m' is ready and trained"):
        user.initialise({"w": ONE}, trainer=2)
    assert torch.equal(user.values()["w"], W)


def test_initial_values_that_broke_off_change_nothing():
    user = ShardUser(SPEC)
    with pytest.raises(InvalidRequest, match="incomplete"):
        user.shard.initialise(push_id(1), Staging(user.shard.buckets), {})
    assert user.shard.outcome(push_id(1)) is None
    assert ShardCreated(model="m", shard=0, epoch=1) in user.shard.reports()
    assert not any(isinstance(report, ShardInitialised) for report in user.shard.reports())


def test_gradients_before_the_model_is_ready_are_refused():
    user = ShardUser(SPEC)
    user.initialise({"w": W})
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
    assert user.shard.outcome(push_id(2)) == accepted(1)
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


# Gradients that are looked at before the round is decided


def test_a_prepared_round_says_what_is_in_the_mean_gradient_and_steps_nothing_yet(user):
    user.push(2, {"w": 4 * ONE}, trainer=1, commit=commit(1))
    user.push(2, {"w": 2 * ONE, "b": torch.ones(4)}, trainer=2, commit=commit(1))
    report = user.shard.prepare(prepare(decision(1, (1, 1, 1), (2, 1, 3))))
    mean_w, mean_b = (4 + 3 * 2) / 4, 3 / 4
    assert report == Prepared(
        model="m",
        shard=0,
        epoch=1,
        round=1,
        attempt=1,
        squares=pytest.approx((16 * mean_w**2, 8 * mean_w**2, 4 * mean_b**2), rel=1e-15),
        nonfinite=(),
    )
    assert torch.equal(user.values()["w"], W)
    assert (user.shard.round, user.shard.version) == (0, 0)
    for trainer in (1, 2):
        assert user.shard.outcome(push_id(2, trainer=trainer)) == Pending()


def test_a_prepared_round_is_applied_with_what_its_decision_adds(user):
    user.push(2, {"w": 8 * ONE, "b": torch.ones(4)}, commit=commit(1))
    plan = decision(1, (1, 1, 1))
    user.shard.prepare(prepare(plan))
    decided = dataclasses.replace(plan, clip_coefficient=0.25, clip_value=0.5, grad_norm=7.0)
    assert user.shard.apply(decided) == applied(1, 1)
    assert torch.equal(user.values()["w"], W - 0.5 * 0.5)
    assert torch.equal(user.values()["b"], torch.full((4,), -0.5 * 0.25))
    assert user.shard.outcome(push_id(2)) == accepted(1, grad_norm=7.0)


def test_a_round_that_was_prepared_gives_the_bits_of_one_that_was_not():
    users = [ShardUser(SPEC).initialised({"w": W}) for _ in range(2)]
    plan = decision(1, (1, 1, 1), (2, 1, 2))
    for user in users:
        user.push(2, {"w": torch.linspace(-1, 1, 24)}, trainer=1, commit=commit(1))
        user.push(2, {"w": torch.linspace(3, 7, 24)}, trainer=2, commit=commit(1))
    users[0].shard.prepare(prepare(plan))
    for user in users:
        user.shard.apply(plan)
    assert torch.equal(users[0].values()["w"], users[1].values()["w"])


def test_a_repeated_preparation_changes_nothing_and_reports_the_same(user):
    user.push(2, {"w": 3 * ONE}, trainer=1, commit=commit(1))
    user.push(2, {"w": ONE}, trainer=2, commit=commit(1))
    plan = decision(1, (1, 1, 1), (2, 1, 1))
    first = user.shard.prepare(prepare(plan))
    assert user.shard.prepare(prepare(plan)) == first
    user.shard.apply(plan)
    assert torch.equal(user.values()["w"], W - 0.5 * 2)


def test_a_decision_that_is_repeated_after_a_preparation_changes_nothing(user):
    user.push(2, {"w": ONE}, commit=commit(1))
    plan = decision(1, (1, 1, 1))
    user.shard.prepare(prepare(plan))
    assert user.shard.apply(plan) == user.shard.apply(plan) == applied(1, 1)
    assert torch.equal(user.values()["w"], W - 0.5)


def test_gradients_in_preparation_are_reported_as_committed_no_more(user):
    """The round has them; a repeat of the push waits for it as the first one does."""
    user.push(2, {"w": ONE}, commit=commit(1))
    plan = decision(1, (1, 1, 1))
    user.shard.prepare(prepare(plan))
    assert not any(isinstance(report, Committed) for report in user.shard.reports())
    assert user.push(2, {"w": ONE}, commit=commit(1)) is None
    assert user.shard.outcome(push_id(2)) == Pending()
    user.shard.apply(plan)
    assert user.shard.outcome(push_id(2)) == accepted(1)
    assert torch.equal(user.values()["w"], W - 0.5)


def test_gradients_of_the_next_round_may_come_while_one_is_prepared(user):
    user.push(2, {"w": ONE}, commit=commit(1))
    plan = decision(1, (1, 1, 1))
    user.shard.prepare(prepare(plan))
    user.push(2, {"w": 10 * ONE}, trainer=2, commit=commit(1))
    user.shard.apply(plan)
    assert torch.equal(user.values()["w"], W - 0.5)
    user.shard.apply(decision(2, (2, 1, 1)))
    assert torch.equal(user.values()["w"], W - 5.5)


def test_a_trainer_that_ends_between_preparation_and_decision_stays_in_the_round(user):
    user.push(2, {"w": 3 * ONE}, trainer=1, commit=commit(1))
    user.push(2, {"w": ONE}, trainer=2, commit=commit(1))
    plan = decision(1, (1, 1, 1), (2, 1, 1))
    first = user.shard.prepare(prepare(plan))
    user.shard.end_trainer(1)
    assert user.shard.prepare(prepare(plan)) == first
    user.shard.apply(plan)
    assert torch.equal(user.values()["w"], W - 0.5 * 2)
    assert user.shard.outcome(push_id(2)) is None
    assert user.shard.outcome(push_id(2, trainer=2)) == accepted(1, num_trainers=2)


def test_a_preparation_out_of_turn_is_refused(user):
    user.push(2, {"w": ONE}, commit=commit(1))
    with pytest.raises(InternalError, match="round 2 came after round 0"):
        user.shard.prepare(prepare(decision(2, (1, 1, 1))))
    with pytest.raises(InternalError, match="counts step 1 of trainer 9"):
        user.shard.prepare(prepare(decision(1, (9, 1, 1))))


def test_a_shard_that_has_failed_prepares_and_applies_nothing(user):
    user.push(2, {"w": ONE}, commit=commit(1))
    user.shard.failure = "disk"
    for call in (
        lambda: user.shard.prepare(prepare(decision(1, (1, 1, 1)))),
        lambda: user.shard.apply(decision(1, (1, 1, 1))),
    ):
        with pytest.raises(ModelFailed, match="disk"):
            call()
    assert torch.equal(user.values()["w"], W)


def test_nan_and_infinite_elements_are_counted_by_trainer_and_tensor(user):
    odd = ONE.clone()
    odd[[3, 20, 21]] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    user.push(2, {"w": odd}, trainer=1, commit=commit(1))
    user.push(2, {"w": ONE, "b": torch.full((4,), torch.nan)}, trainer=2, commit=commit(1))
    report = user.shard.prepare(prepare(decision(1, (1, 1, 1), (2, 1, 1)), rules=SKIPPING))
    assert report.nonfinite == (
        NonFinite(trainer_id=1, tensor=0, count=1),
        NonFinite(trainer_id=1, tensor=0, count=2),
        NonFinite(trainer_id=2, tensor=1, count=4),
    )


def test_nan_that_cancels_in_no_sum_is_found_before_the_sum(user):
    """One trainer's inf and another one's -inf make a NaN that belongs to neither."""
    user.push(2, {"w": torch.inf * ONE}, trainer=1, commit=commit(1))
    user.push(2, {"w": -torch.inf * ONE}, trainer=2, commit=commit(1))
    report = user.shard.prepare(prepare(decision(1, (1, 1, 1), (2, 1, 1)), rules=SKIPPING))
    assert sum(each.count for each in report.nonfinite) == 48


def test_elements_are_not_counted_if_nobody_asked(user):
    user.push(2, {"w": torch.nan * ONE}, commit=commit(1))
    report = user.shard.prepare(prepare(decision(1, (1, 1, 1))))
    assert report.nonfinite == ()
    assert torch.tensor(report.squares).isnan().tolist() == [True, True, False]


def test_nan_of_a_trainer_without_samples_is_in_no_mean_and_spoils_no_round(user):
    user.push(2, {"w": ONE}, trainer=1, commit=commit(1))
    user.push(2, {"w": torch.nan * ONE}, trainer=2, commit=commit(1, samples=0))
    plan = decision(1, (1, 1, 1), (2, 1, 0))
    report = user.shard.prepare(prepare(plan, rules=SKIPPING))
    assert report.nonfinite == ()
    user.shard.apply(plan)
    assert torch.equal(user.values()["w"], W - 0.5)


def test_a_trainer_that_pushed_nothing_is_looked_at_all_the_same(user):
    user.shard.push(push_id(2), 1, user.nothing(), frozenset(), commit(1, samples=0))
    user.push(2, {"w": ONE}, trainer=2, commit=commit(1))
    report = user.shard.prepare(prepare(decision(1, (1, 1, 0), (2, 1, 1)), rules=SKIPPING))
    assert report.nonfinite == ()


# Clipping, and rounds that step nothing


def test_the_mean_gradient_is_clipped_by_norm_first_and_then_element_by_element(user):
    gradient = torch.linspace(-8, 8, 24)
    user.push(2, {"w": gradient}, commit=commit(1))
    user.shard.apply(decision(1, (1, 1, 1), clip_coefficient=0.5, clip_value=1.5))
    assert torch.equal(user.values()["w"], W - 0.5 * (gradient * 0.5).clamp(-1.5, 1.5))


def test_a_limit_that_the_dtype_cannot_hold_limits_nothing(user):
    gradient = torch.linspace(-8, 8, 24)
    user.push(2, {"w": gradient}, commit=commit(1, rules=GradientRules(clip_value=1e308)))
    user.shard.apply(decision(1, (1, 1, 1), clip_value=1e308))
    assert torch.equal(user.values()["w"], W - 0.5 * gradient)


def test_clipping_single_elements_of_complex_parameters_is_refused_before_it_can_fail_a_round():
    user = ShardUser(model_spec(tensors=(tensor_spec("w", 8, dtype=torch.complex64),))).initialised()
    with pytest.raises(InvalidRequest, match="clip_value has no meaning for complex parameters"):
        user.push(2, {}, commit=commit(1, rules=GradientRules(clip_value=1.0)))
    assert user.shard.num_contexts == 0
    user.push(2, {"w": torch.full((8,), 3 + 4j)}, commit=commit(1, rules=GradientRules(max_norm=1.0)))
    plan = decision(1, (1, 1, 1))
    assert user.shard.prepare(prepare(plan)).squares == pytest.approx((200.0,))
    user.shard.apply(dataclasses.replace(plan, clip_coefficient=0.5))
    assert torch.equal(user.values()["w"], torch.full((8,), -0.5 * 0.5 * (3 + 4j), dtype=torch.complex64))


@pytest.mark.parametrize("prepared", [False, True], ids=["decided at once", "prepared"])
def test_a_round_that_is_skipped_advances_the_round_and_tells_why(user, prepared):
    user.push(2, {"w": ONE}, commit=commit(1, overflow=True))
    plan = decision(1, (1, 1, 1))
    if prepared:
        user.shard.prepare(prepare(plan))
    decided = dataclasses.replace(plan, skip="nothing", overflow=True, error="NonFiniteGradient", num_nonfinite=3)
    assert user.shard.apply(decided) == applied(1, 0)
    assert torch.equal(user.values()["w"], W)
    assert user.shard.num_contexts == 0
    assert user.shard.outcome(push_id(2)) == accepted(
        1, stepped=False, overflow=True, reason="nothing", error="NonFiniteGradient", num_nonfinite=3
    )


def test_a_skipped_round_leaves_optimizer_state_as_it_is():
    options = ({"lr": 0.5, "momentum": 0.5},)
    user = ShardUser(model_spec(optimizer_groups=options)).initialised()
    for step, skip in ((1, ""), (2, "no"), (3, "")):
        user.push(step + 1, {"w": ONE}, context=step, commit=commit(step, options=options))
        user.shard.apply(decision(step, (1, step, 1), options=options, skip=skip))
    assert torch.equal(user.values()["w"], -0.5 * (1 + 1.5) * ONE)


# Steps that are refused


def test_a_refused_step_frees_its_gradient_and_tells_its_trainer(user):
    user.push(2, {"w": ONE}, commit=commit(1))
    user.shard.reject(reject(1, 1, round=4, staleness=3, reason="too old", error="RoundFailed"))
    assert user.shard.num_contexts == 0
    assert user.shard.outcome(push_id(2)) == accepted(
        4,
        accepted=False,
        stepped=False,
        num_trainers=0,
        staleness=3,
        reason="too old",
        error="RoundFailed",
    )
    assert user.push(2, {"w": ONE}, commit=commit(1)) is None
    assert torch.equal(user.values()["w"], W)
    assert (user.shard.round, user.shard.version) == (0, 0)


def test_a_refusal_that_is_repeated_or_of_an_unknown_step_changes_nothing(user):
    user.push(2, {"w": ONE}, context=1, commit=commit(1))
    user.shard.reject(reject(1, 1))
    told = user.shard.outcome(push_id(2))
    user.push(3, {"w": ONE}, context=2, commit=commit(2))
    for refused in (reject(1, 1, reason="again"), reject(9, 1), reject(2, 7)):
        user.shard.reject(refused)
    assert user.shard.outcome(push_id(2)) == told
    assert user.shard.outcome(push_id(3)) == Pending()
    user.shard.apply(decision(1, (1, 2, 1)))
    assert torch.equal(user.values()["w"], W - 0.5)


def test_a_refused_step_cannot_be_committed_again(user):
    user.push(2, {"w": ONE}, context=1, commit=commit(1))
    user.shard.reject(reject(1, 1))
    with pytest.raises(InvalidRequest, match="has committed step 1; expected a later one, got 1"):
        user.push(3, {"w": ONE}, context=2, commit=commit(1))


def test_a_refusal_for_a_trainer_that_has_ended_is_nobody_s(user):
    user.push(2, {"w": ONE}, commit=commit(1))
    user.shard.end_trainer(1)
    user.shard.reject(reject(1, 1))
    assert user.shard.outcome(push_id(2)) is None


def test_staleness_is_told_to_each_trainer_as_the_decision_has_it(user):
    user.push(2, {"w": ONE}, commit=commit(1))
    contribution = Contribution(trainer_id=1, rank=0, step=1, weight=1, staleness=6)
    user.shard.apply(Decision(round=1, contributions=(contribution,), divisor=1, options=OPTIONS))
    assert user.shard.outcome(push_id(2)) == accepted(1, staleness=6)


# Buffers that travel with every step


WITH_BUFFERS = (
    tensor_spec("w", 24),
    tensor_spec("mean", 4, group=BUFFERS),
    tensor_spec("count", dtype=torch.int64, group=BUFFERS),
    tensor_spec("stored", 4, group=STORED),
)


def user_with_buffers(buffers, *, samples=(1, 1)):
    """Two trainers have committed: w 1, mean 1 and count 5 from trainer 1; w 3, mean 5 and count 9 from trainer 2."""
    user = ShardUser(model_spec(tensors=WITH_BUFFERS, buffers=buffers)).initialised({"stored": torch.ones(4)})
    for trainer, w, mean, count in ((1, 1.0, 1.0, 5), (2, 3.0, 5.0, 9)):
        tensors = {"w": w * ONE, "mean": torch.full((4,), mean), "count": torch.tensor(count)}
        user.push(2, tensors, trainer=trainer, commit=commit(1, samples=samples[trainer - 1]))
    return user


def buffers_of(user):
    values = user.values()
    assert torch.equal(values["stored"], torch.ones(4))
    return values["mean"][0].item(), values["count"].item()


@pytest.mark.parametrize("skip", ["", "no step"])
def test_buffers_of_the_trainer_that_the_decision_names_become_the_model_s(skip):
    user = user_with_buffers("lowest")
    user.shard.apply(decision(1, (1, 1, 1), (2, 1, 1), buffers_from=2, skip=skip))
    assert buffers_of(user) == (5.0, 9)


def test_if_the_decision_names_nobody_buffers_stay_as_they_are():
    user = user_with_buffers("lowest")
    user.shard.apply(decision(1, (1, 1, 1), (2, 1, 1), buffers_from=0))
    assert buffers_of(user) == (0.0, 0)


def test_buffers_are_averaged_as_gradients_are_and_integers_taken_from_the_lowest_rank():
    user = user_with_buffers("mean")
    user.shard.apply(decision(1, (1, 1, 3), (2, 1, 1)))
    assert buffers_of(user) == ((3 * 1.0 + 5.0) / 4, 5)


def test_buffers_that_each_trainer_keeps_for_itself_change_nothing():
    user = user_with_buffers("local")
    user.shard.apply(decision(1, (1, 1, 1), (2, 1, 1)))
    assert buffers_of(user) == (0.0, 0)


def test_buffers_of_a_trainer_without_samples_are_in_no_mean():
    user = user_with_buffers("mean", samples=(0, 1))
    user.shard.apply(decision(1, (1, 1, 0), (2, 1, 1)))
    assert buffers_of(user) == (5.0, 9)


def test_a_round_without_samples_leaves_buffers_as_they_are():
    user = user_with_buffers("mean", samples=(0, 0))
    user.shard.apply(decision(1, (1, 1, 0), (2, 1, 0), skip="no samples"))
    assert buffers_of(user) == (0.0, 0)


def test_a_prepared_round_takes_its_buffers_when_it_is_applied():
    user = user_with_buffers("mean")
    plan = decision(1, (1, 1, 1), (2, 1, 1))
    report = user.shard.prepare(prepare(plan))
    assert buffers_of(user) == (0.0, 0)
    assert report.squares == pytest.approx((16 * 4.0, 8 * 4.0), rel=1e-15)
    user.shard.apply(plan)
    assert buffers_of(user) == (3.0, 5)


def test_buffers_of_the_last_push_into_a_context_count():
    user = ShardUser(model_spec(tensors=WITH_BUFFERS)).initialised({"stored": torch.ones(4)})
    for sequence, count in ((2, 7), (3, 8)):
        user.push(sequence, {"w": ONE, "count": torch.tensor(count)}, commit=commit(1) if count == 8 else None)
    user.shard.apply(decision(1, (1, 1, 1), buffers_from=1))
    assert buffers_of(user) == (0.0, 8)
    assert torch.equal(user.values()["w"], -ONE)


def test_half_precision_buffers_are_averaged_in_single_precision():
    spec = model_spec(
        tensors=(tensor_spec("w", 4), tensor_spec("s", 4, dtype=torch.float16, group=BUFFERS)), buffers="mean"
    )
    user = ShardUser(spec).initialised()
    for trainer, value in ((1, 40000.0), (2, 50000.0)):
        user.push(2, {"s": torch.full((4,), value)}, trainer=trainer, commit=commit(1))
    user.shard.apply(decision(1, (1, 1, 1), (2, 1, 1)))
    assert user.values()["s"][0].item() == 44992.0  # 45000 in float16; the sum 90000 is beyond it


# Optimizer state that moves


MOMENTUM = ({"lr": 0.5, "momentum": 0.5},)


def trained(spec, *, steps=3):
    """A shard that has done some steps with its spec's options."""
    user = ShardUser(spec).initialised({"w": W})
    for step in range(1, steps + 1):
        user.push(step + 1, {"w": step * ONE}, context=step, commit=commit(step, options=spec.optimizer_groups))
        user.shard.apply(decision(step, (1, step, 1), options=spec.optimizer_groups))
    return user


def state_of(user):
    """A copy of the optimizer state by bucket, in the reverse order."""
    return {
        bucket.index: [
            dataclasses.replace(each, value=each.value.clone() if isinstance(each.value, torch.Tensor) else each.value)
            for each in reversed(user.shard.state_pieces(bucket.index))
        ]
        for bucket in user.shard.trained
    }


def step_once(user, *, trainer, options, step=9):
    user.push(5, {"w": torch.linspace(-1, 1, 24)}, trainer=trainer, commit=commit(step, options=options))
    user.shard.apply(decision(user.shard.round + 1, (trainer, step, 1), options=options))
    return user.values()["w"]


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [("SGD", MOMENTUM), ("Adam", ({"lr": 0.5, "betas": (0.5, 0.5), "eps": 1e-8},)), ("Adafactor", ({"lr": 0.5},))],
)
def test_a_shard_that_begins_with_another_one_s_values_and_state_goes_on_in_its_place(optimizer, options):
    spec = model_spec(optimizer=optimizer, optimizer_groups=options)
    user = trained(spec)
    successor = ShardUser(spec, round=3, version=3)
    successor.initialise(user.values(), state_of(user), trainer=7)
    successor.shard.make_ready(7)
    assert torch.equal(successor.values()["w"], user.values()["w"])
    expected = step_once(user, trainer=1, options=options)
    assert torch.equal(step_once(successor, trainer=7, options=options), expected)
    assert not torch.equal(expected, W)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_masters_of_half_precision_travel_with_the_state(dtype):
    tiny = ({"lr": 2.0**-12},)
    spec = model_spec(tensors=(tensor_spec("w", 24, dtype=dtype),), optimizer_groups=tiny)
    user = ShardUser(spec).initialised({"w": ONE})
    user.push(2, {"w": ONE}, commit=commit(1, options=tiny))
    user.shard.apply(decision(1, (1, 1, 1), options=tiny))
    pieces = [each for bucket in user.shard.trained for each in user.shard.state_pieces(bucket.index)]
    assert {(each.key, each.value.dtype) for each in pieces} == {(MASTER_KEY, torch.float32)}
    successor = ShardUser(spec)
    successor.initialise(user.values(), state_of(user))
    successor.shard.make_ready(1)
    moved = [each for bucket in user.shard.trained for each in successor.shard.state_pieces(bucket.index)]
    for before, after in zip(pieces, moved, strict=True):
        assert torch.equal(before.value, after.value)
        assert torch.equal(after.value, torch.full_like(after.value, 1 - 2.0**-12))


def test_parameters_in_full_precision_have_no_separate_masters():
    user = trained(model_spec(optimizer_groups=MOMENTUM))
    assert {each.key for bucket in user.shard.trained for each in user.shard.state_pieces(bucket.index)} == {
        "momentum_buffer"
    }


def test_before_its_first_step_a_shard_has_no_state():
    user = ShardUser(model_spec(optimizer_groups=MOMENTUM)).initialised()
    assert [user.shard.state_pieces(bucket.index) for bucket in user.shard.trained] == [[], [], []]


@pytest.mark.parametrize("settled_on", [1, 2])
def test_the_state_of_the_trainer_that_the_coordinator_settled_on_counts(settled_on):
    """Also if that one has sent none."""
    spec = model_spec(optimizer_groups=MOMENTUM)
    state = state_of(trained(spec))
    user = ShardUser(spec)
    user.initialise({"w": W}, state, trainer=1)
    user.initialise({"w": W}, None, trainer=2)
    user.shard.make_ready(settled_on)
    fresh = ShardUser(spec)
    fresh.initialise({"w": W}, state if settled_on == 1 else None, trainer=3)
    fresh.shard.make_ready(3)
    expected = step_once(fresh, trainer=3, options=MOMENTUM)
    assert torch.equal(step_once(user, trainer=settled_on, options=MOMENTUM), expected)


def test_state_of_a_trainer_that_has_ended_is_gone():
    spec = model_spec(optimizer_groups=MOMENTUM)
    user = ShardUser(spec)
    user.initialise({"w": W}, state_of(trained(spec)), trainer=1)
    user.shard.end_trainer(1)
    user.initialise({"w": W}, None, trainer=2)
    user.shard.make_ready(2)
    assert [user.shard.state_pieces(bucket.index) for bucket in user.shard.trained] == [[], [], []]


def test_state_that_was_refused_leaves_nothing_behind():
    spec = model_spec(optimizer_groups=MOMENTUM)
    state = state_of(trained(spec))
    state[2] = [StatePiece(tensor=0, key="momentum_buffer", start=0, value=torch.zeros(3))]
    user = ShardUser(spec)
    with pytest.raises(InvalidRequest, match="momentum_buffer"):
        user.initialise({"w": W}, state, trainer=1)
    assert user.shard.outcome(push_id(1)) is None
    user.initialise({"w": W}, None, trainer=2)
    user.shard.make_ready(2)
    assert [user.shard.state_pieces(bucket.index) for bucket in user.shard.trained] == [[], [], []]


@pytest.mark.parametrize("bucket", [-1, 1, 99])
def test_state_of_a_bucket_that_is_not_stepped_here_is_refused(bucket):
    user = ShardUser(model_spec(optimizer_groups=MOMENTUM), runs=(range(1), range(2, 3)))
    with pytest.raises(InvalidRequest, match=rf"optimizer state came for the buckets \[{bucket}\]"):
        user.initialise({}, {bucket: []})
    assert user.shard.outcome(push_id(1)) is None


@pytest.mark.parametrize(
    "piece",
    [
        StatePiece(tensor=0, key=MASTER_KEY, start=None, value=torch.zeros(3)),
        StatePiece(tensor=0, key=MASTER_KEY, start=4, value=torch.zeros(32)),
        StatePiece(tensor=1, key=MASTER_KEY, start=0, value=torch.zeros(32)),
        StatePiece(tensor=0, key=MASTER_KEY, start=0, value=1.0),
        StatePiece(tensor=0, key=MASTER_KEY, start=0, value=None),
        StatePiece(tensor=0, key="momentum_buffer", start=0, value=torch.zeros(31)),
        StatePiece(tensor=9, key="momentum_buffer", start=0, value=torch.zeros(32)),
    ],
    ids=lambda piece: f"{piece.tensor} {piece.key} {piece.start}",
)
def test_state_that_does_not_fit_is_refused_before_it_can_fail_the_model(piece):
    spec = model_spec(tensors=(tensor_spec("w", 32, dtype=torch.float16),), optimizer_groups=MOMENTUM)
    user = ShardUser(spec)
    with pytest.raises(InvalidRequest, match=piece.key):
        user.initialise({}, {0: [piece]})
    assert not any(isinstance(report, ShardInitialised) for report in user.shard.reports())


def test_what_was_given_as_state_may_be_used_for_something_else():
    spec = model_spec(optimizer_groups=MOMENTUM)
    state = state_of(trained(spec))
    user, other = ShardUser(spec), ShardUser(spec)
    for each in (user, other):
        each.initialise({"w": W}, state)
        each.shard.make_ready(1)
    values = step_once(user, trainer=1, options=MOMENTUM)
    assert torch.equal(step_once(other, trainer=1, options=MOMENTUM), values)


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
    parts = [ShardUser(SPEC, runs=runs).initialised({"w": W}) for runs in ((range(1), range(2, 3)), (), (range(1, 2),))]
    for each in (user, *parts):
        each.push(2, {"w": W}, commit=commit(1))
        each.shard.apply(decision(1, (1, 1, 1)))
    for name, value in user.values().items():
        assert torch.equal(sum(part.values()[name] for part in parts), value)


def test_a_shard_that_owns_nothing_takes_part_all_the_same():
    user = ShardUser(SPEC, runs=()).initialised()
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
    assert user.shard.reports() == [ShardCreated(model="m", shard=0, epoch=1), applied(0, 0)]
    user.initialise({})
    assert ShardInitialised(model="m", shard=0, epoch=1, trainer_id=1) in user.shard.reports()
    user.shard.make_ready(1)
    user.push(2, {"w": ONE}, commit=commit(1))
    user.push(2, {"w": ONE}, trainer=2)
    state = user.shard.state()
    assert (state.round, state.version, state.decisions, state.plan) == (0, 0, (), None)
    assert [(each.trainer_id, each.settled_step, each.latest) for each in state.trainers] == [(1, 0, commit(1))]
    assert user.shard.reports() == [ShardCreated(model="m", shard=0, epoch=1), applied(0, 0), COMMITTED, state]
    user.shard.apply(decision(1, (1, 1, 1)))
    state = user.shard.state()
    assert (state.round, state.version, state.decisions) == (1, 1, (decision(1, (1, 1, 1)),))
    assert [(each.trainer_id, each.settled_step, each.told_round) for each in state.trainers] == [(1, 1, 1)]
    assert user.shard.reports() == [ShardCreated(model="m", shard=0, epoch=1), applied(1, 1), state]
