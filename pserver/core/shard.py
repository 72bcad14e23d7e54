"""One server's part of a model: values, optimizer state, contexts, and the outcome of every mutation.

Nothing here waits, and nothing is thread-safe: the owner runs one call at a time.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial

import torch

from pserver.core.changes import (
    Bookkeeping,
    BucketHeld,
    Change,
    Checksum,
    ContextDropped,
    ContextHeld,
    GradientsPushed,
    LoggedChange,
    RoundApplied,
    RoundPrepared,
    StatePart,
    StepRefused,
    TrainerGone,
    TrainerRecord,
)
from pserver.core.contexts import ContextTable, GradientContext
from pserver.core.dedup import DedupTable
from pserver.core.history import History
from pserver.core.messages import (
    Applied,
    CommitInfo,
    Committed,
    Contribution,
    CreateShard,
    Decision,
    Plan,
    Prepared,
    Refusal,
    Report,
    ShardCreated,
    ShardInitialised,
    ShardPromoted,
    ShardState,
)
from pserver.core.optimizer_state import MASTER_KEY, StatePiece
from pserver.core.optimizers import check_options, optimizer_entry
from pserver.core.reduce import memory_for_means, sum_of_squares
from pserver.core.staging import Pushed, Staging
from pserver.core.stepping import BucketStepper
from pserver.core.sync import make_policy
from pserver.core.update import Update
from pserver.core.value_store import Publication, ValueStore
from pserver.errors import InternalError, InvalidRequest, LayoutMismatch, ModelFailed, StaleEpoch
from pserver.types import GroupOptions, PushId, StepResult
from pserver.wire.layout import BUFFERS, STORED, Bucket, Layout
from pserver.wire.tensors import memory_of, to_bytes


@dataclass(frozen=True, slots=True)
class Pending:
    """Outcome of a mutation that waits for a round."""


@dataclass(frozen=True, slots=True)
class Done:
    """Outcome of a mutation that has no result of its own."""


Outcome = StepResult | Pending | Done

BucketStates = Mapping[int, Sequence[StatePiece]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Initial:
    """What one trainer offers to begin with: values, and optimizer state by bucket."""

    values: dict[int, torch.Tensor]
    state: BucketStates


@dataclass(slots=True, kw_only=True)
class _PreparedRound:
    """A round whose gradients have been taken and averaged, but not stepped with yet.

    `contexts`: those that it was made of, to wait again if another plan takes its place.
    """

    change: RoundPrepared
    push_ids: list[PushId | None]
    contexts: list[GradientContext]


#: How often primary and replica compare a bucket, in rounds.
CHECK_EVERY_ROUNDS = 32


class Progress:
    """Hears how far a round is applied, on the thread that applies it."""

    def begun(self, round_number: int, results: Mapping[PushId, StepResult]) -> None:
        """What becomes of the pushes in the round, unless the shard fails."""

    def stepped(self, bucket: int) -> None:
        """A bucket has the values of the round: it may be read, from any thread, until the next round begins."""


_UNWATCHED = Progress()


class Shard:
    """Some buckets of a model.

    Args:
        command: what to make.
        layout: of its model, if that is at hand; to compute it takes a while.
        publication: where trainers read values while they may be written; None: only through messages.
        reduced: gives the memory that mean gradients of buckets go to, if replicas must have them; 1-D, in the dtype of
            their masters. It is used until the round is applied, here and on the replicas.

    Attributes:
        round, version: the last applied round, and how many of them have stepped.
        replicated: whether changes are kept for replicas, see `take_changes`.

    Raises:
        UnsupportedOptimizer: torch refuses the optimizer's arguments.
        InvalidRequest: buckets that the model does not have.
    """

    def __init__(
        self,
        command: CreateShard,
        layout: Layout | None = None,
        publication: Publication | None = None,
        reduced: Callable[[Sequence[Bucket]], Mapping[int, torch.Tensor]] | None = None,
    ) -> None:
        self.spec = command.spec
        self.number = command.shard
        self.epoch = command.epoch
        self.replicated = command.spec.replicas > 0
        self._is_replica = command.replica
        self._reduced = reduced or memory_for_means
        self.layout = layout or command.spec.layout()
        self.coding = self.spec.coding(self.layout)
        self.buckets: tuple[Bucket, ...] = self.layout.part(command.runs)
        self.trained: tuple[Bucket, ...] = tuple(each for each in self.buckets if each.group >= 0)
        self.exchanged: tuple[Bucket, ...] = tuple(each for each in self.buckets if each.group != STORED)
        self.mixed_rounds = make_policy(self.spec.sync_policy, self.spec.sync_policy_arguments).mixed_rounds
        self.round = command.round
        self.version = command.version
        self.ready = False
        self.failure: str | None = None
        self._initial: dict[int, _Initial] = {}  # by trainer, until the coordinator says whose count
        self._tried_state = False  # whether steppers may hold the state of one of them already
        self._store = ValueStore(self.buckets, publication)
        self._buffer_buckets = frozenset(each.index for each in self.buckets if each.group == BUFFERS)
        self._dtypes = {bucket.index: bucket.dtype for bucket in self.exchanged}
        self._steppers = {bucket.index: self._stepper(bucket) for bucket in self.trained}
        self._update = Update(
            self.layout,
            self._store,
            self.trained,
            self._steppers,
            self._buffer_buckets,
            self.spec.buffers,
            keeps_gradients=not optimizer_entry(self.spec.optimizer).from_torch,
        )
        self._contexts = ContextTable()
        self._good_options: tuple[GroupOptions, ...] | None = None
        self._prepared: _PreparedRound | None = None
        self._outcomes: DedupTable[Outcome] = DedupTable()
        self._last_step: dict[int, int] = {}
        self._history = History()
        self._changes: list[LoggedChange] = []
        self._held: set[int] | None = None  # buckets that a replica has got so far; None: all

    def take_changes(self) -> list[LoggedChange]:
        """What has happened that replicas must hear, in order; taken once."""
        taken, self._changes = self._changes, []
        return taken

    def _changed(self, change: LoggedChange) -> None:
        if self.replicated and not self._is_replica:
            self._changes.append(change)

    def _stepper(self, bucket: Bucket) -> BucketStepper:
        return BucketStepper(
            self.spec.optimizer,
            self.spec.optimizer_groups[bucket.group],
            self._store.masters[bucket.index],
            self.layout.segments[bucket.index],
            self.layout.shapes(bucket.index),
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of the values held."""
        return sum(bucket.num_master_bytes for bucket in self.buckets)

    @property
    def num_contexts(self) -> int:
        """Contexts open, committed ones included."""
        return len(self._contexts)

    def check(self, epoch: int, fingerprint: int) -> None:
        """Refuses a message that is meant for another placement or another layout.

        Raises:
            ModelFailed, StaleEpoch, LayoutMismatch
        """
        if self.failure is not None:
            raise ModelFailed(self.failure)
        if epoch != self.epoch:
            raise StaleEpoch(f"model {self.spec.name!r}: this shard is of epoch {self.epoch}, the message of {epoch}")
        if fingerprint != self.layout.fingerprint:
            raise LayoutMismatch(
                f"model {self.spec.name!r}: this shard's layout has the fingerprint {self.layout.fingerprint:016x}, "
                f"the message's {fingerprint:016x}; register the model again to see the first difference"
            )

    # Initial values

    def initialise(self, push_id: PushId, staging: Staging, state: BucketStates) -> Report:
        """Takes every value of this shard, to be used if the coordinator settles on this trainer's.

        Args:
            staging: every bucket.
            state: optimizer state by bucket; parameters without any begin as the optimizer's constructor leaves them.

        Raises:
            InvalidRequest: something is missing or does not fit, or the model is ready already.
        """
        if self._outcomes.find(push_id) is None:
            if self.ready:
                raise InvalidRequest(f"model {self.spec.name!r} is ready and trained; its values are not overwritten")
            values = staging.complete()
            if unknown := state.keys() - self._steppers.keys():
                raise InvalidRequest(
                    f"optimizer state came for the buckets {sorted(unknown)}, which are not stepped here"
                )
            # The present state is nobody's yet: loading it shows whether it can be loaded.
            self._tried_state = self._tried_state or bool(state)
            for index, pieces in state.items():
                self._load_(index, pieces)
            self._initial[push_id.trainer_id] = _Initial(values=values, state=state)
            self._outcomes.record(push_id, Done())
        return self._initialised(push_id.trainer_id)

    def make_ready(self, initialiser: int) -> None:
        """Fills the shard with one trainer's values; a shard that is ready already keeps what it has.

        Raises:
            InternalError: that trainer has sent none.
            ModelFailed: it has failed before, which the coordinator may not have heard.
        """
        if self.failure is not None:
            raise ModelFailed(self.failure)
        if self.ready:
            return
        initial = self._initial.get(initialiser)
        if initial is None:
            raise InternalError(
                f"model {self.spec.name!r}: this shard lacks the initial values of trainer {initialiser}"
            )
        for index, values in initial.values.items():
            with self._store.changing(index, self.round) as master:
                master.copy_(values)
        if self._tried_state:
            for index in self._steppers:
                with self._store.changing(index, self.round):
                    self._load_(index, initial.state.get(index, ()))
        self._initial.clear()
        self.ready = True

    def _load_(self, bucket: int, pieces: Sequence[StatePiece]) -> None:
        """Replaces a bucket's optimizer state, and masters if they are among it."""
        masters = [each for each in pieces if each.key == MASTER_KEY]
        self._steppers[bucket].load_state_([each for each in pieces if each.key != MASTER_KEY])
        places = {(each.tensor, each.offset): each for each in self.layout.segments[bucket]}
        for piece in masters:
            place = places.get((piece.tensor, piece.start if piece.start is not None else 0))
            if (
                place is None
                or not isinstance(piece.value, torch.Tensor)
                or piece.value.numel() != place.stop - place.start
            ):
                raise InvalidRequest(f"the {MASTER_KEY} of tensor {piece.tensor} does not fit bucket {bucket}")
            self._store.masters[bucket][place.start : place.stop].copy_(piece.value.reshape(-1))

    def state_pieces(self, bucket: int) -> list[StatePiece]:
        """The optimizer state of a bucket, and its masters if trainers hold less precise values.

        The tensors alias live state: valid until the next call that changes the shard.
        """
        pieces = self._steppers[bucket].state_pieces()
        values = self._store.masters[bucket]
        if values.dtype != self.layout.buckets[bucket].dtype:
            pieces += [
                StatePiece(tensor=each.tensor, key=MASTER_KEY, start=each.offset, value=values[each.start : each.stop])
                for each in self.layout.segments[bucket]
            ]
        return pieces

    # Gradients

    def push(
        self, push_id: PushId, context_id: int, staging: Pushed, absent: Set[int], commit: CommitInfo | None
    ) -> Report | None:
        """Adds a stream's gradients and buffers to a context; with a commit, it is complete and waits for a round.

        A repeat changes nothing. Returns what the coordinator must hear, again on a repeat that still waits.

        Args:
            staging: every exchanged bucket; may be empty with a commit, if earlier pushes brought the gradients or the
                trainer contributes none (0 samples).
            absent: tensors without a gradient in this push.
        """
        known = self._outcomes.find(push_id)
        if known is None:
            if not self.ready:
                raise InvalidRequest(f"model {self.spec.name!r} is not initialised yet; register it first")
            if any(not 0 <= index < len(self.layout.tensors) for index in absent):
                raise InvalidRequest(f"absent tensors must be indices below {len(self.layout.tensors)}, got {absent}")
            if commit is not None:
                self._check_commit(push_id.trainer_id, commit)
            dispensable = commit is not None and (
                commit.samples == 0 or self._contexts.holds(push_id.trainer_id, context_id)
            )
            pushed = None if dispensable and staging.empty else staging.complete()
            context = self._contexts.open(push_id.trainer_id, context_id)
            if commit is not None and self.replicated and context.absent is not None:
                context.acknowledged = dict(context.buckets), context.absent
            if pushed is not None:
                if staging.lent is not None and commit is None:
                    # Its trainer writes the next push there as soon as it hears of this one.
                    pushed = {index: values.clone() for index, values in pushed.items()}
                elif staging.lent is not None:
                    context.lent = staging.lent
                context.add_(pushed, absent, self._buffer_buckets, self._dtypes)
            if commit is None:
                self._outcomes.record(push_id, Done())
                self._changed(
                    GradientsPushed(push_id=push_id, context_id=context_id, gradients=pushed or {}, absent=absent)
                )
            else:
                self._contexts.commit(context, commit, push_id)
                self._last_step[push_id.trainer_id] = commit.step
                self._history.committed(push_id.trainer_id, commit)
                self._outcomes.record(push_id, Pending())
                return self._report(context)
        elif isinstance(known, Pending):
            waiting = self._contexts.committed_by(push_id)
            return self._report(waiting) if waiting is not None else None
        return None

    def outcome(self, push_id: PushId) -> Outcome | None:
        """What became of a mutation; None if it is unknown, for example because its trainer has ended."""
        return self._outcomes.look(push_id)

    def drop_context(self, push_id: PushId, context_id: int) -> None:
        """Frees a context that will not be committed."""
        if self._outcomes.find(push_id) is None:
            self._contexts.drop(push_id.trainer_id, context_id)
            self._outcomes.record(push_id, Done())
            self._changed(ContextDropped(push_id=push_id, context_id=context_id))

    def _check_commit(self, trainer_id: int, commit: CommitInfo) -> None:
        last = self._last_step.get(trainer_id, 0)
        if commit.step <= last:
            raise InvalidRequest(
                f"trainer {trainer_id} has committed step {last}; expected a later one, got {commit.step}"
            )
        if not 0 <= commit.samples < 1 << 40:
            raise InvalidRequest(f"samples must be in 0..2**40, but is {commit.samples}")
        complex_ones = any(each.dtype.is_complex and each.group >= 0 for each in self.layout.flats)
        if commit.rules.clip_value is not None and complex_ones:
            raise InvalidRequest("clip_value has no meaning for complex parameters; clip by max_norm")
        if len(commit.options) != len(self.spec.optimizer_groups):
            raise InvalidRequest(
                f"model {self.spec.name!r} has {len(self.spec.optimizer_groups)} parameter groups; options came for "
                f"{len(commit.options)}"
            )
        if commit.options is self._good_options:  # those of the step before come as the same object
            return
        for options, group in zip(commit.options, self.spec.optimizer_groups, strict=True):
            check_options(self.spec.optimizer, options, group)
        self._good_options = commit.options

    def _report(self, context: GradientContext) -> Committed:
        assert context.commit is not None
        return Committed(
            model=self.spec.name,
            shard=self.number,
            epoch=self.epoch,
            trainer_id=context.trainer_id,
            commit=context.commit,
        )

    def _initialised(self, trainer_id: int) -> ShardInitialised:
        return ShardInitialised(model=self.spec.name, shard=self.number, epoch=self.epoch, trainer_id=trainer_id)

    # Rounds

    def prepare(self, plan: Plan) -> Prepared:
        """Takes a round's gradients and averages them; repeating it changes nothing.

        Another plan of the same round takes the place of the one before, whose commits wait again.

        Raises:
            InternalError: this shard lacks a contribution. The model cannot go on.
            ModelFailed: it has failed before.
        """
        self._check_next(plan.plan)
        if self._prepared is not None and self._prepared.change.plan.attempt == plan.attempt:
            return self._prepared_report(self._prepared.change)
        self._put_back()
        contexts = [self._take(each) for each in plan.plan.contributions]
        change = self._reduce(plan, contexts)
        for context in contexts:
            self._require_untouched(context)
        self._prepared = _PreparedRound(
            change=change,
            push_ids=[context.push_id for context in contexts],
            contexts=contexts if self.replicated else [],
        )
        self._changed(change)
        return change.report

    def _reduce(self, plan: Plan, contexts: Sequence[GradientContext]) -> RoundPrepared:
        decision, rules = plan.plan, plan.rules
        look = rules.look_for_nonfinite and decision.steps
        nonfinite = self._update.nonfinite(decision, contexts) if look else ()
        means: dict[int, torch.Tensor] = {}
        if decision.steps and self.replicated:
            means = self._update.means(decision, contexts, self._reduced(self.trained))
        elif decision.steps:
            means = {bucket.index: self._update.mean(decision, contexts, bucket) for bucket in self.trained}
        if look and not nonfinite:
            nonfinite = tuple(self._update.count_nonfinite(0, means))
        squares: tuple[float, ...] = ()
        if decision.steps and rules.max_norm is not None:
            squares = tuple(sum_of_squares(means[bucket.index]) for bucket in self.trained)
        report = Prepared(
            model=self.spec.name,
            shard=self.number,
            epoch=self.epoch,
            round=decision.round,
            attempt=plan.attempt,
            squares=squares,
            nonfinite=nonfinite,
        )
        return RoundPrepared(
            plan=plan,
            report=report,
            means=means,
            buffers=self._update.buffers(decision, contexts),
            absent=self._update.absent(decision, contexts),
            push_ids=tuple(context.push_id for context in contexts),
            context_ids=tuple(context.context_id for context in contexts),
        )

    def _prepared_report(self, change: RoundPrepared) -> Prepared:
        return replace(change.report, epoch=self.epoch)

    def _put_back(self) -> None:
        """The plan that was prepared is none: whoever was in it waits again, or is asked again."""
        prepared, self._prepared = self._prepared, None
        if prepared is None:
            return
        here = {context.push_id for context in prepared.contexts if context.commit is not None}
        for context in prepared.contexts:
            self._contexts.put_back(context)
        for contribution, push_id in zip(prepared.change.plan.plan.contributions, prepared.push_ids, strict=True):
            if push_id is not None and push_id not in here:
                self._outcomes.forget(push_id)
                self._last_step[contribution.trainer_id] = contribution.step - 1

    def apply(self, decision: Decision, progress: Progress = _UNWATCHED) -> Applied:
        """Applies a round; one that is applied already changes nothing.

        Args:
            progress: told of what can be known, and read, before the whole shard is at the round.

        Raises:
            InternalError: a round was left out, or this shard lacks a contribution. The model cannot go on.
            ModelFailed: it has failed before.
        """
        if self.failure is None and decision.round <= self.round:
            return self.applied()
        self._check_next(decision)
        prepared, self._prepared = self._prepared, None
        if prepared is None and self.replicated:
            raise InternalError(f"round {decision.round} was decided, but this shard was never told to prepare it")
        contexts = [] if prepared else [self._take(each) for each in decision.contributions]
        push_ids = prepared.push_ids if prepared else [context.push_id for context in contexts]
        results = {
            push_id: _result(decision, contribution)
            for contribution, push_id in zip(decision.contributions, push_ids, strict=True)
            if push_id is not None
        }
        progress.begun(decision.round, results)
        if decision.steps:
            absent = prepared.change.absent if prepared else self._update.absent(decision, contexts)
            mean_of = partial(_mean_of, prepared.change) if prepared else partial(self._update.mean, decision, contexts)
            self._update.step_(decision, mean_of, absent, progress.stepped, self._held)
            self.version += 1
        buffers = prepared.change.buffers if prepared else self._update.buffers(decision, contexts)
        self._update.take_buffers_(decision, buffers, self._held)
        self._publish(decision)
        for context in contexts:
            self._require_untouched(context)
        self.round = decision.round
        for push_id, result in results.items():
            self._outcomes.record(push_id, result)
        self._history.decided(decision)
        self._changed(RoundApplied(decision=decision, version=self.version, checksum=self._checksum_in_turn()))
        return self.applied()

    def state(self) -> ShardState:
        """What a coordinator needs that does not know this shard."""
        return ShardState(
            model=self.spec.name,
            shard=self.number,
            epoch=self.epoch,
            round=self.round,
            version=self.version,
            decisions=self._history.decisions,
            plan=self._prepared.change.plan if self._prepared is not None else None,
            trainers=self._history.trainers,
        )

    def abandon_plan(self) -> list[Report]:
        """The plan that is prepared is none: what it was made of waits again; returns that, as reports."""
        self._put_back()
        return [self._report(context) for context in self._contexts.committed()]

    @staticmethod
    def _require_untouched(context: GradientContext) -> None:
        if context.lent is not None and not context.lent():
            raise InternalError(
                f"trainer {context.trainer_id} wrote to the memory of its push before it had heard of its outcome"
            )

    def _publish(self, decision: Decision) -> None:
        """What the round did not change is of this round as well."""
        stepped = decision.steps
        for bucket in self.buckets:
            if not (stepped and bucket.group >= 0):
                self._store.unchanged(bucket.index, decision.round)

    def reject(self, refusal: Refusal) -> None:
        """Frees a commit that enters no round; one that is not here changes nothing."""
        context = self._contexts.take_committed(refusal.trainer_id, refusal.step)
        if context is not None and context.push_id is not None:
            assert context.commit is not None
            result = StepResult(
                round=refusal.round,
                accepted=False,
                stepped=False,
                overflow=False,
                reason=refusal.reason,
                error=refusal.error,
                num_trainers=0,
                staleness=refusal.staleness,
                grad_norm=None,
                num_nonfinite=0,
                options=context.commit.options,
            )
            self._outcomes.record(context.push_id, result)
            self._history.refused(refusal)
            self._changed(
                StepRefused(push_id=context.push_id, context_id=context.context_id, step=refusal.step, result=result)
            )

    def applied(self) -> Applied:
        """The report of the last applied round."""
        return Applied(
            model=self.spec.name, shard=self.number, epoch=self.epoch, round=self.round, version=self.version
        )

    def _check_next(self, decision: Decision) -> None:
        if self.failure is not None:
            raise ModelFailed(self.failure)
        if decision.round != self.round + 1:
            raise InternalError(f"round {decision.round} came after round {self.round}: one in between is missing")

    def _take(self, contribution: Contribution) -> GradientContext:
        context = self._contexts.take_committed(contribution.trainer_id, contribution.step)
        if context is None:
            raise InternalError(
                f"a decision counts step {contribution.step} of trainer {contribution.trainer_id}, "
                "which this shard does not have"
            )
        return context

    # Everything else

    def read(self, bucket: int) -> memoryview:
        """A bucket's values as bytes in its wire dtype, valid until the next call that changes the shard."""
        return self._store.read(bucket)

    def reports(self) -> list[Report]:
        """All that the coordinator may have missed of a primary while the link was down."""
        found: list[Report] = [ShardCreated(model=self.spec.name, shard=self.number, epoch=self.epoch)]
        for trainer_id in self._initial:
            found.append(self._initialised(trainer_id))
        found.append(self.applied())
        found.extend(self._report(context) for context in self._contexts.committed())
        if self._prepared is not None:
            found.extend(self._report(each) for each in self._prepared.contexts if each.commit is not None)
        if self.ready:
            found.append(self.state())
        if self._prepared is not None:
            found.append(self._prepared_report(self._prepared.change))
        return found

    def end_trainer(self, trainer_id: int) -> None:
        """Frees everything of a trainer whose lease has ended; what it has in a round that is decided stays in it."""
        self._contexts.end_trainer(trainer_id)
        if self._prepared is not None:
            self._prepared.contexts = [each for each in self._prepared.contexts if each.trainer_id != trainer_id]
            self._prepared.push_ids = [
                None if push_id is not None and push_id.trainer_id == trainer_id else push_id
                for push_id in self._prepared.push_ids
            ]
        self._initial.pop(trainer_id, None)
        self._outcomes.forget_trainer(trainer_id)
        self._last_step.pop(trainer_id, None)
        self._history.forget_trainer(trainer_id)
        self._changed(TrainerGone(trainer_id=trainer_id))

    # Replicas

    def redo(self, change: Change) -> None:
        """Does on a replica what has happened on the primary, in the same order; repeats of rounds change nothing.

        Raises:
            InternalError: the two are not the same.
        """
        if isinstance(change, RoundPrepared):
            self._redo_prepared(change)
        elif isinstance(change, RoundApplied):
            self._redo_applied(change)
        elif isinstance(change, StepRefused):
            self._contexts.take_open(change.push_id.trainer_id, change.context_id)
            self._outcomes.redo(change.push_id, change.result)
            self._last_step[change.push_id.trainer_id] = change.step
            self._history.refused(_refusal(change))
        elif isinstance(change, GradientsPushed):
            context = self._contexts.open(change.push_id.trainer_id, change.context_id)
            context.add_(dict(change.gradients), change.absent, self._buffer_buckets, self._dtypes)
            self._outcomes.redo(change.push_id, Done())
        elif isinstance(change, ContextDropped):
            self._contexts.drop(change.push_id.trainer_id, change.context_id)
            self._outcomes.redo(change.push_id, Done())
        elif isinstance(change, TrainerGone):
            self.end_trainer(change.trainer_id)
        elif isinstance(change, Bookkeeping):
            self._begin_anew(change)
        elif isinstance(change, ContextHeld):
            context = self._contexts.open(change.trainer_id, change.context_id)
            context.buckets, context.absent = dict(change.gradients), change.absent
        else:
            self._take_bucket(change)

    def _redo_prepared(self, change: RoundPrepared) -> None:
        if change.plan.plan.round <= self.round:
            return
        self._check_next(change.plan.plan)
        self._put_back()
        contexts: list[GradientContext] = []
        for contribution, push_id, context_id in zip(
            change.plan.plan.contributions, change.push_ids, change.context_ids, strict=True
        ):
            context = self._contexts.take_open(contribution.trainer_id, context_id)
            if context is not None:
                contexts.append(context)
            if push_id is not None:
                self._outcomes.redo(push_id, Pending())
                self._last_step[contribution.trainer_id] = contribution.step
        self._prepared = _PreparedRound(change=change, push_ids=list(change.push_ids), contexts=contexts)

    def _redo_applied(self, change: RoundApplied) -> None:
        if change.decision.round <= self.round:
            return
        self.apply(change.decision)
        if change.version != self.version:
            raise InternalError(
                f"after round {self.round} the primary of shard {self.number} is at version {change.version}, its "
                f"replica at {self.version}"
            )
        expected = change.checksum
        if expected is None or (self._held is not None and expected.bucket not in self._held):
            return
        found = self._checksum(expected.bucket)
        if found != expected.value:
            raise InternalError(
                f"after round {self.round} bucket {expected.bucket} of shard {self.number} has the checksum "
                f"{found:08x} on its replica, and {expected.value:08x} on the primary"
            )

    def state_parts(self) -> list[StatePart | RoundPrepared]:
        """All but the buckets, for a replica that has nothing. After them it must hear of all that happens."""
        parts: list[StatePart | RoundPrepared] = [self._bookkeeping()]
        in_plan = self._prepared.contexts if self._prepared is not None else []
        parts += [
            ContextHeld(
                trainer_id=context.trainer_id,
                context_id=context.context_id,
                gradients=dict(held[0]),
                absent=held[1],
            )
            for context in (*self._contexts, *in_plan)
            if (held := context.replicated) is not None
        ]
        if self._prepared is not None:
            parts.append(replace(self._prepared.change, push_ids=tuple(self._prepared.push_ids)))
        return parts

    def bucket_part(self, number: int) -> BucketHeld:
        """A bucket by its place in `buckets`; the tensors are live ones, until the shard changes."""
        bucket = self.buckets[number]
        return BucketHeld(
            bucket=bucket.index,
            round=self.round,
            master=self._store.masters[bucket.index],
            state=self._steppers[bucket.index].state_pieces() if bucket.index in self._steppers else (),
            last=number + 1 == len(self.buckets),
        )

    def _bookkeeping(self) -> Bookkeeping:
        waiting = {context.trainer_id: context for context in reversed(list(self._contexts.committed()))}
        records: list[TrainerRecord] = []
        for trainer_id, lowest, outcomes in self._outcomes.trainers():
            first = waiting.get(trainer_id)
            last_step = self._last_step.get(trainer_id, 0)
            if first is not None and first.commit is not None:
                last_step = first.commit.step - 1
            records.append(
                TrainerRecord(
                    trainer_id=trainer_id,
                    last_step=last_step,
                    lowest_unacknowledged=lowest,
                    outcomes={
                        sequence: outcome if isinstance(outcome, StepResult) else None
                        for sequence, outcome in outcomes.items()
                        if not isinstance(outcome, Pending)
                    },
                )
            )
        return Bookkeeping(round=self.round, version=self.version, trainers=records, decisions=self._history.decisions)

    def _begin_anew(self, change: Bookkeeping) -> None:
        self.round, self.version = change.round, change.version
        self.ready = False
        self._held = set()
        self._prepared = None
        self._contexts, self._outcomes, self._last_step = ContextTable(), DedupTable(), {}
        self._history = History(change.decisions)
        for each in change.trainers:
            outcomes = {sequence: Done() if found is None else found for sequence, found in each.outcomes.items()}
            self._outcomes.restore(each.trainer_id, each.lowest_unacknowledged, outcomes)
            if each.last_step:
                self._last_step[each.trainer_id] = each.last_step

    def _take_bucket(self, change: BucketHeld) -> None:
        if self._held is None or change.round != self.round:
            raise InternalError(
                f"bucket {change.bucket} came as of round {change.round}; this replica is at {self.round}"
            )
        with self._store.changing(change.bucket, self.round) as master:
            master.copy_(change.master)
        if change.bucket in self._steppers:
            self._steppers[change.bucket].load_state_(change.state)
        self._held.add(change.bucket)
        if change.last:
            self._held = None
            self.ready = True

    def promoted(self, epoch: int, living: Set[int]) -> ShardPromoted:
        """This replica is the primary from now on.

        Args:
            living: trainers whose lease runs; what there is of others goes.
        """
        self.epoch = epoch
        self._is_replica = False
        known = {trainer_id for trainer_id, _, _ in self._outcomes.trainers()} | self._last_step.keys()
        known |= {context.trainer_id for context in self._contexts}
        for trainer_id in known - living:
            self.end_trainer(trainer_id)
        return self.promotion()

    @property
    def is_preparing(self) -> bool:
        """Whether a round is prepared, and not applied."""
        return self._prepared is not None

    def promotion(self) -> ShardPromoted:
        """What the coordinator hears of a replica that is the primary now."""
        return ShardPromoted(
            model=self.spec.name,
            shard=self.number,
            epoch=self.epoch,
            round=self.round,
            version=self.version,
            attempt=self._prepared.change.plan.attempt if self._prepared is not None else 0,
        )

    def _checksum_in_turn(self) -> Checksum | None:
        turn, left = divmod(self.round, CHECK_EVERY_ROUNDS)
        if left or not self.replicated or self._is_replica or not self.buckets:
            return None
        bucket = self.buckets[turn % len(self.buckets)].index
        return Checksum(bucket=bucket, value=self._checksum(bucket))

    def _checksum(self, bucket: int) -> int:
        found = zlib.crc32(memory_of(self._store.masters[bucket]))
        for piece in self._steppers[bucket].state_pieces() if bucket in self._steppers else ():
            value = piece.value
            data = to_bytes(value) if isinstance(value, torch.Tensor) else repr(value).encode()
            found = zlib.crc32(data, zlib.crc32(f"{piece.tensor} {piece.key}".encode(), found))
        return found


def _refusal(change: StepRefused) -> Refusal:
    result = change.result
    return Refusal(
        trainer_id=change.push_id.trainer_id,
        step=change.step,
        round=result.round,
        staleness=result.staleness,
        reason=result.reason,
        error=result.error,
    )


def _mean_of(change: RoundPrepared, bucket: Bucket) -> torch.Tensor:
    return change.means[bucket.index]


def _result(decision: Decision, contribution: Contribution) -> StepResult:
    return StepResult(
        round=decision.round,
        accepted=True,
        stepped=not decision.skip,
        overflow=decision.overflow,
        reason=decision.skip,
        error=decision.error,
        num_trainers=len(decision.contributions),
        staleness=contribution.staleness,
        grad_norm=decision.grad_norm,
        num_nonfinite=decision.num_nonfinite,
        options=decision.options,
    )
