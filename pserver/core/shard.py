"""One server's part of a model: values, optimizer state, contexts, and the outcome of every mutation.

Nothing here waits, and nothing is thread-safe: the owner runs one call at a time.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass

import torch

from pserver.core.contexts import CommitInfo, ContextTable, GradientContext
from pserver.core.dedup import DedupTable
from pserver.core.messages import (
    Applied,
    Committed,
    Contribution,
    CreateShard,
    Decision,
    Report,
    ShardCreated,
    ShardInitialised,
)
from pserver.core.optimizers import check_options
from pserver.core.reduce import weighted_mean_
from pserver.core.staging import Staging
from pserver.core.stepping import BucketStepper
from pserver.errors import InternalError, InvalidRequest, LayoutMismatch, ModelFailed, StaleEpoch
from pserver.types import PushId, StepResult
from pserver.wire.layout import STORED, Bucket, build_layout
from pserver.wire.tensors import element_type, memory_of


@dataclass(frozen=True, slots=True)
class Pending:
    """Outcome of a mutation that waits for a round."""


@dataclass(frozen=True, slots=True)
class Done:
    """Outcome of a mutation that has no result of its own."""


Outcome = StepResult | Pending | Done


class Shard:
    """The buckets `first_bucket` to `last_bucket` of a model.

    Args:
        command: what to make.

    Raises:
        UnsupportedOptimizer: torch refuses the optimizer's arguments.
        InvalidRequest: buckets that the model does not have.
    """

    def __init__(self, command: CreateShard) -> None:
        self.spec = command.spec
        self.epoch = command.epoch
        self.layout = build_layout(command.spec.tensors, command.spec.bucket_bytes)
        if not 0 <= command.first_bucket <= command.last_bucket <= len(self.layout.buckets):
            raise InvalidRequest(
                f"model {self.spec.name!r} has {len(self.layout.buckets)} buckets; expected a part of them, got "
                f"{command.first_bucket} to {command.last_bucket}"
            )
        self.buckets: tuple[Bucket, ...] = self.layout.buckets[command.first_bucket : command.last_bucket]
        self.trained: tuple[Bucket, ...] = tuple(each for each in self.buckets if each.group != STORED)
        self.round = 0
        self.version = 0
        self.ready = False
        self.failure: str | None = None
        self._initial: dict[int, dict[int, torch.Tensor]] = {}  # by trainer, until the coordinator says whose count
        self._values = {
            bucket.index: torch.zeros(bucket.num_elements, dtype=element_type(bucket.dtype).master)
            for bucket in self.buckets
        }
        self._steppers = {
            bucket.index: BucketStepper(
                self.spec.optimizer,
                self.spec.optimizer_groups[bucket.group],
                self._values[bucket.index],
                self.layout.segments[bucket.index],
            )
            for bucket in self.trained
        }
        self._contexts = ContextTable()
        self._outcomes: DedupTable[Outcome] = DedupTable()
        self._last_step: dict[int, int] = {}

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

    def initialise(self, push_id: PushId, staging: Staging) -> Report:
        """Takes every value of this shard, to be used if the coordinator settles on this trainer's."""
        if self._outcomes.find(push_id) is None:
            if self.ready:
                raise InvalidRequest(f"model {self.spec.name!r} is ready and trained; its values are not overwritten")
            self._initial[push_id.trainer_id] = staging.complete()
            self._outcomes.record(push_id, Done())
        return ShardInitialised(model=self.spec.name, epoch=self.epoch, trainer_id=push_id.trainer_id)

    def make_ready(self, initialiser: int) -> None:
        """Fills the shard with one trainer's values; a shard that is ready already keeps what it has.

        Raises:
            InternalError: that trainer has sent none.
        """
        if self.ready:
            return
        if initialiser not in self._initial:
            raise InternalError(
                f"model {self.spec.name!r}: this shard lacks the initial values of trainer {initialiser}"
            )
        for index, values in self._initial[initialiser].items():
            self._values[index].copy_(values)
        self._initial.clear()
        self.ready = True

    # Gradients

    def push(
        self, push_id: PushId, context_id: int, staging: Staging, absent: Set[int], commit: CommitInfo | None
    ) -> Report | None:
        """Adds a stream's gradients to a context; with a commit, the context is complete and waits for a round.

        A repeat changes nothing. Returns what the coordinator must hear, again on a repeat that still waits.

        Args:
            staging: every trained bucket; may be empty with a commit, if earlier pushes brought the gradients.
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
            held = self._contexts.holds(push_id.trainer_id, context_id)
            gradients = None if held and commit is not None and staging.empty else staging.complete()
            context = self._contexts.open(push_id.trainer_id, context_id)
            if gradients is not None:
                context.add_(gradients, absent)
            if commit is None:
                self._outcomes.record(push_id, Done())
            else:
                context.commit, context.push_id = commit, push_id
                self._last_step[push_id.trainer_id] = commit.step
                self._outcomes.record(push_id, Pending())
                return self._report(context)
        elif isinstance(known, Pending):
            return next((self._report(each) for each in self._contexts.committed() if each.push_id == push_id), None)
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
        if len(commit.options) != len(self.spec.optimizer_groups):
            raise InvalidRequest(
                f"model {self.spec.name!r} has {len(self.spec.optimizer_groups)} parameter groups; options came for "
                f"{len(commit.options)}"
            )
        for options, group in zip(commit.options, self.spec.optimizer_groups, strict=True):
            check_options(self.spec.optimizer, options, group)

    def _report(self, context: GradientContext) -> Committed:
        assert context.commit is not None
        return Committed(
            model=self.spec.name,
            epoch=self.epoch,
            trainer_id=context.trainer_id,
            step=context.commit.step,
            samples=context.commit.samples,
            options=context.commit.options,
        )

    # Rounds

    def apply(self, decision: Decision) -> Applied:
        """Applies a round; one that is applied already changes nothing.

        Raises:
            InternalError: a round was left out, or this shard lacks a contribution. The model cannot go on.
            ModelFailed: it has failed before.
        """
        if self.failure is not None:
            raise ModelFailed(self.failure)
        if decision.round <= self.round:
            return self.applied()
        if decision.round != self.round + 1:
            raise InternalError(f"round {decision.round} came after round {self.round}: one in between is missing")
        contexts = [self._take(each) for each in decision.contributions]
        if decision.divisor:
            self._step(decision, contexts)
            self.version += 1
        self.round = decision.round
        result = StepResult(
            round=decision.round, accepted=True, reason="", num_trainers=len(contexts), options=decision.options
        )
        for context in contexts:
            if context.push_id is not None:
                self._outcomes.record(context.push_id, result)
        return self.applied()

    def applied(self) -> Applied:
        """The report of the last applied round."""
        return Applied(model=self.spec.name, epoch=self.epoch, round=self.round, version=self.version)

    def _take(self, contribution: Contribution) -> GradientContext:
        context = self._contexts.take_committed(contribution.trainer_id, contribution.step)
        if context is None:
            raise InternalError(
                f"a decision counts step {contribution.step} of trainer {contribution.trainer_id}, "
                "which this shard does not have"
            )
        return context

    def _step(self, decision: Decision, contexts: Sequence[GradientContext]) -> None:
        counted = [
            (each, context) for each, context in zip(decision.contributions, contexts, strict=True) if each.weight
        ]
        absent = frozenset.intersection(*(frozenset(context.absent or ()) for _, context in counted))
        for bucket in self.trained:
            master = self._values[bucket.index].dtype
            gradients = [context.buckets.pop(bucket.index).to(master) for _, context in counted]
            mean = weighted_mean_(gradients, [each.weight for each, _ in counted], decision.divisor)
            self._steppers[bucket.index].step_(mean, absent, decision.options[bucket.group])

    # Everything else

    def read(self, bucket: int) -> memoryview:
        """A bucket's values as bytes in its wire dtype, valid until the next call that changes the shard."""
        wire_dtype = self.layout.buckets[bucket].dtype
        return memory_of(self._values[bucket].to(wire_dtype))

    def reports(self) -> list[Report]:
        """All that the coordinator may have missed while the link was down."""
        found: list[Report] = [ShardCreated(model=self.spec.name, epoch=self.epoch)]
        for trainer_id in self._initial:
            found.append(ShardInitialised(model=self.spec.name, epoch=self.epoch, trainer_id=trainer_id))
        found.append(self.applied())
        found.extend(self._report(context) for context in self._contexts.committed())
        return found

    def end_trainer(self, trainer_id: int) -> None:
        """Frees everything of a trainer whose lease has ended."""
        self._contexts.end_trainer(trainer_id)
        self._initial.pop(trainer_id, None)
        self._outcomes.forget_trainer(trainer_id)
        self._last_step.pop(trainer_id, None)
