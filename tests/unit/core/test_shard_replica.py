"""A copy of a shard that does what its primary has done, and goes on in its place."""

import dataclasses

import pytest
import torch
from core_builders import ShardUser, commit, model_spec, push_id, tensor_spec

from pserver.core.changes import (
    Bookkeeping,
    BucketHeld,
    Checksum,
    ContextDropped,
    ContextHeld,
    GradientsPushed,
    RoundApplied,
    RoundPrepared,
    StepRefused,
    TrainerGone,
)
from pserver.core.messages import Committed, Contribution, Decision, Plan, Prepared, Refusal, ShardPromoted
from pserver.core.rules import NO_RULES, GradientRules, NonFinite
from pserver.core.shard import CHECK_EVERY_ROUNDS, Done, Pending, Shard
from pserver.errors import InternalError, InvalidRequest
from pserver.types import StepResult
from pserver.wire.layout import BUFFERS, STORED
from pserver.wire.tensors import to_bytes
from tests.results import step_result

TENSORS = (
    tensor_spec("w", 24),
    tensor_spec("h", 40, dtype=torch.bfloat16),
    tensor_spec("b", 5),
    tensor_spec("mean", 4, group=BUFFERS),
    tensor_spec("stored", 3, dtype=torch.int64, group=STORED),
)
OPTIONS = ({"lr": 0.125},)
OPTIMIZERS = {
    "SGD": ({"lr": 0.125, "momentum": 0.5},),
    "Adam": ({"lr": 0.125},),
    "AdamW": ({"lr": 0.125, "amsgrad": True},),
    "Adafactor": ({"lr": 0.125},),
}


def spec_of(optimizer="SGD", **about):
    about = {"tensors": TENSORS, "optimizer_groups": OPTIMIZERS[optimizer], "replicas": 1, **about}
    return model_spec(optimizer=optimizer, **about)


def random_tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        each.name: torch.randn(each.shape, generator=generator).to(each.dtype)
        for each in TENSORS
        if each.dtype.is_floating_point
    }


class Pair:
    """A primary that has its initial values, and the copies that it is asked to keep; two trainers, 1 and 2."""

    def __init__(self, spec):
        self.spec = spec
        self.user = ShardUser(spec)
        self.primary = self.user.shard
        self.copies = []
        self.sequences = {1: 1, 2: 1}
        self.steps = {1: 0, 2: 0}
        self.attempt = 0
        self.user.initialise(random_tensors(99) | {"stored": torch.tensor([1, 2, 3])})
        self.primary.make_ready(1)
        assert self.primary.take_changes() == []

    def copy(self):
        """A copy that is brought up now, all at once."""
        copy, parts = self.begin_copy()
        for part in parts:
            copy.redo(part)
        for number in range(len(self.primary.buckets)):
            copy.redo(self.primary.bucket_part(number))
        return copy

    def begin_copy(self):
        """A copy without anything, and all but the buckets, which it must hear first."""
        self.tell()
        copy = ShardUser(self.spec, replica=True).shard
        self.copies.append(copy)
        return copy, self.primary.state_parts()

    def tell(self):
        """Every copy hears what has happened; returns that."""
        changes = self.primary.take_changes()
        for copy in self.copies:
            for change in changes:
                copy.redo(change)
        return changes

    def push(self, trainer, *, context=None, committed=True, samples=1, **about):
        """Pushes other gradients each time; the push id."""
        self.sequences[trainer] += 1
        sequence = self.sequences[trainer]
        info = None
        if committed:
            self.steps[trainer] += 1
            info = commit(self.steps[trainer], options=OPTIONS, samples=samples)
        context = sequence if context is None else context
        self.user.push(sequence, random_tensors(97 * trainer + sequence), trainer=trainer, context=context, commit=info)
        return push_id(sequence, trainer=trainer)

    def plan(self, *weights, rules=NO_RULES, **about):
        """A plan of the last step of each trainer that has a weight."""
        self.attempt += 1
        contributions = tuple(
            Contribution(trainer_id=trainer, rank=trainer - 1, step=self.steps[trainer], weight=weight)
            for trainer, weight in enumerate(weights, start=1)
            if weight is not None
        )
        decision = Decision(
            round=self.primary.round + 1,
            contributions=contributions,
            divisor=sum(each.weight for each in contributions),
            options=OPTIONS,
            buffers_from=contributions[0].trainer_id,
            **about,
        )
        return Plan(plan=decision, attempt=self.attempt, rules=rules)

    def train(self, rounds=1):
        """Rounds of both trainers."""
        for _ in range(rounds):
            ids = [self.push(trainer) for trainer in (1, 2)]
            plan = self.plan(1, 2)
            self.primary.prepare(plan)
            self.primary.apply(plan.plan)
        return ids

    def check(self, copy=None):
        """Every copy, or this one, is what the primary is, bit for bit."""
        self.tell()
        for each in self.copies if copy is None else [copy]:
            assert state_of(each) == state_of(self.primary)


