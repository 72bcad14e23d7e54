"""All shards of one model, as a trainer reaches them: the same call to each, side by side."""

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

from pserver.client.cluster import Cluster
from pserver.client.fanout import fan_out
from pserver.client.flattening import FlatBuffers
from pserver.client.shard_client import Push, ShardClient
from pserver.client.step_counts import StepCounts
from pserver.core.messages import ShardPlacement
from pserver.core.optimizer_state import StatePiece
from pserver.errors import InternalError
from pserver.transport.deadline import Deadline
from pserver.types import PushId, StepResult
from pserver.wire.layout import Layout


class Shards:
    """The shards of one placement. Calls block, with retries, until the session's deadline; one thread at a time.

    Args:
        cluster: started session.
        model: its name.
        layout: its layout.
        placement: who owns what.
        epoch: of the placement.
        mixed_rounds: whether values of different rounds may be used together; `counts` counts it when they are.

    Raises (every call):
        ServerUnavailable, DeadlineExceeded, ModelFailed, StaleEpoch, TrainerEnded; ServerErrors: several of them.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        model: str,
        layout: Layout,
        placement: Iterable[ShardPlacement],
        epoch: int,
        mixed_rounds: bool,
        counts: StepCounts,
    ) -> None:
        self.epoch = epoch
        self._cluster = cluster
        self._model = model
        self._mixed_rounds = mixed_rounds
        self._counts = counts
        self._clients = [
            ShardClient(
                cluster.channel(place.address), place, model=model, epoch=epoch, layout=layout, traffic=cluster.traffic
            )
            for place in placement
        ]

    def initialise(self, push_id: PushId, values: FlatBuffers, state: Sequence[tuple[int, StatePiece]]) -> None:
        """Sends every value, and what there is of the optimizer state."""

        def call(shard: ShardClient, remaining_s: float) -> Any:
            return shard.initialise(push_id, values, state, remaining_s)

        self._cluster.run(self._everywhere(call, "initialising"))

    def pull(self, min_round: int, into: FlatBuffers) -> int:
        """Reads all values once they are of `min_round` or later; returns their round, the oldest if they are mixed."""
        return self._cluster.run(self._pull(min_round, into, include_all=True))

    async def _pull(self, min_round: int, into: FlatBuffers, *, include_all: bool) -> int:
        deadline = Deadline(self._cluster.settings.timeout_s)
        rounds: dict[str, int] = {}
        behind = list(self._clients)
        while behind:
            pull = partial(self._pull_one, min_round=min_round, into=into, include_all=include_all)
            found = await self._everywhere(pull, "pulling", behind, deadline)
            rounds |= {shard.server: each for shard, each in zip(behind, found, strict=True) if each is not None}
            if self._may_mix(rounds.values()):
                break
            min_round = max(rounds.values(), default=min_round)
            behind = [shard for shard in self._clients if rounds.get(shard.server, min_round) != min_round]
        return min(rounds.values(), default=min_round)

    async def _pull_one(
        self, shard: ShardClient, remaining_s: float, *, min_round: int, into: FlatBuffers, include_all: bool
    ) -> int | None:
        return await shard.pull(
            self._cluster.trainer_id, min_round, into, include_all=include_all, timeout_s=remaining_s
        )

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

    def push(self, push: Push, gradients: FlatBuffers, into: FlatBuffers) -> tuple[StepResult, int] | None:
        """Sends a push; with a commit, returns what became of the step and the round of the values read."""
        return self._cluster.run(self._push(push, gradients, into))

    async def _push(self, push: Push, gradients: FlatBuffers, into: FlatBuffers) -> tuple[StepResult, int] | None:
        replies = await self._everywhere(
            lambda shard, remaining_s: shard.push(push, gradients, into, remaining_s), "stepping"
        )
        if push.commit is None:
            return None
        results = [result for result, _ in replies]
        # Compared as text: a norm may be NaN, which equals nothing.
        if len({repr(result) for result in results}) > 1:
            raise InternalError(f"model {self._model!r}: shards disagree about a step: {results}")
        rounds = {results[0].round if each is None else each for _, each in replies}
        if len(rounds) == 1 or self._may_mix(rounds):
            return results[0], min(rounds)
        return results[0], await self._pull(max(rounds), into, include_all=False)

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
            return await self._cluster.retry(lambda remaining_s: call(shard, remaining_s), until, what)

        return await fan_out([one(shard) for shard in (self._clients if clients is None else clients)])
