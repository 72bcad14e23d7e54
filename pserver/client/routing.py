"""Where a model's shards are, followed while the trainer lives: a shard that moves is found at its new server."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from pserver.client.cluster import Cluster
from pserver.client.shard_client import ShardClient
from pserver.core.messages import ShardPlacement
from pserver.errors import DeadlineExceeded, PserverError, ServerUnavailable, StaleEpoch, UnknownModel
from pserver.transport.convert import placement_from_proto
from pserver.transport.deadline import Backoff, Deadline
from pserver.transport.gen import coordinator_pb2 as pb
from pserver.transport.tasks import end_tasks

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: The coordinator answers at least this often, in seconds, and is given so much longer.
WATCH_S, SLACK_S = 30.0, 5.0
#: A shard that is not where it should be is looked for, for at most so long at a time, in seconds.
LOOK_S = 5.0


class Routing:
    """Follows the shards of one placement. Belongs to the network loop, unless said otherwise.

    Args:
        cluster: started session.
        model: its name.
        epoch: at which its description was placed: if that changes, the model must be registered again.
    """

    def __init__(self, cluster: Cluster, model: str, epoch: int) -> None:
        self._cluster = cluster
        self._model = model
        self._epoch = epoch
        self._version = 0
        self._placement: dict[int, ShardPlacement] = {}
        self._failure: PserverError | None = None
        self._changed: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to follow. From any thread."""
        self._cluster.post(self._start)

    def stop(self) -> None:
        """Follows no longer. From any thread, while the session is open."""
        self._cluster.post(self._stop)

    def _start(self) -> None:
        if self._task is None:
            self._task = self._cluster.in_background(self._watch())

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _watch(self) -> None:
        backoff = Backoff()
        while self._failure is None:
            try:
                await self._look(self._version, WATCH_S)
                backoff.reset()
            except PserverError as error:
                if not error.retryable and not isinstance(error, DeadlineExceeded):
                    self._fail(error)
                    return
                await asyncio.sleep(backoff.next_s())

    async def _look(self, version: int, wait_s: float) -> None:
        request = pb.WatchRequest(model=self._model, version=version, wait_s=wait_s)
        what = f"looking for the shards of model {self._model!r}"
        reply = await self._cluster.ask_coordinator("Watch", request, pb.WatchReply, Deadline(wait_s + SLACK_S), what)
        if reply.epoch != self._epoch:
            self._fail(StaleEpoch(f"model {self._model!r} was given another description; register it again"))
            return
        if reply.version != self._version:
            self._version = reply.version
            self._placement = {each.shard: each for each in placement_from_proto(reply.placement)}
            self._wake()

    def _fail(self, error: PserverError) -> None:
        self._failure = error
        self._wake()

    def _wake(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)
        self._changed = None

    def _change(self) -> "asyncio.Future[None]":
        """Is done once something has changed."""
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        return self._changed

    async def call(
        self, shard: ShardClient, call: Callable[[ShardClient, float], Awaitable[T]], remaining_s: float
    ) -> T:
        """One attempt at a call to a shard, where it is now. If the shard moves meanwhile, the attempt is given up.

        Raises:
            ServerUnavailable: it was given up, or the shard is not there; another attempt may find it.
            ModelFailed, UnknownModel, StaleEpoch: the model is at an end, or another one. And what the call raises.
        """
        self._follow(shard)
        making: asyncio.Future[T] = asyncio.ensure_future(call(shard, remaining_s))
        try:
            while not making.done():
                await asyncio.wait((making, self._change()), return_when=asyncio.FIRST_COMPLETED)
                if not making.done() and self._moved(shard):
                    raise ServerUnavailable(f"{shard.where} is its primary no longer")
            return making.result()
        except (StaleEpoch, UnknownModel) as error:
            if self._failure is not None:
                raise
            await self._look(0, LOOK_S)
            raise ServerUnavailable(str(error)) from None
        finally:
            if not making.done():
                await end_tasks(making)

    async def pause(self, seconds: float) -> None:
        """Sleeps, but not beyond the next change."""
        await asyncio.wait((self._change(),), timeout=seconds)

    def _moved(self, shard: ShardClient) -> bool:
        if self._failure is not None:
            raise self._failure
        place = self._placement.get(shard.number)
        return place is not None and place.epoch != shard.epoch

    def _follow(self, shard: ShardClient) -> None:
        if self._moved(shard):
            place = self._placement[shard.number]
            logger.warning(
                "model %s: shard %d has moved from %s to server %s at %s",
                self._model,
                place.shard,
                shard.where,
                place.server,
                place.address,
            )
            shard.move(self._cluster.channel(place.address), place)
