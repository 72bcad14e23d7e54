"""All shards of one model, as a trainer reaches them: the same call to each, side by side."""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from pserver.client.arrivals import Arrivals
from pserver.client.cluster import Cluster
from pserver.client.fanout import fan_out
from pserver.client.mapped_shard import NO_PUSH
from pserver.client.routing import Routing
from pserver.client.shard_client import Push, ShardClient
from pserver.client.step_counts import StepCounts
from pserver.core.coding import Coding
from pserver.core.messages import ShardPlacement
from pserver.core.optimizer_state import StatePiece
from pserver.errors import DeadlineExceeded, InternalError, SharedMemoryUnavailable
from pserver.transport.deadline import Deadline
from pserver.transport.loop import Running
from pserver.types import PushId, StepResult
from pserver.wire.layout import Layout

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pushing:
    """A push under way, and where its values arrive meanwhile; None: all of them are there when it is over."""

    push: Push
    replies: Running[list[Any]]
    arrivals: Arrivals | None


class Shards:
    """The shards of one placement, and what tensors look like there. One thread at a time.

    Calls block, with retries, until the session's deadline. All of them may raise ServerUnavailable, DeadlineExceeded,
    ModelFailed, StaleEpoch and TrainerEnded; ServerErrors has several of them.

    Args:
        cluster: started session.
        model: its name.
        layout: its layout.
        coding: how its buckets travel.
        device: where its tensors are.
        placement: who owns what.
        epoch: at which the description was placed.
        replicated: whether a shard may go on at another server.
        mixed_rounds: whether values of different rounds may be used together; `counts` counts it when they are.
        steady: whether, moreover or because no round goes by without this trainer, values may be used one by one.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        model: str,
        layout: Layout,
        coding: Coding,
        device: torch.device,
        placement: Iterable[ShardPlacement],
        epoch: int,
        replicated: bool,
        mixed_rounds: bool,
        steady: bool,
        counts: StepCounts,
    ) -> None:
        self.epoch = epoch
        self._cluster = cluster
        self._model = model
        self._layout = layout
        self._device = device
        self._mixed_rounds = mixed_rounds
        self._steady = steady
        self._counts = counts
        self._routing = Routing(cluster, model, epoch) if replicated else None
        self._received: dict[int, int] = {}
        self._clients = [
            ShardClient(
                cluster.channel(place.address),
                place,
                model=model,
                layout=layout,
                coding=coding,
                device=device,
                traffic=cluster.traffic,
                communicating=counts.communicating,
            )
            for place in placement
        ]

    def start(self) -> None:
        """Follows shards that go on at other servers, until the session ends or `stop`."""
        if self._routing is not None:
            self._routing.start()

    def stop(self) -> None:
        """Other shards take the place of these."""
        if self._routing is not None:
            self._routing.stop()

    def initialise(
        self, push_id: PushId, tensors: Mapping[int, torch.Tensor], state: Sequence[tuple[int, StatePiece]]
    ) -> None:
        """Sends every value, and what there is of the optimizer state. Nobody may write to the tensors meanwhile."""

        def call(shard: ShardClient, remaining_s: float) -> Any:
            return shard.initialise(push_id, tensors, state, remaining_s)

        self._cluster.run(self._everywhere(call, "initialising"))

    def share_memory(self) -> None:
        """From now on, uses the memory of servers on this machine instead of messages, as the session's settings say.

        Raises:
            SharedMemoryUnavailable: the settings want it, and it is not to be had.
        """
        if self._cluster.settings.transport in ("auto", "shm"):
            share = partial(self._share_memory_of, insist=self._cluster.settings.transport == "shm")
            self._cluster.run(self._everywhere(share, "sharing memory"))

    async def _share_memory_of(self, shard: ShardClient, remaining_s: float, *, insist: bool) -> None:
        try:
            await shard.open_memory(self._cluster.trainer_id, remaining_s)
        except SharedMemoryUnavailable as error:
            if insist:
                raise SharedMemoryUnavailable(f"{shard.where}: transport is 'shm', but {error}") from None
            logger.info("model %s: %s is reached by messages, not shared memory: %s", self._model, shard.where, error)

    # What is sent

    @property
    def streams(self) -> bool:
        """Whether every push goes in several messages."""
        return all(shard.streams for shard in self._clients)

    def prepare(self) -> None:
        """Pushes are about to be gathered: whatever lies where they are sent from is none from now on."""
        self._share_again()
        for shard in self._clients:
            if shard.writable is not None:
                shard.writable.stamp(NO_PUSH)

    def _share_again(self) -> None:
        """Shards whose primary was left may have one on this machine again."""
        moved = [shard for shard in self._clients if shard.has_left_memory]
        if moved:
            for shard in moved:
                shard.leave_memory()
            share = partial(self._share_memory_of, insist=False)
            self._cluster.run(self._everywhere(share, "sharing memory", moved))

    def gather(self, tensors: Mapping[int, torch.Tensor | None], buckets: Collection[int], codec_state: Any) -> None:
        """Puts gradients and buffers where pushes are sent from, and encodes them. See `prepare`.

        Args:
            tensors: by index in the layout; None is sent as zeros.
            buckets: those that are complete now, and are to be encoded.
            codec_state: of the model's codec on this trainer; changed in place.
        """
        for shard in self._clients:
            shard.outgoing.gather(tensors, buckets)
            shard.encode(buckets, codec_state)

    def gathered(self, index: int, tensor: torch.Tensor) -> bool:
        """Whether that is what was gathered last, bit for bit where it is numbers."""
        return all(shard.outgoing.has_gathered(index, tensor) for shard in self._clients)

    def begin(self, push_id: PushId, context_id: int) -> None:
        """Begins a push whose buckets are sent before it is complete, see `send`; `push` ends it, or `abandon`."""
        for shard in self._clients:
            self._cluster.post(shard.begin, push_id, context_id)

    def send(self, buckets: Collection[int]) -> None:
        """Sends what was gathered of these buckets, as part of the push that has begun."""
        for shard in self._clients:
            self._cluster.post(shard.send, buckets)

    def abandon(self) -> None:
        """The push that has begun is none; nothing of it is left anywhere."""
        for shard in self._clients:
            self._cluster.post(shard.abandon)

    def push(self, push: Push) -> "Pushing":
        """Sends what was gathered; see `outcome`."""
        if push.with_gradients:
            for shard in self._clients:
                if shard.writable is not None:
                    shard.writable.stamp(push.push_id.sequence)
        arrivals = Arrivals() if self._may_take_singly else None
        replies = self._cluster.begin(self._push(push, arrivals))
        if arrivals is not None:
            replies.when_over(arrivals.end)
        return Pushing(push, replies, arrivals)

    async def _push(self, push: Push, arrivals: Arrivals | None) -> list[Any]:
        def call(shard: ShardClient, remaining_s: float) -> Any:
            return shard.push(push, remaining_s, arrivals)

        with self._counts.communicating.running():
            return await self._everywhere(call, "stepping")

    def outcome(self, pushing: "Pushing") -> StepResult | None:
        """Waits until it is known what became of a step, None if there was no commit. `read_` has the values then."""
        replies = pushing.replies.result()
        if pushing.push.commit is None:
            return None
        results: list[StepResult] = [result for result, _ in replies]
        # Compared as text if they seem to differ: a norm may be NaN, which equals nothing.
        if any(each != results[0] for each in results[1:]) and len({repr(each) for each in results}) > 1:
            raise InternalError(f"model {self._model!r}: shards disagree about a step: {results}")
        self._received = {
            shard.number: results[0].round if each is None else each
            for shard, (_, each) in zip(self._clients, replies, strict=True)
            if shard.readable is None
        }
        return results[0]

    # What is read

    @property
    def _may_take_singly(self) -> bool:
        """Whether values may be used one by one as they arrive: all come in messages, and a mix is none or allowed."""
        return self._steady and all(shard.readable is None for shard in self._clients)

    def take_(self, tensors: Mapping[int, torch.Tensor], buckets: Iterable[int]) -> bool:
        """Copies values that have arrived in these buckets into tensors; False if they must wait for the outcome."""
        if any(not tensor.is_contiguous() and self._cut(index) for index, tensor in tensors.items()):
            return False
        for shard in self._clients:
            shard.incoming.scatter_(tensors, buckets)
        return True

    def read_(self, tensors: Mapping[int, torch.Tensor]) -> int:
        """Copies the values of the last push into tensors in place.

        Args:
            tensors: by index in the layout.

        Returns:
            Their round, the oldest if the policy allows a mix. It may be later than the push's own.
        """
        return self._read_(tensors, self._received, include_all=False)

    def pull_(self, min_round: int, tensors: Mapping[int, torch.Tensor]) -> int:
        """Copies all values into tensors in place, once they are of `min_round` or later; returns as `read_` does."""
        rounds = self._pull(self._clients, min_round, include_all=True)
        return self._read_(tensors, rounds, include_all=True)

    def _read_(self, tensors: Mapping[int, torch.Tensor], rounds: dict[int, int], *, include_all: bool) -> int:
        """`rounds`: of what lies in `incoming`, by server; those that it lacks are read in shared memory."""
        contiguous = {
            index: tensor if tensor.is_contiguous() or not self._cut(index) else torch.empty_like(tensor.contiguous())
            for index, tensor in tensors.items()
        }
        in_messages = set(rounds)
        deadline = Deadline(self._cluster.settings.timeout_s)
        while deadline.remaining_s():
            for shard in self._clients:
                if shard.number not in rounds and shard.readable is not None:
                    found = shard.read_(contiguous, mixed_rounds=self._mixed_rounds)
                    if found is None:
                        in_messages.add(shard.number)
                        rounds |= self._pull([shard], 0, include_all=include_all)
                    else:
                        rounds[shard.number] = found
            latest = max(rounds.values(), default=0)
            behind = [shard for shard in self._clients if rounds[shard.number] != latest]
            if not behind or self._may_mix(rounds.values()):
                break
            for shard in behind:
                del rounds[shard.number]
            in_messages -= {shard.number for shard in behind}
            rounds |= self._pull([shard for shard in behind if shard.readable is None], latest, include_all=include_all)
            in_messages |= rounds.keys() & {shard.number for shard in behind}
        else:
            raise DeadlineExceeded(
                f"model {self._model!r}: rounds were applied all the time while values were read; expected all servers "
                f"at one round within {deadline.timeout_s:g} s, the last seen were {sorted(rounds.items())}"
            )
        for shard in self._clients:
            if shard.number in in_messages:
                shard.incoming.scatter_(contiguous)
            if shard.readable is not None:
                shard.forget_incoming()
        for index, tensor in tensors.items():
            if contiguous[index] is not tensor:
                with torch.no_grad():
                    tensor.copy_(contiguous[index])
        return min(rounds.values(), default=0)

    def _cut(self, index: int) -> bool:
        return len(self._clients) > 1 and any(shard.cuts(index) for shard in self._clients)

    def _pull(self, shards: Sequence[ShardClient], min_round: int, *, include_all: bool) -> dict[int, int]:
        """Reads values into `incoming` by messages; their rounds by server."""
        if not shards:
            return {}

        def call(shard: ShardClient, remaining_s: float) -> Any:
            return shard.pull(self._cluster.trainer_id, min_round, include_all=include_all, timeout_s=remaining_s)

        found = self._cluster.run(self._everywhere(call, "pulling", shards))
        return {shard.number: min_round if each is None else each for shard, each in zip(shards, found, strict=True)}

    def holds(self, index: int, tensor: torch.Tensor) -> bool:
        """Whether a tensor has the values that were read last, or those that lie in shared memory now."""
        return all(shard.holds(index, tensor) for shard in self._clients)

    def pull_state(self, min_round: int) -> list[StatePiece]:
        """Reads the optimizer state once it is of `min_round` or later."""
        return self._cluster.run(self._pull_state(min_round))

    async def _pull_state(self, min_round: int) -> list[StatePiece]:
        deadline = Deadline(self._cluster.settings.timeout_s)
        while True:
            pull = partial(self._pull_state_of_one, min_round=min_round)
            found = await self._everywhere(pull, "pulling the optimizer state", None, deadline)
            rounds = {each for each, _ in found if each is not None}
            if len(rounds) <= 1 or self._may_mix(rounds):
                return [piece for _, pieces in found for piece in pieces]
            min_round = max(rounds)

    async def _pull_state_of_one(
        self, shard: ShardClient, remaining_s: float, *, min_round: int
    ) -> tuple[int | None, list[StatePiece]]:
        return await shard.pull_state(self._cluster.trainer_id, min_round, remaining_s)

    def drop_context(self, push_id: PushId, context_id: int) -> None:
        """Frees a context that will not be committed."""

        def call(shard: ShardClient, remaining_s: float) -> Any:
            return shard.drop_context(push_id, context_id, remaining_s)

        self._cluster.run(self._everywhere(call, f"freeing context {context_id}"))

    def _may_mix(self, rounds: Collection[int]) -> bool:
        """Whether values of these rounds may be used together; counts them if they differ."""
        if not self._mixed_rounds:
            return False
        self._counts.num_mixed_pulls += len(set(rounds)) > 1
        return True

    async def _everywhere(
        self,
        call: Callable[[ShardClient, float], Any],
        doing: str,
        clients: Sequence[ShardClient] | None = None,
        deadline: Deadline | None = None,
    ) -> list[Any]:
        """Calls shards side by side, each with retries until the deadline."""
        until = deadline or Deadline(self._cluster.settings.timeout_s)

        async def one(shard: ShardClient) -> Any:
            what = f"{doing} model {self._model!r}: {shard.where}"
            routing = self._routing
            if routing is None:
                return await self._cluster.retry(lambda remaining_s: call(shard, remaining_s), until, what)
            return await self._cluster.retry(
                lambda remaining_s: routing.call(shard, call, remaining_s), until, what, routing.pause
            )

        return await fan_out([one(shard) for shard in (self._clients if clients is None else clients)])
