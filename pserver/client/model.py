"""A model whose parameters live on servers: registration, pushes, steps and pulls."""

import logging
from collections.abc import Sequence, Set
from dataclasses import dataclass

import torch

from pserver.client.cluster import Cluster
from pserver.client.fanout import fan_out
from pserver.client.flattening import FlatBuffers, model_device
from pserver.client.shard_client import Push, ShardClient
from pserver.core.contexts import CommitInfo
from pserver.core.messages import ModelSpec
from pserver.core.sync import SyncPolicy, policy_arguments
from pserver.errors import DeadlineExceeded, InternalError, MixedRounds, PserverError, ServerErrors
from pserver.transport.convert import placement_from_proto, push_id_to_proto, spec_to_proto
from pserver.transport.deadline import Deadline
from pserver.transport.gen import coordinator_pb2 as pb
from pserver.types import GroupOptions, PushId, StepResult
from pserver.wire.layout import STORED, TensorSpec, build_layout

logger = logging.getLogger(__name__)

#: Time left for asking the coordinator who is missing after a step ran into its deadline, in seconds.
ASK_WHO_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTensor:
    """A parameter or buffer to share; `group` is its optimizer group, or `STORED`."""

    name: str
    tensor: torch.Tensor
    group: int


class SharedModel:
    """One model's tensors on this trainer, and the same on the servers. One thread at a time.

    Args:
        cluster: started session.
        name: of the model in the cluster.
        tensors: in the order of registration, the same on every trainer.
        optimizer: name of a registered optimizer.
        optimizer_groups: constructor arguments for each group, complete with defaults.
        sync_policy: when a round closes.
        bucket_bytes: 0 chooses.

    Raises:
        UnsupportedModel, InvalidRequest: the tensors cannot be shared.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        name: str,
        tensors: Sequence[NamedTensor],
        optimizer: str,
        optimizer_groups: Sequence[GroupOptions],
        sync_policy: SyncPolicy,
        bucket_bytes: int,
    ) -> None:
        self.name = name
        self._cluster = cluster
        self._tensors = [each.tensor for each in tensors]
        self._spec = ModelSpec(
            name=name,
            tensors=tuple(
                TensorSpec(name=each.name, shape=tuple(each.tensor.shape), dtype=each.tensor.dtype, group=each.group)
                for each in tensors
            ),
            bucket_bytes=bucket_bytes,
            optimizer=optimizer,
            optimizer_groups=tuple(optimizer_groups),
            sync_policy=sync_policy.name,
            sync_policy_arguments=policy_arguments(sync_policy),
            world_size=cluster.world_size,
        )
        self._layout = build_layout(self._spec.tensors, bucket_bytes)
        device = model_device(self._tensors)
        self._values = FlatBuffers(self._layout, device)
        self._gradients = FlatBuffers(self._layout, device)
        self._trained = [each.group != STORED for each in self._spec.tensors]
        self._stepped = [each if trained else None for each, trained in zip(self._tensors, self._trained, strict=True)]
        self._shards: list[ShardClient] = []
        self._step = 0
        self._unsettled: Push | None = None
        self._warned = False

    # Registration

    def register(self) -> None:
        """Registers the model; the first trainer's values win and overwrite the tensors of all others.

        Raises:
            LayoutMismatch: another trainer registered it differently; names the first difference.
            DeadlineExceeded: it was not ready in time; says what is missing.
        """
        initialised = False
        while (reply := self._register_once(initialised)).initialise:
            self._shards = self._shard_clients(reply)
            self._values.gather(self._tensors)
            with self._cluster.push_ids.one() as push_id:
                self._cluster.run(self._initialise(push_id))
            initialised = True
        self._shards = self._shard_clients(reply)
        with self._cluster.push_ids.one() as push_id:
            request = pb.AttachRequest(push_id=push_id_to_proto(push_id), model=self.name)
            attached = self._cluster.call_coordinator(
                "Attach", request, pb.AttachReply, what=f"attaching to model {self.name!r}"
            )
        self._cluster.run(self._pull(attached.round, include_buffers=True))
        self._values.scatter_(self._tensors)

    def _register_once(self, initialised: bool) -> pb.RegisterModelReply:
        timeout_s = self._cluster.settings.timeout_s
        with self._cluster.push_ids.one() as push_id:
            request = pb.RegisterModelRequest(
                push_id=push_id_to_proto(push_id),
                spec=spec_to_proto(self._spec),
                wait_s=timeout_s,
                initialised=initialised,
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

    async def _initialise(self, push_id: PushId) -> None:
        deadline = Deadline(self._cluster.settings.timeout_s)

        async def one(shard: ShardClient) -> None:
            what = f"initialising model {self.name!r}: {shard.where}"
            await self._cluster.retry(
                lambda remaining_s: shard.initialise(push_id, self._values, remaining_s), deadline, what
            )

        await fan_out([one(shard) for shard in self._shards])

    async def _pull(self, min_round: int, *, include_buffers: bool) -> None:
        deadline = Deadline(self._cluster.settings.timeout_s)
        trainer_id = self._cluster.trainer_id

        async def one(shard: ShardClient) -> int:
            what = f"pulling model {self.name!r}: {shard.where}"
            found: int = await self._cluster.retry(
                lambda remaining_s: shard.pull(
                    trainer_id, min_round, self._values, include_buffers=include_buffers, timeout_s=remaining_s
                ),
                deadline,
                what,
            )
            return found

        rounds = set(await fan_out([one(shard) for shard in self._shards]))
        if len(rounds) > 1:
            raise MixedRounds(f"model {self.name!r}: shards sent values of the rounds {sorted(rounds)}")

    # Steps

    def push(self, context_id: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Adds gradients to a context on every shard, without a commit.

        Args:
            gradients: one for each parameter that is stepped, in order of registration; None counts as zero.
        """
        self._settle()
        with self._cluster.push_ids.one() as push_id:
            push = Push(
                push_id=push_id,
                context_id=context_id,
                absent=self._gradients.gather(self._spread(gradients)),
                with_gradients=True,
                commit=None,
            )
            self._cluster.run(self._send(push))

    def step(
        self,
        context_id: int,
        gradients: Sequence[torch.Tensor | None] | None,
        *,
        samples: int,
        options: Sequence[GroupOptions],
    ) -> StepResult:
        """Pushes gradients, commits the context, waits for its round and writes the new parameters.

        If an earlier step was interrupted before its outcome was known, that one is settled first: each gradient is
        counted at most once.

        Args:
            gradients: as in `push`; None commits what earlier pushes brought.
            samples: weight of this gradient in the mean, 0 or more.
            options: numeric optimizer options per group.

        Raises:
            DeadlineExceeded: the round was not decided in time; names the trainers it waits for.
            ModelFailed, TrainerEnded, ServerUnavailable, ServerErrors
        """
        self._settle()
        absent: Set[int] = frozenset()
        if gradients is not None:
            absent = self._gradients.gather(self._spread(gradients))
        self._step += 1
        self._unsettled = Push(
            push_id=self._cluster.push_ids.issue(),
            context_id=context_id,
            absent=absent,
            with_gradients=gradients is not None,
            commit=CommitInfo(step=self._step, samples=samples, options=tuple(options)),
        )
        return self._finish(self._unsettled)

    def drop_context(self, context_id: int) -> None:
        """Frees a context on every shard."""
        with self._cluster.push_ids.one() as push_id:
            self._cluster.run(self._drop_context(push_id, context_id))

    def _settle(self) -> None:
        if self._unsettled is not None:
            logger.warning("model %s: step %d was interrupted; settling it first", self.name, self._step)
            self._finish(self._unsettled)

    def _finish(self, push: Push) -> StepResult:
        self._values.wait_until_free()
        try:
            result = self._cluster.run(self._send(push))
        except DeadlineExceeded as error:
            raise self._explained(error) from error
        except ServerErrors as error:
            if not all(isinstance(each, DeadlineExceeded) for each in error.exceptions):
                raise
            raise self._explained(error) from error
        assert result is not None
        self._cluster.push_ids.settle(push.push_id)
        self._unsettled = None
        self._values.scatter_(self._stepped)
        assert push.commit is not None
        if not self._warned and result.options != push.commit.options:
            self._warned = True
            logger.warning(
                "model %s: round %d used the options %s of the lowest rank; this trainer asked for %s",
                self.name,
                result.round,
                result.options,
                push.commit.options,
            )
        return result

    async def _send(self, push: Push) -> StepResult | None:
        deadline = Deadline(self._cluster.settings.timeout_s)

        async def one(shard: ShardClient) -> tuple[StepResult, int] | None:
            what = f"model {self.name!r}: {shard.where}"
            found: tuple[StepResult, int] | None = await self._cluster.retry(
                lambda remaining_s: shard.push(push, self._gradients, self._values, remaining_s), deadline, what
            )
            return found

        replies = [reply for reply in await fan_out([one(shard) for shard in self._shards]) if reply is not None]
        if push.commit is None:
            return None
        results = [result for result, _ in replies]
        if any(result != results[0] for result in results):
            raise InternalError(f"model {self.name!r}: shards disagree about a step: {results}")
        rounds = {round_number for _, round_number in replies}
        if len(rounds) > 1:
            await self._pull(max(rounds), include_buffers=False)
        return results[0]

    async def _drop_context(self, push_id: PushId, context_id: int) -> None:
        deadline = Deadline(self._cluster.settings.timeout_s)

        async def one(shard: ShardClient) -> None:
            what = f"freeing context {context_id} of model {self.name!r}: {shard.where}"
            await self._cluster.retry(
                lambda remaining_s: shard.drop_context(push_id, context_id, remaining_s), deadline, what
            )

        await fan_out([one(shard) for shard in self._shards])

    def _spread(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Gradients of stepped parameters -> one entry for every tensor of the model."""
        left = iter(gradients)
        return [next(left) if trained else None for trained in self._trained]

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