def state_of(shard):
    """All that a shard would need to go on, in a form that can be compared."""
    outcomes = {key: (lowest, dict(found)) for key, lowest, found in shard._outcomes.trainers()}
    contexts = {
        (each.trainer_id, each.context_id): (
            {index: to_bytes(values) for index, values in each.buckets.items()},
            set(each.absent or ()),
        )
        for each in shard._contexts
        if each.commit is None
    }
    pieces = {
        bucket.index: [
            (each.tensor, each.key, each.start, to_bytes(each.value) if torch.is_tensor(each.value) else each.value)
            for each in shard.state_pieces(bucket.index)
        ]
        for bucket in shard.trained
    }
    values = {bucket.index: bytes(shard.read(bucket.index)) for bucket in shard.buckets}
    masters = {index: to_bytes(values) for index, values in shard._store.masters.items()}
    where = (shard.round, shard.version, shard.ready, shard.is_preparing, dict(shard._last_step))
    return where, outcomes, contexts, pieces, values, masters


@pytest.fixture
def pair():
    return Pair(spec_of())


# Doing the same


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_copy_that_hears_of_everything_is_what_its_primary_is(optimizer):
    pair = Pair(spec_of(optimizer))
    pair.copy()
    for _ in range(5):
        pair.train()
        pair.check()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_copy_that_is_brought_up_in_the_middle_of_training_is_what_its_primary_is(optimizer):
    """Rounds go on between the buckets: those that have come take part in them, and the others come later."""
    pair = Pair(spec_of(optimizer))
    pair.train(2)
    copy, parts = pair.begin_copy()
    for part in parts:
        copy.redo(part)
    for number in range(len(pair.primary.buckets)):
        assert not copy.ready
        pair.tell()
        copy.redo(pair.primary.bucket_part(number))
        pair.train()
        pair.tell()
    assert copy.ready
    pair.check()
    pair.train(2)
    pair.check()


@pytest.mark.parametrize("buffers", ["lowest", "mean", "local"])
def test_a_copy_has_the_buffers_of_its_primary(buffers):
    pair = Pair(spec_of(buffers=buffers))
    pair.copy()
    pair.train(2)
    pair.check()


def test_a_copy_remembers_what_came_of_steps_and_contexts(pair):
    pair.copy()
    pair.train()
    early = pair.push(1, context=50, committed=False)
    dropped = pair.push(2, context=60, committed=False)
    pair.sequences[2] += 1
    drop_id = push_id(pair.sequences[2], trainer=2)
    pair.primary.drop_context(drop_id, 60)
    refused = pair.push(2)
    about = {"round": 1, "staleness": 1, "reason": "late", "error": ""}
    pair.primary.reject(Refusal(trainer_id=2, step=pair.steps[2], **about))
    kinds = [type(each) for each in pair.tell()]
    assert kinds == [RoundPrepared, RoundApplied, GradientsPushed, GradientsPushed, ContextDropped, StepRefused]
    pair.check()
    (copy,) = pair.copies
    assert [copy.outcome(each) for each in (early, dropped, drop_id)] == [Done()] * 3
    told = copy.outcome(refused)
    assert isinstance(told, StepResult)
    assert (told.accepted, told.reason) == (False, "late")
    assert [each.context_id for each in copy._contexts if each.commit is None] == [50]


def test_commits_that_wait_are_not_among_what_a_copy_hears(pair):
    """Their trainers are not told before a round has them: they push again."""
    copy = pair.copy()
    waiting = pair.push(1)
    assert pair.tell() == []
    assert copy.outcome(waiting) is None
    assert copy.num_contexts == 0


def test_a_context_that_is_half_there_becomes_part_of_the_step(pair):
    pair.push(1, context=7, committed=False)
    pair.copy()
    pair.push(1, context=7, committed=False)
    pair.push(1, context=7)
    plan = pair.plan(1)
    pair.primary.prepare(plan)
    pair.primary.apply(plan.plan)
    pair.check()
    assert pair.copies[0].num_contexts == 0


