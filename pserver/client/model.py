"""A model whose parameters live on servers: its steps, as a trainer takes them."""

import logging
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from pserver.client.cluster import Cluster
from pserver.client.description import ModelDescription
from pserver.client.optimizer_state import TensorStates, check_state, join_state, with_present_masters
from pserver.client.registration import Registration
from pserver.client.replica import Replica
from pserver.client.shard_client import Push
from pserver.client.shards import Pushing, Shards
from pserver.client.step_counts import ModelStatistics, StepCounts
from pserver.client.undecided import Undecided
from pserver.core.messages import CommitInfo
from pserver.core.optimizers import check_options
from pserver.core.rules import GradientRules
from pserver.core.sync import Async
from pserver.errors import ERRORS, DeadlineExceeded, InvalidRequest, PserverError, ServerErrors
from pserver.transport.gen import coordinator_pb2 as pb
from pserver.types import GroupOptions, PushId, StepResult
from pserver.wire.layout import Layout

logger = logging.getLogger(__name__)

#: Time left for asking the coordinator who is missing after a step ran into its deadline, in seconds.
ASK_WHO_TIMEOUT_S = 2.0


class SharedModel:
    """One model's tensors on this trainer, and the same on the servers. One thread at a time.

    Making it registers the model: the first trainer's values win and overwrite the tensors of all others.

    Args:
        cluster: started session.
        description: what is shared.

    Raises:
        UnsupportedModel, UnsupportedOptimizer, InvalidRequest: it cannot be shared.
        LayoutMismatch: another trainer registered it differently; names the first difference.
        DeadlineExceeded: it was not ready in time; says what is missing.
    """

    def __init__(self, cluster: Cluster, description: ModelDescription) -> None:
        self.name = description.name
        self.last_result: StepResult | None = None
        self._cluster = cluster
        self._sync = description.sync
        self._counts = StepCounts()
        self._registration = Registration(cluster, description.sync, self._counts)
        self._step = 0
        self._unsettled: Push | None = None
        self._warned = False
        self._absent: frozenset[int] = frozenset()
        self._early: _Early | None = None
        self._pending: _Pending | None = None
        self._codec_layout: int | None = None
        self.codec_state: Any = None
        self._register(Replica(description, cluster.world_size), {}, replaces=0)

    @property
    def layout(self) -> Layout:
        """Where the model's tensors are in buckets."""
        return self._replica.layout

    @property
    def stepped(self) -> Mapping[int, torch.Tensor]:
        """The parameters that are stepped, by index in the layout."""
        return self._replica.stepped

    @property
    def exchanged(self) -> Mapping[int, torch.Tensor]:
        """Parameters and buffers that get new values with each step, by index in the layout."""
        return self._replica.exchanged

    @property
    def round(self) -> int:
        """Round of the values that this trainer holds."""
        return self._round

    def replace(self, description: ModelDescription, state: TensorStates) -> None:
        """Goes on with another description or other values, once every trainer of the model asks for the same.

        Rounds and steps count on. Values and optimizer state are those of the lowest rank among the trainers that have
        the latest values: under `Bsp` all have. If it fails, everything here is as it was.

        Args:
            description: of the same name, policy and world size.
            state: optimizer state by index in the description's tensors; others begin anew.

        Raises:
            LayoutMismatch: another trainer asks for something else. InvalidRequest: a state that servers cannot take.
            DeadlineExceeded: names who has not asked.
        """
        self.abandon_early()
        self._settle(scatter=False)
        replica = Replica(description, self._cluster.world_size)
        state = with_present_masters(state, replica.tensors)
        check_state(replica.layout, state, replica.spec.optimizer, replica.spec.optimizer_groups)
        self._register(replica, state, replaces=self._shards.epoch)

    def _register(self, replica: Replica, state: TensorStates, *, replaces: int) -> None:
        shards, round_number, last_step = self._registration.register(replica, state, replaces=replaces)
        if replaces:
            self._shards.stop()
        self._shards: Shards = shards
        self._replica: Replica = replica
        self._round: int = round_number
        self._step = max(self._step, last_step)
        if self._codec_layout != replica.layout.fingerprint:
            # What a codec remembers is of buckets; of others it knows nothing.
            self._codec_layout, self.codec_state = replica.layout.fingerprint, replica.coding.codec.make_state()
            self._undecided: Undecided = Undecided(replica.coding.codec, self.codec_state)

    def pull_state(self) -> dict[int, dict[str, object]]:
        """Reads the optimizer state: by index in the description's tensors, under torch's names, on the CPU.

        Values have the dtype of the master; where trainers hold half precision, `master_param` has the master itself.

        Raises:
            ServerUnavailable, DeadlineExceeded, ModelFailed
        """
        self._settle(scatter=False)
        return join_state(self._replica.layout, self._shards.pull_state(self._round))

    def push(self, context_id: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Adds gradients to a context on every shard, without a commit.

        If it was interrupted, the same is sent again before anything else: it is in the context on all shards.

        Args:
            gradients: one for each parameter that is stepped, in order of registration; None counts as zero.
        """
        self._settle()
        self._unsettled = Push(
            push_id=self._cluster.push_ids.issue(),
            context_id=context_id,
            absent=self._gather(context_id, gradients),
            with_gradients=True,
            commit=None,
        )
        self._finish(_Pending(self._shards.push(self._unsettled)))

    def send_early(self, gradients: Mapping[int, torch.Tensor], buckets: Sequence[int]) -> None:
        """Sends a part of the next step's gradients, if no earlier step is unsettled; `step` sends what is left.

        May be called from another thread, while no other method is.

        Args:
            gradients: by index in the layout.
            buckets: those that are complete with them.
        """
        if self._unsettled is not None:
            return
        with self._counts.communicating.running():
            self._send_early(gradients, buckets)

    def _send_early(self, gradients: Mapping[int, torch.Tensor], buckets: Sequence[int]) -> None:
        self._replica.check(gradients)
        if self._early is None:
            self._begin_early(self._cluster.contexts.new_id())
        assert self._early is not None
        self._early.buckets -= self._replica.buckets_with(gradients)
        self._undecided.encoding(buckets)
        self._shards.gather(gradients, buckets, self.codec_state)
        self._early.tensors |= gradients.keys()
        self._early.buckets |= set(buckets)
        self._shards.send(buckets)

    def _begin_early(self, context_id: int) -> None:
        self._early = _Early(self._cluster.push_ids.issue(), context_id)
        self._shards.prepare()
        self._shards.begin(self._early.push_id, context_id)

    def abandon_early(self) -> None:
        """What was sent early is not wanted."""
        early, self._early = self._early, None
        if early is not None:
            with suppress(InvalidRequest):  # the session has ended, and with it the push
                self._shards.abandon()
            self._undecided.take_all_back()
            self._cluster.push_ids.settle(early.push_id)

    def step(
        self,
        context_id: int,
        gradients: Sequence[torch.Tensor | None] | None,
        *,
        samples: int,
        options: Sequence[GroupOptions],
        rules: GradientRules,
        overflow: bool = False,
    ) -> StepResult:
        """`begin_step` and `complete`; returns what became of the step."""
        with self._counts.standing_still():
            self.begin_step(context_id, gradients, samples=samples, options=options, rules=rules, overflow=overflow)
            self.complete()
        assert self.last_result is not None
        return self.last_result

    def begin_step(
        self,
        context_id: int,
        gradients: Sequence[torch.Tensor | None] | None,
        *,
        samples: int,
        options: Sequence[GroupOptions],
        rules: GradientRules,
        overflow: bool = False,
    ) -> None:
        """Pushes gradients and buffers, and commits the context; `complete` waits for the outcome and the new values.

        What an earlier step raises, if it was not completed, is raised here first. If that was interrupted before its
        outcome was known, it is settled. Gradients that travel as the same bits are that step again, and its outcome is
        the result: each is counted at most once. Others were computed on the parameters of before, and count as that
        old.

        Args:
            gradients: as in `push`; None commits what earlier pushes brought, or nothing at all with 0 samples.
            samples: weight of this gradient in the mean, 0 or more.
            options: numeric optimizer options per group.
            rules: what to do with the mean gradient.
            overflow: the gradient has infinities because of loss scaling; nobody steps in this round.

        Raises:
            DeadlineExceeded: the round was not decided in time; names the trainers it waits for.
            RoundFailed, NonFiniteGradient: the policy says so; the values are those of the servers all the same.
            InvalidRequest: parameters were changed here since the last step.
            ModelFailed, TrainerEnded, ServerUnavailable, ServerErrors
        """
        self.complete()
        with self._counts.standing_still():
            self._begin_step(context_id, gradients, samples, options, rules, overflow)

    def _begin_step(
        self,
        context_id: int,
        gradients: Sequence[torch.Tensor | None] | None,
        samples: int,
        options: Sequence[GroupOptions],
        rules: GradientRules,
        overflow: bool,
    ) -> None:
        self._replica.check_unchanged(self._shards.holds)
        base_round = self._round
        # Here, before anything is sent: what one shard refuses and another takes would never be whole.
        for group, registered in zip(options, self._replica.spec.optimizer_groups, strict=True):
            check_options(self._replica.spec.optimizer, group, registered)
        if rules.clip_value is not None and self._replica.has_complex_parameters:
            raise InvalidRequest("clip_value has no meaning for complex parameters; clip by max_norm")
        if samples == 0 and self._sync.name == Async.name:
            raise InvalidRequest("under Async nobody waits for this trainer: expected samples, or no step at all")
        again = self._is_again(context_id, gradients)
        settled = self._settle()
        if again and settled is not None:
            self._told(settled)
            return
        if gradients is None or not samples:
            self.abandon_early()
        absent: Set[int] = frozenset()
        in_parts = self._early is None and samples > 0 and self._shards.streams and len(self._replica.parts) > 1
        if self._early is not None:
            context_id = self._early.context_id
        if gradients is not None:
            absent = self._gather(context_id, gradients, counts=samples > 0, in_parts=in_parts)
        self._step += 1
        early, self._early = self._early, None
        self._unsettled = Push(
            push_id=self._cluster.push_ids.issue() if early is None else early.push_id,
            context_id=context_id,
            absent=absent,
            with_gradients=gradients is not None,
            early=frozenset() if early is None else frozenset(early.buckets),
            commit=CommitInfo(
                step=self._step,
                base_round=base_round,
                samples=samples,
                options=tuple(options),
                rules=rules,
                overflow=overflow,
            ),
        )
        self._pending = _Pending(self._shards.push(self._unsettled))

    def take(self, tensors: Iterable[int]) -> None:
        """Gives some tensors the values of a step that was late, as soon as these have arrived; raises as `step` does.

        Args:
            tensors: by index in the layout.
        """
        pending = self._pending
        if pending is not None:
            with self._counts.standing_still():
                if not self._take(tensors, pending):
                    self.complete()

    def _take(self, tensors: Iterable[int], pending: "_Pending") -> bool:
        """Waits for the values of some tensors; False if they are to be had together with all others only."""
        wanted = {
            index: tensor
            for index in tensors
            if index not in pending.taken and (tensor := self._replica.exchanged[index]).numel()
        }
        arrivals = pending.pushing.arrivals
        if not wanted or arrivals is None:
            return not wanted
        buckets = self._replica.buckets_with(wanted)
        with arrivals.taking(buckets) as round_number:
            if round_number is None:
                return False
            self._replica.writing(wanted)
            if not self._shards.take_(wanted, buckets):
                return False
            self._replica.written(wanted)
            pending.taken |= wanted.keys()
            pending.rounds.add(round_number)
        return True

    def complete(self) -> None:
        """Waits for a step that was late, and gives all tensors their new values; raises as `step` does."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        with self._counts.standing_still():
            if len(self._replica.parts) > 1:
                self._take_in_parts(pending)
            result = self._finish(pending)
        assert result is not None
        self._told(result)

    def _take_in_parts(self, pending: "_Pending") -> None:
        """While one part is copied, the next arrives."""
        for part in self._replica.parts:
            if not self._take(part, pending):
                return

    def _told(self, result: StepResult) -> None:
        self.last_result = result
        if result.error:
            raise ERRORS.get(result.error, PserverError)(f"model {self.name!r}: {result.reason}")

    def _is_again(self, context_id: int, gradients: Sequence[torch.Tensor | None] | None) -> bool:
        """Whether a step is the interrupted one once more."""
        push = self._unsettled
        if push is None or push.commit is None:
            return False
        if push.context_id == context_id or gradients is None or not push.with_gradients:
            return push.context_id == context_id
        return all(
            index in self._absent if each is None else self._shards.gathered(index, each)
            for index, each in self._replica.by_index(gradients).items()
        )

    def _gather(
        self,
        context_id: int,
        gradients: Sequence[torch.Tensor | None],
        *,
        counts: bool = True,
        in_parts: bool = False,
    ) -> frozenset[int]:
        """Makes gradients and buffers ready to be sent; returns the parameters of which nothing is sent.

        Args:
            counts: whether the gradients have weight in the mean; if not, what the codec remembers stays as it is.
            in_parts: begin the push here, as an early one.
        """
        tensors = self._replica.to_send(gradients)
        if in_parts:
            self._begin_early(context_id)
            self._send_in_parts(tensors)
        if self._early is None:
            self._shards.prepare()
            buckets = self._replica.exchanged_buckets
        elif in_parts:
            tensors = {index: tensor for index, tensor in tensors.items() if index not in self._early.tensors}
            buckets = self._replica.exchanged_buckets - self._early.buckets
        else:
            # A gradient may have been written to without a trace, through `.data`: only its bits tell.
            known = self._early.tensors
            tensors = {
                index: tensor
                for index, tensor in tensors.items()
                if index not in known or tensor is None or not self._shards.gathered(index, tensor)
            }
            self._early.buckets -= self._replica.buckets_with(tensors)
            buckets = self._replica.exchanged_buckets - self._early.buckets
        self._undecided.encoding(buckets)
        self._absent = frozenset(index for index, each in self._replica.by_index(gradients).items() if each is None)
        absent = self._absent - self._undecided.kept_of(self._absent, self._replica.layout)
        try:
            codec_state = self.codec_state if counts else self._replica.coding.codec.make_state()
            self._shards.gather(tensors, buckets, codec_state)
        except BaseException:
            self._undecided.take_all_back()
            self.abandon_early()
            raise
        self._undecided.add(context_id)
        return absent

    def _send_in_parts(self, tensors: Mapping[int, torch.Tensor | None]) -> None:
        """While one part is copied, the one before is on its way. Parts with an absent gradient are left."""
        sent: set[int] = set()
        for part in self._replica.parts:
            found = {index: tensor for index in part if (tensor := tensors.get(index)) is not None}
            if len(found) == len(part):
                sent |= part.keys()
                self._send_early(found, sorted(self._replica.complete_with(part.keys(), sent)))

    def drop_context(self, context_id: int) -> None:
        """Frees a context on every shard; one whose step was interrupted is left to that step."""
        push = self._unsettled
        if push is not None and push.context_id == context_id:
            if push.commit is not None:
                return
            self._forget(push)
        self._undecided.forget(context_id)
        with self._cluster.push_ids.one() as push_id:
            self._shards.drop_context(push_id, context_id)

    def statistics(self) -> ModelStatistics:
        """What became of this trainer's steps."""
        return self._counts.statistics()

    def catch_up(self) -> None:
        """Settles an interrupted step, so that the values here are those of the servers.

        Raises:
            InvalidRequest: parameters were changed here since the last step.
        """
        self._replica.check_unchanged(self._shards.holds)
        self._settle()

    def _settle(self, *, scatter: bool = True) -> StepResult | None:
        """Finishes what was interrupted; without `scatter`, the values here stay, and so does their round."""
        self.complete()
        if self._unsettled is None:
            return None
        logger.warning("model %s: step %d was interrupted; settling it first", self.name, self._step)
        return self._finish(_Pending(self._shards.push(self._unsettled)), scatter=scatter)

    def _finish(self, pending: "_Pending", *, scatter: bool = True) -> StepResult | None:
        """Waits until the outcome of a push is known; None without a commit."""
        push = pending.pushing.push
        round_number = self._round
        try:
            result = self._shards.outcome(pending.pushing)
            if result is not None and scatter:
                left = {index: each for index, each in self._replica.exchanged.items() if index not in pending.taken}
                self._replica.writing(left)
                # Where rounds may be mixed, a call that was repeated brings later values than were taken of the first.
                round_number = min((self._shards.read_(left), *pending.rounds))
                self._replica.written(left)
        except DeadlineExceeded as error:
            raise self._explained(error) from error
        except InvalidRequest:
            self._refused(push)
            raise
        except ServerErrors as error:
            if any(isinstance(each, InvalidRequest) for each in error.exceptions):
                self._refused(push)
            if not all(isinstance(each, DeadlineExceeded) for each in error.exceptions):
                raise
            raise self._explained(error) from error
        if result is None:
            self._forget(push)
            return None
        self._round = round_number
        assert push.commit is not None
        if result.accepted and result.stepped and push.commit.samples:
            self._undecided.forget(push.context_id)
        else:
            self._undecided.give_back(push.context_id)
        self._forget(push)  # last: gradients may be sent early from now on, by another thread
        self._counts.add(result, push.commit.samples)
        # Where everybody is at a step of their own, schedules differ as they should.
        if not self._warned and not self._sync.mixed_rounds and result.options != push.commit.options:
            self._warned = True
            logger.warning(
                "model %s: round %d used the options %s of the lowest rank; this trainer asked for %s",
                self.name,
                result.round,
                result.options,
                push.commit.options,
            )
        return result

    def _refused(self, push: Push) -> None:
        """A push will be in no round, since not every shard has it."""
        if push.with_gradients:
            self._undecided.give_back(push.context_id, last_only=True)
        self._forget(push)

    def _forget(self, push: Push) -> None:
        """The outcome of a push is known, or it was refused: what not every shard has can enter no round."""
        self._cluster.push_ids.settle(push.push_id)
        self._unsettled = None

    def _explained(self, error: PserverError) -> DeadlineExceeded:
        """The same, with the trainers that the round waits for."""
        try:
            status = self._cluster.call_coordinator(
                "Status", pb.StatusRequest(), pb.StatusReply, what="asking who is missing", timeout_s=ASK_WHO_TIMEOUT_S
            )
        except PserverError:
            return DeadlineExceeded(str(error))
        for model in status.models:
            if model.name == self.name:
                return DeadlineExceeded(
                    f"{error}. Round {model.round + 1} waits for the ranks {list(model.waiting_for_ranks)}"
                    + (f" and for {model.missing_trainers} trainers to attach" if model.missing_trainers else "")
                )
        return DeadlineExceeded(str(error))


@dataclass(slots=True)
class _Pending:
    """A push under way, and the tensors that have its values already; `rounds`: of these."""

    pushing: Pushing
    taken: set[int] = field(default_factory=set)
    rounds: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Early:
    """A push that has begun: tensors that were gathered for it, and buckets that were sent and are still right."""

    push_id: PushId
    context_id: int
    tensors: set[int] = field(default_factory=set)
    buckets: set[int] = field(default_factory=set)
