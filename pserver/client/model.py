"""A model whose parameters live on servers: registration, pushes, steps and pulls."""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from pserver.client.cluster import Cluster
from pserver.client.fanout import fan_out
from pserver.client.flattening import FlatBuffers, model_device
from pserver.client.optimizer_state import TensorStates, check_state, cut_state, join_state, with_present_masters
from pserver.client.shard_client import Push, ShardClient
from pserver.core.messages import CommitInfo, ModelSpec
from pserver.core.optimizer_state import StatePiece
from pserver.core.optimizers import check_options
from pserver.core.rules import GradientRules
from pserver.core.sync import Async, SyncPolicy, policy_arguments
from pserver.errors import (
    ERRORS,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    PserverError,
    ServerErrors,
    StaleEpoch,
)
from pserver.transport.convert import placement_from_proto, push_id_to_proto, spec_to_proto
from pserver.transport.deadline import Deadline
from pserver.transport.gen import coordinator_pb2 as pb
from pserver.types import GroupOptions, PushId, StepResult
from pserver.wire.layout import BUFFERS, STORED, TensorSpec

logger = logging.getLogger(__name__)

#: Time left for asking the coordinator who is missing after a step ran into its deadline, in seconds.
ASK_WHO_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTensor:
    """A parameter or buffer to share; `group` is its optimizer group, `STORED` or `BUFFERS`."""

    name: str
    tensor: torch.Tensor
    group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """What a trainer shares: tensors in the order of registration, and everything that trainers must agree on.

    `optimizer_groups` are constructor arguments for each group, complete with defaults; `bucket_bytes` 0 chooses.
    """

    name: str
    tensors: Sequence[NamedTensor]
    optimizer: str
    optimizer_groups: Sequence[GroupOptions]
    sync: SyncPolicy
    buffers: str
    bucket_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatistics:
    """What became of this trainer's steps on one model since it registered.

    Attributes:
        num_accepted: gradients counted in a round.
        num_rejected: gradients refused by the sync policy.
        num_skipped: rounds it was in that stepped nothing.
        num_nonfinite: NaN and infinite elements in the gradients of its rounds, if the policy makes servers look.
        num_mixed_pulls: replies in which shards were at different rounds; only Ssp and Async allow it.
        staleness: how many of its gradients were so many rounds old when they were applied.
    """

    num_accepted: int
    num_rejected: int
    num_skipped: int
    num_nonfinite: int
    num_mixed_pulls: int
    staleness: Mapping[int, int]