def test_a_round_that_steps_nothing_has_no_gradients_for_copies(pair):
    copy = pair.copy()
    pair.push(1)
    plan = pair.plan(1, skip="overflow", overflow=True)
    pair.primary.prepare(plan)
    pair.primary.apply(plan.plan)
    prepared, applied = pair.tell()
    assert (prepared.means, applied.version) == ({}, 0)
    assert (copy.round, copy.version) == (1, 0)
    pair.check()


def test_an_end_of_a_trainer_reaches_copies_in_its_place_in_the_log(pair):
    copy = pair.copy()
    ids = [pair.push(trainer) for trainer in (1, 2)]
    plan = pair.plan(1, 1)
    pair.primary.prepare(plan)
    pair.primary.end_trainer(1)
    pair.primary.apply(plan.plan)
    assert [type(each) for each in pair.tell()] == [RoundPrepared, TrainerGone, RoundApplied]
    pair.check()
    assert copy.outcome(ids[0]) is None
    assert copy.outcome(ids[1]) == step_result(1, options=OPTIONS, num_trainers=2)


def test_a_shard_without_replicas_keeps_no_changes():
    pair = Pair(spec_of(replicas=0))
    pair.train(2)
    pair.push(1, committed=False)
    assert pair.tell() == []


def test_squares_are_computed_only_if_somebody_clips_by_norm(pair):
    pair.push(1)
    report = pair.primary.prepare(pair.plan(1))
    assert (report.squares, report.nonfinite, report.attempt) == ((), (), 1)
    report = pair.primary.prepare(pair.plan(1, rules=GradientRules(max_norm=1.0)))
    assert len(report.squares) == len(pair.primary.trained)
    assert report.attempt == 2


def test_a_copy_reports_what_its_primary_has_found(pair):
    """It is not looked for again: the gradients of single trainers are not here."""
    copy = pair.copy()
    tensors = random_tensors(1) | {"w": torch.full((24,), torch.nan)}
    pair.user.push(2, tensors, commit=commit(1, options=OPTIONS))
    pair.steps[1] = 1
    rules = GradientRules(max_norm=1.0, nonfinite="skip")
    report = pair.primary.prepare(pair.plan(1, rules=rules))
    assert sum(each.count for each in report.nonfinite) == 24
    pair.tell()
    copy.promoted(5, {1, 2})
    (found,) = (each for each in copy.reports() if isinstance(each, Prepared))
    assert found.nonfinite == report.nonfinite != ()
    assert isinstance(found.nonfinite[0], NonFinite)
    assert (found.epoch, found.attempt) == (5, 1)


# Repeats, and what does not fit


def test_rounds_that_are_repeated_change_nothing(pair):
    copy = pair.copy()
    pair.train()
    changes = pair.tell()
    for change in changes:
        copy.redo(change)
    pair.check()


def test_a_round_that_was_never_prepared_cannot_be_applied(pair):
    pair.copy()
    pair.push(1)
    with pytest.raises(InternalError, match="never told to prepare it"):
        pair.primary.apply(pair.plan(1).plan)


def test_a_checksum_is_sent_now_and_then_and_copies_compare(pair):
    copy = pair.copy()
    found = []
    for _ in range(2 * CHECK_EVERY_ROUNDS):
        pair.train()
        found += [each.checksum for each in pair.tell() if isinstance(each, RoundApplied)]
    rounds = [number for number, each in enumerate(found, start=1) if each is not None]
    assert rounds == [CHECK_EVERY_ROUNDS, 2 * CHECK_EVERY_ROUNDS]
    assert len({each.bucket for each in found if each is not None}) == 2
    pair.check(copy)


@pytest.mark.parametrize("spoil", ["value", "state"])
def test_a_copy_that_is_not_what_its_primary_is_says_so(pair, spoil):
    copy = pair.copy()
    pair.train()
    pair.tell()
    bucket = copy.trained[0].index
    if spoil == "value":
        copy._store.masters[bucket][3] += 1
    else:
        (piece, *_) = copy.state_pieces(bucket)
        piece.value.view(-1)[0] += 1
    pair.train()
    prepared, applied = pair.primary.take_changes()
    copy.redo(prepared)
    expected = Checksum(bucket=bucket, value=pair.primary._checksum(bucket))
    with pytest.raises(InternalError, match=f"bucket {bucket} of shard 0 has the checksum"):
        copy.redo(dataclasses.replace(applied, checksum=expected))


