"""One server's part of a model: values, optimizer state, contexts, and the outcome of every mutation.

Nothing here waits, and nothing is thread-safe: the owner runs one call at a time.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import torch

from pserver.core.contexts import ContextTable, GradientContext
from pserver.core.dedup import DedupTable
from pserver.core.messages import (
    Applied,
    CommitInfo,
    Committed,
    Contribution,
    CreateShard,
    Decision,
    Prepare,
    Prepared,
    Reject,
    Report,
    ShardCreated,
    ShardInitialised,
)
from pserver.core.optimizer_state import MASTER_KEY, StatePiece
from pserver.core.optimizers import check_options, optimizer_entry
from pserver.core.reduce import sum_of_squares
from pserver.core.staging import Pushed, Staging
from pserver.core.stepping import BucketStepper
from pserver.core.sync import make_policy
from pserver.core.update import Update
from pserver.core.value_store import Publication, ValueStore
from pserver.errors import InternalError, InvalidRequest, LayoutMismatch, ModelFailed, StaleEpoch
from pserver.types import GroupOptions, PushId, StepResult
from pserver.wire.layout import BUFFERS, STORED, Bucket, Layout


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
    """A round whose gradients have been taken and averaged, but not stepped with yet."""

    report: Prepared
    contexts: list[GradientContext]
    means: dict[int, torch.Tensor]


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

    Raises:
        UnsupportedOptimizer: torch refuses the optimizer's arguments.
        InvalidRequest: buckets that the model does not have.
    """

    def __init__(
        self, command: CreateShard, layout: Layout | None = None, publication: Publication | None = None
    ) -> None:
        self.spec = command.spec
        self.epoch = command.epoch
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
        return ShardInitialised(model=self.spec.name, epoch=self.epoch, trainer_id=push_id.trainer_id)

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
            if pushed is not None:
                if staging.lent is not None and commit is None:
                    # Its trainer writes the next push there as soon as it hears of this one.
                    pushed = {index: values.clone() for index, values in pushed.items()}
                elif staging.lent is not None:
                    context.lent = staging.lent
                context.add_(pushed, absent, self._buffer_buckets, self._dtypes)
            if commit is None:
                self._outcomes.record(push_id, Done())
            else:
                self._contexts.commit(context, commit, push_id)
                self._last_step[push_id.trainer_id] = commit.step
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
        return Committed(model=self.spec.name, epoch=self.epoch, trainer_id=context.trainer_id, commit=context.commit)

    # Rounds

    def prepare(self, command: Prepare) -> Prepared:
        """Takes a round's gradients and averages them; repeating it changes nothing.

        Raises:
            InternalError: this shard lacks a contribution. The model cannot go on.
            ModelFailed: it has failed before.
        """
        self._check_next(command.plan)
        if self._prepared is None:
            contexts = [self._take(each) for each in command.plan.contributions]
            nonfinite = self._update.nonfinite(command.plan, contexts) if command.look_for_nonfinite else ()
            means = self._update.means(command.plan, contexts)
            if command.look_for_nonfinite and not nonfinite:
                nonfinite = tuple(self._update.count_nonfinite(0, means))
            report = Prepared(
                model=self.spec.name,
                epoch=self.epoch,
                round=command.plan.round,
                squares=tuple(sum_of_squares(means[bucket.index]) for bucket in self.trained),
                nonfinite=nonfinite,
            )
            self._prepared = _PreparedRound(report=report, contexts=contexts, means=means)
        return self._prepared.report

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
        contexts = prepared.contexts if prepared else [self._take(each) for each in decision.contributions]
        results = {
            context.push_id: _result(decision, contribution)
            for contribution, context in zip(decision.contributions, contexts, strict=True)
            if context.push_id is not None
        }
        progress.begun(decision.round, results)
        if decision.steps:
            self._update.step_(decision, contexts, prepared.means if prepared else None, progress.stepped)
            self.version += 1
        if decision.divisor:
            self._update.take_buffers_(decision, contexts)
        self._publish(decision)
        for context in contexts:
            if context.lent is not None and not context.lent():
                raise InternalError(
                    f"trainer {context.trainer_id} wrote to the memory of its push before it had heard of its outcome"
                )
        self.round = decision.round
        for push_id, result in results.items():
            self._outcomes.record(push_id, result)
        return self.applied()

    def _publish(self, decision: Decision) -> None:
        """What the round did not change is of this round as well."""
        stepped = decision.steps
        for bucket in self.buckets:
            if not (stepped and bucket.group >= 0):
                self._store.unchanged(bucket.index, decision.round)

    def reject(self, command: Reject) -> None:
        """Frees a commit that enters no round; one that is not here changes nothing."""
        context = self._contexts.take_committed(command.trainer_id, command.step)
        if context is not None and context.push_id is not None:
            assert context.commit is not None
            result = StepResult(
                round=command.round,
                accepted=False,
                stepped=False,
                overflow=False,
                reason=command.reason,
                error=command.error,
                num_trainers=0,
                staleness=command.staleness,
                grad_norm=None,
                num_nonfinite=0,
                options=context.commit.options,
            )
            self._outcomes.record(context.push_id, result)

    def applied(self) -> Applied:
        """The report of the last applied round."""
        return Applied(model=self.spec.name, epoch=self.epoch, round=self.round, version=self.version)

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
        """All that the coordinator may have missed while the link was down."""
        found: list[Report] = [ShardCreated(model=self.spec.name, epoch=self.epoch)]
        for trainer_id in self._initial:
            found.append(ShardInitialised(model=self.spec.name, epoch=self.epoch, trainer_id=trainer_id))
        found.append(self.applied())
        found.extend(self._report(context) for context in self._contexts.committed())
        return found

    def end_trainer(self, trainer_id: int) -> None:
        """Frees everything of a trainer whose lease has ended; what it has in a round that is decided stays in it."""
        self._contexts.end_trainer(trainer_id)
        for context in self._prepared.contexts if self._prepared is not None else ():
            if context.trainer_id == trainer_id:
                context.push_id = None
        self._initial.pop(trainer_id, None)
        self._outcomes.forget_trainer(trainer_id)
        self._last_step.pop(trainer_id, None)


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