class SharedModel:
    """One model's tensors on this trainer, and the same on the servers. One thread at a time.

    Args:
        cluster: started session.
        description: what is shared.

    Raises:
        UnsupportedModel, UnsupportedOptimizer, InvalidRequest: it cannot be shared.
    """

    def __init__(self, cluster: Cluster, description: ModelDescription) -> None:
        self.name = description.name
        self.round = 0
        self.last_result: StepResult | None = None
        self._cluster = cluster
        self._shards: list[ShardClient] = []
        self._epoch = 0
        self._step = 0
        self._unsettled: Push | None = None
        self._warned = False
        self._seen: dict[int, tuple[int, int]] = {}
        self._num_accepted = self._num_rejected = self._num_skipped = self._num_nonfinite = self._num_mixed = 0
        self._staleness: Counter[int] = Counter()
        self._describe(description)

    def _describe(self, description: ModelDescription) -> None:
        tensors = description.tensors
        self._spec = ModelSpec(
            name=description.name,
            tensors=tuple(
                TensorSpec(name=each.name, shape=tuple(each.tensor.shape), dtype=each.tensor.dtype, group=each.group)
                for each in tensors
            ),
            bucket_bytes=description.bucket_bytes,
            optimizer=description.optimizer,
            optimizer_groups=tuple(description.optimizer_groups),
            sync_policy=description.sync.name,
            sync_policy_arguments=policy_arguments(description.sync),
            world_size=self._cluster.world_size,
            buffers=description.buffers,
        )
        self._layout = self._spec.layout()
        self._sync = description.sync
        device = model_device([each.tensor for each in tensors])
        self._values = FlatBuffers(self._layout, device)
        self._gradients = FlatBuffers(self._layout, device)
        self._tensors = {index: each.tensor for index, each in enumerate(tensors)}
        self._stepped = [index for index, each in enumerate(tensors) if each.group >= 0]
        self._buffers = {index: each.tensor for index, each in enumerate(tensors) if each.group == BUFFERS}
        self._exchanged = {index: each.tensor for index, each in enumerate(tensors) if each.group != STORED}

    # Registration

    def register(self, state: TensorStates | None = None) -> None:
        """Registers the model; the first trainer's values win and overwrite the tensors of all others.

        Args:
            state: optimizer state to begin with, if this trainer is the first.

        Raises:
            LayoutMismatch: another trainer registered it differently; names the first difference.
            DeadlineExceeded: it was not ready in time; says what is missing.
        """
        self._register(state or {}, replaces=0)

    def replace(self, description: ModelDescription, state: TensorStates) -> None:
        """Goes on with another description or other values, once every trainer of the model asks for the same.

        Rounds and steps count on. Values and optimizer state are those of the lowest rank among the trainers that have
        the latest values: under `Bsp` all have.

        Args:
            description: of the same name, policy and world size.
            state: optimizer state by index in the description's tensors; others begin anew.

        Raises:
            LayoutMismatch: another trainer asks for something else. InvalidRequest: a state that servers cannot take.
            DeadlineExceeded: names who has not asked.
        """
        self._settle(scatter=False)
        before = vars(self).copy()
        self._describe(description)
        try:
            state = with_present_masters(state, self._tensors)
            check_state(self._layout, state, self._spec.optimizer, self._spec.optimizer_groups)
            self._register(state, replaces=self._epoch)
        except BaseException:
            # All of it, with the values that the servers were last known to hold.
            vars(self).update(before)
            raise

    def _register(self, state: TensorStates, *, replaces: int) -> None:
        deadline = Deadline(self._cluster.settings.timeout_s)
        while True:
            try:
                self._register_and_pull(state, replaces)
                return
            except StaleEpoch:
                # Others have replaced the model meanwhile.
                if not deadline.remaining_s():
                    raise

    def _register_and_pull(self, state: TensorStates, replaces: int) -> None:
        initialised = False
        while (reply := self._register_once(initialised, replaces)).initialise:
            self._shards = self._shard_clients(reply)
            self._values.gather(self._tensors)
            pieces = list(cut_state(self._layout, state))
            with self._cluster.push_ids.one() as push_id:
                self._cluster.run(self._initialise(push_id, pieces))
            initialised = True
        self._shards = self._shard_clients(reply)
        self._epoch = reply.epoch
        with self._cluster.push_ids.one() as push_id:
            request = pb.AttachRequest(push_id=push_id_to_proto(push_id), model=self.name, epoch=reply.epoch)
            attached = self._cluster.call_coordinator(
                "Attach", request, pb.AttachReply, what=f"attaching to model {self.name!r}"
            )
        self._step = max(self._step, attached.step)
        self.round = self._cluster.run(self._pull(attached.round, include_all=True))
        self._scatter_(self._tensors)

    def _register_once(self, initialised: bool, replaces: int) -> pb.RegisterModelReply:
        timeout_s = self._cluster.settings.timeout_s
        with self._cluster.push_ids.one() as push_id:
            request = pb.RegisterModelRequest(
                push_id=push_id_to_proto(push_id),
                spec=spec_to_proto(self._spec),
                wait_s=timeout_s,
                initialised=initialised,
                replaces=replaces,
            )
            return self._cluster.call_coordinator(
                "RegisterModel",
                request,
                pb.RegisterModelReply,
                what=f"registering model {self.name!r}",
                timeout_s=timeout_s + 1.0,
            )

    def _shard_clients(self, reply: pb.RegisterModelReply) -> list[ShardClient]:
        return [
            ShardClient(
                self._cluster.channel(place.address),
                place,
                model=self.name,
                epoch=reply.epoch,
                layout=self._layout,
                traffic=self._cluster.traffic,
            )
            for place in placement_from_proto(reply.placement)
        ]

    async def _initialise(self, push_id: PushId, state: Sequence[tuple[int, StatePiece]]) -> None:
        await self._on_every_shard(
            lambda shard, remaining_s: shard.initialise(push_id, self._values, state, remaining_s), "initialising"
        )

    # Pulls

    async def _pull(self, min_round: int, *, include_all: bool) -> int:
        """Reads every shard's values; returns their round, the oldest if the policy allows a mix."""
        deadline = Deadline(self._cluster.settings.timeout_s)
        rounds: dict[str, int] = {}
        behind = list(self._shards)
        while behind:
            found = await self._on_every_shard(
                partial(self._pull_shard, min_round=min_round, include_all=include_all), "pulling", behind, deadline
            )
            rounds |= {shard.server: each for shard, each in zip(behind, found, strict=True) if each is not None}
            if self._may_mix(rounds.values()):
                break
            min_round = max(rounds.values(), default=min_round)
            behind = [shard for shard in self._shards if rounds.get(shard.server, min_round) != min_round]
        return min(rounds.values(), default=min_round)

    async def _pull_shard(
        self, shard: ShardClient, remaining_s: float, *, min_round: int, include_all: bool
    ) -> int | None:
        return await shard.pull(
            self._cluster.trainer_id, min_round, self._values, include_all=include_all, timeout_s=remaining_s
        )

    def _may_mix(self, rounds: Collection[int]) -> bool:
        """Whether values of these rounds may be used together; counts them if they differ."""
        if not self._sync.mixed_rounds:
            return False
        self._num_mixed += len(set(rounds)) > 1
        return True

    def pull_state(self) -> dict[int, dict[str, object]]:
        """Reads the optimizer state: by index in the description's tensors, under torch's names, on the CPU.

        Values have the dtype of the master; where trainers hold half precision, `master_param` has the master itself.

        Raises:
            ServerUnavailable, DeadlineExceeded, ModelFailed
        """
        self._settle(scatter=False)
        return join_state(self._layout, self._cluster.run(self._pull_state()))

    async def _pull_state(self) -> list[StatePiece]:
        deadline = Deadline(self._cluster.settings.timeout_s)
        min_round = self.round
        while True:
            found = await self._on_every_shard(
                partial(self._pull_shard_state, min_round=min_round), "pulling the optimizer state", None, deadline
            )
            rounds = {each for each, _ in found if each is not None}
            if len(rounds) <= 1 or self._may_mix(rounds):
                return [piece for _, pieces in found for piece in pieces]
            min_round = max(rounds)

    async def _pull_shard_state(
        self, shard: ShardClient, remaining_s: float, *, min_round: int
    ) -> tuple[int | None, list[StatePiece]]:
        return await shard.pull_state(self._cluster.trainer_id, min_round, remaining_s)

    # Steps

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
            absent=self._gather(gradients),
            with_gradients=True,
            commit=None,
        )
        self._finish(self._unsettled)

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
        """Pushes gradients and buffers, commits the context, waits for its outcome and writes the new values.

        If an earlier step was interrupted before its outcome was known, that one is settled first. Gradients with the
        same bits are that step again, and its outcome is the result: each is counted at most once. Others were computed
        on the parameters of before, and count as that old.

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
        self._check_unchanged()
        base_round = self.round
        # Here, before anything is sent: what one shard refuses and another takes would never be whole.
        for group, registered in zip(options, self._spec.optimizer_groups, strict=True):
            check_options(self._spec.optimizer, group, registered)
        if rules.clip_value is not None and any(self._tensors[index].is_complex() for index in self._stepped):
            raise InvalidRequest("clip_value has no meaning for complex parameters; clip by max_norm")
        if samples == 0 and self._sync.name == Async.name:
            raise InvalidRequest("under Async nobody waits for this trainer: expected samples, or no step at all")
        again = self._is_again(context_id, gradients)
        settled = self._settle()
        if again and settled is not None:
            return self._told(settled)
        absent: Set[int] = frozenset()
        if gradients is not None:
            absent = self._gather(gradients)
        self._step += 1
        self._unsettled = Push(
            push_id=self._cluster.push_ids.issue(),
            context_id=context_id,
            absent=absent,
            with_gradients=gradients is not None,
            commit=CommitInfo(
                step=self._step,
                base_round=base_round,
                samples=samples,
                options=tuple(options),
                rules=rules,
                overflow=overflow,
            ),
        )
        result = self._finish(self._unsettled)
        assert result is not None
        return self._told(result)

    def _told(self, result: StepResult) -> StepResult:
        self.last_result = result
        if result.error:
            raise ERRORS.get(result.error, PserverError)(f"model {self.name!r}: {result.reason}")
        return result

    def _is_again(self, context_id: int, gradients: Sequence[torch.Tensor | None] | None) -> bool:
        """Whether a step is the interrupted one once more."""
        push = self._unsettled
        if push is None or push.commit is None:
            return False
        if push.context_id == context_id or gradients is None or not push.with_gradients:
            return push.context_id == context_id
        return all(
            index in push.absent if each is None else self._gradients.holds(index, each)
            for index, each in zip(self._stepped, gradients, strict=True)
        )

    def drop_context(self, context_id: int) -> None:
        """Frees a context on every shard; one whose step was interrupted is left to that step."""
        push = self._unsettled
        if push is not None and push.context_id == context_id:
            if push.commit is not None:
                return
            self._forget(push)
        with self._cluster.push_ids.one() as push_id:
            self._cluster.run(
                self._on_every_shard(
                    lambda shard, remaining_s: shard.drop_context(push_id, context_id, remaining_s),
                    f"freeing context {context_id}",
                )
            )

    def statistics(self) -> ModelStatistics:
        """What became of this trainer's steps."""
        return ModelStatistics(
            num_accepted=self._num_accepted,
            num_rejected=self._num_rejected,
            num_skipped=self._num_skipped,
            num_nonfinite=self._num_nonfinite,
            num_mixed_pulls=self._num_mixed,
            staleness=dict(self._staleness),
        )

    def catch_up(self) -> None:
        """Settles an interrupted step, so that the values here are those of the servers.

        Raises:
            InvalidRequest: parameters were changed here since the last step.
        """
        self._check_unchanged()
        self._settle()

    def _settle(self, *, scatter: bool = True) -> StepResult | None:
        """Finishes what was interrupted; without `scatter`, the values here stay, and so does their round."""
        if self._unsettled is None:
            return None
        logger.warning("model %s: step %d was interrupted; settling it first", self.name, self._step)
        return self._finish(self._unsettled, scatter=scatter)

    def _finish(self, push: Push, *, scatter: bool = True) -> StepResult | None:
        """Sends a push until its outcome is known; None without a commit."""
        self._values.wait_until_free()
        try:
            sent = self._cluster.run(self._send(push))
        except DeadlineExceeded as error:
            raise self._explained(error) from error
        except InvalidRequest:
            self._forget(push)
            raise
        except ServerErrors as error:
            if any(isinstance(each, InvalidRequest) for each in error.exceptions):
                self._forget(push)
            if not all(isinstance(each, DeadlineExceeded) for each in error.exceptions):
                raise
            raise self._explained(error) from error
        if sent is None:
            self._forget(push)
            return None
        result, round_number = sent
        if scatter:
            self._scatter_(self._exchanged)
            self.round = round_number
        self._forget(push)
        assert push.commit is not None
        self._count(result, push.commit.samples)
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

    def _forget(self, push: Push) -> None:
        """The outcome of a push is known, or it was refused: what not every shard has can enter no round."""
        self._cluster.push_ids.settle(push.push_id)
        self._unsettled = None

    async def _send(self, push: Push) -> tuple[StepResult, int] | None:
        """Sends a push; with a commit, returns what became of the step and the round of the values read."""
        replies = await self._on_every_shard(
            lambda shard, remaining_s: shard.push(push, self._gradients, self._values, remaining_s), "stepping"
        )
        if push.commit is None:
            return None
        results = [result for result, _ in replies]
        # Compared as text: a norm may be NaN, which equals nothing.
        if len({repr(result) for result in results}) > 1:
            raise InternalError(f"model {self.name!r}: shards disagree about a step: {results}")
        rounds = {results[0].round if each is None else each for _, each in replies}
        if len(rounds) == 1 or self._may_mix(rounds):
            return results[0], min(rounds)
        return results[0], await self._pull(max(rounds), include_all=False)

    async def _on_every_shard(
        self,
        call: Callable[[ShardClient, float], Any],
        doing: str,
        shards: Sequence[ShardClient] | None = None,
        deadline: Deadline | None = None,
    ) -> list[Any]:
        """Calls shards side by side, each with retries until the deadline."""
        until = deadline or Deadline(self._cluster.settings.timeout_s)

        async def one(shard: ShardClient) -> Any:
            what = f"{doing} model {self.name!r}: {shard.where}"
            return await self._cluster.retry(lambda remaining_s: call(shard, remaining_s), until, what)

        return await fan_out([one(shard) for shard in (self._shards if shards is None else shards)])

    def _gather(self, gradients: Sequence[torch.Tensor | None]) -> frozenset[int]:
        """Puts gradients and buffers into the flats; returns the parameters without a gradient."""
        return self._gradients.gather({**dict(zip(self._stepped, gradients, strict=True)), **self._buffers})

    def _count(self, result: StepResult, samples: int) -> None:
        counted = result.accepted and samples > 0
        self._num_accepted += counted
        self._num_rejected += not result.accepted
        self._num_skipped += result.accepted and not result.stepped
        self._num_nonfinite += result.num_nonfinite
        if counted:
            self._staleness[result.staleness] += 1

    # The values here and there

    def _scatter_(self, tensors: Mapping[int, torch.Tensor]) -> None:
        self._values.scatter_(tensors)
        self._seen = {index: _state_of(self._tensors[index]) for index in self._stepped}

    def _check_unchanged(self) -> None:
        """Refuses to step if somebody else has written to the parameters: the servers' values would win silently."""
        for index in self._stepped:
            parameter = self._tensors[index]
            self._values.check(index, parameter)
            if _state_of(parameter) == self._seen.get(index):
                continue
            if not self._values.holds(index, parameter):
                raise InvalidRequest(
                    f"model {self.name!r}: parameter {self._spec.tensors[index].name!r} was changed on this trainer "
                    "since the last step (load_state_dict, an in-place operation?), but the servers hold the model. "
                    "Undo the change, or call broadcast_parameters() on the optimizer of every trainer to make the "
                    "values of the lowest rank everybody's"
                )
            self._seen[index] = _state_of(parameter)

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


def _state_of(parameter: torch.Tensor) -> tuple[int, int]:
    """What changes if somebody writes to a parameter or gives it other memory; not if it is written to by `.data`."""
    return parameter._version, parameter.data_ptr()