def test_a_version_that_differs_is_found(pair):
    copy = pair.copy()
    pair.train()
    prepared, applied = pair.primary.take_changes()
    copy.redo(prepared)
    with pytest.raises(InternalError, match="primary of shard 0 is at version 7, its replica at 1"):
        copy.redo(dataclasses.replace(applied, version=7))


def test_rounds_out_of_turn_are_found(pair):
    copy = pair.copy()
    pair.train(2)
    changes = pair.primary.take_changes()
    with pytest.raises(InternalError, match="round 2 came after round 0"):
        copy.redo(changes[2])


def test_a_bucket_of_another_round_or_that_nobody_waits_for_is_found(pair):
    copy = pair.copy()
    with pytest.raises(InternalError, match=r"bucket 0 came as of round 0"):
        copy.redo(pair.primary.bucket_part(0))
    pair.train()
    pair.primary.take_changes()
    late, parts = ShardUser(pair.spec, replica=True).shard, pair.primary.state_parts()
    for part in parts:
        late.redo(part)
    with pytest.raises(InternalError, match=r"came as of round 7; this replica is at 1"):
        late.redo(dataclasses.replace(pair.primary.bucket_part(0), round=7))


def test_a_copy_that_begins_anew_forgets_what_it_had(pair):
    copy = pair.copy()
    pair.train()
    pair.push(1, context=70, committed=False)
    pair.tell()
    pair.copies.clear()
    other = Pair(pair.spec)
    other.train()
    other.primary.take_changes()
    for part in other.primary.state_parts():
        copy.redo(part)
    assert not copy.ready
    for number in range(len(other.primary.buckets)):
        copy.redo(other.primary.bucket_part(number))
    other.check(copy)


def test_parts_of_the_state_come_in_an_order_in_which_they_can_be_taken(pair):
    pair.push(1, context=7, committed=False)
    pair.push(1, context=8)
    pair.primary.prepare(pair.plan(1))
    parts = pair.primary.state_parts()
    assert [type(each) for each in parts] == [Bookkeeping, ContextHeld, RoundPrepared]
    buckets = [pair.primary.bucket_part(number) for number in range(len(pair.primary.buckets))]
    assert all(isinstance(each, BucketHeld) for each in buckets)
    assert [each.last for each in buckets] == [False] * (len(buckets) - 1) + [True]


# Going on in the primary's place


def promote(copy, *, epoch=9, living=(1, 2)):
    promoted = copy.promoted(epoch, set(living))
    assert copy.promotion() == promoted
    user = ShardUser.__new__(ShardUser)
    user.layout, user.shard = copy.layout, copy
    return user, promoted


def test_a_promoted_copy_says_where_it_is(pair):
    pair.train(3)
    copy = pair.copy()
    _, promoted = promote(copy)
    assert promoted == ShardPromoted(model="m", shard=0, epoch=9, round=3, version=3, attempt=0)
    assert copy.applied().epoch == 9


def test_a_promoted_copy_answers_repeats_with_what_was_told(pair):
    copy = pair.copy()
    ids = pair.train()
    pair.tell()
    user, _ = promote(copy)
    for each in ids:
        assert copy.outcome(each) == pair.primary.outcome(each) == step_result(1, options=OPTIONS, num_trainers=2)
        before = state_of(copy)
        info = commit(1, options=OPTIONS)
        assert user.push(each.sequence, {}, trainer=each.trainer_id, context=each.sequence, commit=info) is None
        assert state_of(copy) == before


def test_a_promoted_copy_goes_on_with_the_bits_of_its_primary(pair):
    copy = pair.copy()
    pair.train(2)
    pair.tell()
    pair.copies.clear()
    user, _ = promote(copy)
    pair.train()
    changes = pair.primary.take_changes()
    for trainer in (1, 2):
        sequence = pair.sequences[trainer]
        info = commit(3, options=OPTIONS)
        tensors = random_tensors(97 * trainer + sequence)
        report = user.push(sequence, tensors, trainer=trainer, context=sequence, commit=info)
        assert report == Committed(model="m", shard=0, epoch=9, trainer_id=trainer, commit=info)
    plan = changes[0].plan
    copy.prepare(plan)
    copy.apply(plan.plan)
    assert state_of(copy) == state_of(pair.primary)
    assert len(copy.take_changes()) == 2  # for its own replicas


def test_a_plan_that_the_copy_holds_is_completed_without_the_pushes(pair):
    copy = pair.copy()
    ids = [pair.push(trainer) for trainer in (1, 2)]
    plan = pair.plan(1, 2, rules=GradientRules(max_norm=1.0))
    report = pair.primary.prepare(plan)
    pair.tell()
    _, promoted = promote(copy)
    assert promoted.attempt == plan.attempt == 1
    assert [copy.outcome(each) for each in ids] == [Pending(), Pending()]
    (again,) = (each for each in copy.reports() if isinstance(each, Prepared))
    assert again == copy.prepare(plan) == dataclasses.replace(report, epoch=9)
    decided = dataclasses.replace(plan.plan, clip_coefficient=0.5, grad_norm=2.0)
    pair.primary.apply(decided)
    copy.apply(decided)
    assert state_of(copy) == state_of(pair.primary)
    assert copy.outcome(ids[0]) == step_result(1, options=OPTIONS, num_trainers=2, grad_norm=2.0)


def test_pushes_of_a_plan_that_is_given_up_are_forgotten_where_they_never_were(pair):
    """The copy has only their mean. Their trainers are asked for them once more, and may send them."""
    copy = pair.copy()
    ids = [pair.push(trainer) for trainer in (1, 2)]
    pair.primary.prepare(pair.plan(1, 2))
    pair.tell()
    user, _ = promote(copy)
    other = dataclasses.replace(pair.plan(None, 1), attempt=2)
    with pytest.raises(InternalError, match="counts step 1 of trainer 2, which this shard does not have"):
        copy.prepare(other)
    assert [copy.outcome(each) for each in ids] == [None, None]
    for each in ids:
        info = commit(1, options=OPTIONS)
        report = user.push(each.sequence, {}, trainer=each.trainer_id, context=each.sequence, commit=info)
        assert isinstance(report, Committed)
    assert copy.prepare(other).attempt == 2


def test_pushes_of_a_plan_that_is_given_up_wait_again_where_they_are(pair):
    """On a primary that goes on: another shard of the model has lost what it had."""
    first, second = (pair.push(trainer) for trainer in (1, 2))
    before = pair.primary.num_contexts
    pair.primary.prepare(pair.plan(1, 2))
    # They are told all the same: a coordinator that does not know the plan must know that nothing of it was lost.
    told = [each.trainer_id for each in pair.primary.reports() if isinstance(each, Committed)]
    assert told == [1, 2]
    copy = pair.copy()
    again = pair.plan(1, 2)
    pair.primary.prepare(again)
    assert [pair.primary.outcome(each) for each in (first, second)] == [Pending(), Pending()]
    pair.primary.apply(again.plan)
    pair.check(copy)
    assert (before, pair.primary.num_contexts) == (2, 0)


def test_two_plans_of_a_round_give_the_bits_of_one(pair):
    other = Pair(pair.spec)
    for each in (pair, other):
        for trainer in (1, 2):
            each.push(trainer)
    pair.primary.prepare(pair.plan(1, 2))
    for each in (pair, other):
        plan = each.plan(1, 2)
        each.primary.prepare(plan)
        each.primary.apply(plan.plan)
    assert state_of(pair.primary) == state_of(other.primary)


def test_a_trainer_that_has_ended_is_not_among_those_who_wait_again(pair):
    pair.push(1)
    gone = pair.push(2)
    pair.primary.prepare(pair.plan(1, 1))
    pair.primary.end_trainer(2)
    pair.primary.prepare(pair.plan(1))
    assert pair.primary.num_contexts == 0
    assert pair.primary.outcome(gone) is None


def test_a_promoted_copy_drops_what_trainers_have_left_who_ended_meanwhile(pair):
    pair.push(1, context=50, committed=False)
    pair.push(2, context=60, committed=False)
    copy = pair.copy()
    user, _ = promote(copy, living=(1,))
    assert [each.context_id for each in copy._contexts if each.commit is None] == [50]
    assert {trainer for trainer, *_ in copy._outcomes.trainers()} == {1}
    assert TrainerGone(trainer_id=2) in copy.take_changes()  # its own replicas hear of it
    with pytest.raises(InvalidRequest, match="ready and trained"):
        user.initialise({}, trainer=1, sequence=40)


def test_a_shard_is_a_copy_only_if_it_is_made_as_one(pair):
    copy = pair.copy()
    assert isinstance(copy, Shard)
    pair.train()
    pair.tell()
    assert copy.take_changes() == []
