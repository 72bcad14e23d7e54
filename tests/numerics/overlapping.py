"""Early push and late pull as the tests here use them: models, ways to look inside, and replies that are held."""

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from pserver.client.cluster import Cluster
from pserver.errors import ServerUnavailable
from pserver.optim import RemoteOptimizer
from pserver.testing.local_cluster import LocalCluster
from pserver.transport import chunks
from pserver.transport.channel import Channel, Connector, Place
from pserver.transport.methods import Method, Sendable
from pserver.wire.layout import STORED
from tests.numerics.training import (
    BUCKET_BYTES,
    RECIPES,
    Batch,
    fill_,
    make_batches,
    of_rank,
    remote_optimizer,
    step_on,
    values,
)
from tests.waiting import until

#: What of the two is on.
MODES: dict[str, Mapping[str, bool]] = {
    "early": {"early_push": True},
    "late": {"late_pull": True},
    "both": {"early_push": True, "late_pull": True},
}
STEPS = 4
#: Of the mixed model: several of its tensors are larger.
SMALL_BUCKET_BYTES = 256


class Mixed(torch.nn.Module):
    """Layers that use their tensors in every way: by calls, by looking at a part's, from lists, twice, tied, never."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(13, 8)
        self.encoder = torch.nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, dropout=0.0, batch_first=True)
        self.lstm = torch.nn.LSTM(8, 8, batch_first=True)
        self.norm = torch.nn.BatchNorm1d(8)
        self.again = torch.nn.Linear(8, 8)
        self.one = torch.nn.Linear(8, 8, bias=False)
        self.other = torch.nn.Linear(8, 8)
        self.other.weight = self.one.weight
        self.unused = torch.nn.Linear(8, 3)
        self.large = torch.nn.Linear(8, 64)
        self.last = torch.nn.Linear(64, 1)
        fill_(self, 0)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs).unsqueeze(1).expand(-1, 3, -1)
        hidden, _ = self.lstm(self.encoder(hidden))
        hidden = self.again(self.norm(hidden.mean(dim=1)).tanh())
        hidden = self.other(self.one(self.again(hidden.tanh())).tanh())
        return self.last(self.large(hidden).tanh())


def own_batches(session: Cluster, *, steps: int = STEPS) -> list[Batch]:
    """What this trainer is given."""
    return of_rank(make_batches([6] * session.world_size, steps=steps), session.rank)


def train_mixed(session: Cluster, recipe: str, name: str, **more: Any) -> list[list[torch.Tensor]]:
    """The loss of every step, what the model says in evaluation mode right after the last, and its values."""
    module = Mixed()
    optimizer = remote_optimizer(session, module, RECIPES[recipe], name, **{"bucket_bytes": SMALL_BUCKET_BYTES, **more})
    batches = own_batches(session)
    losses = [step_on(module, optimizer, batch) for batch in batches]
    module.eval()
    with torch.no_grad():
        said = module(batches[0][0])
    optimizer.wait()
    return [losses, [said], values(module)]


# Looking inside


def exchanged_bytes(optimizer: RemoteOptimizer, tensors: Sequence[torch.Tensor] | None = None) -> int:
    """Bytes of the buckets that travel with a step; only of those with these parameters, if given."""
    model = optimizer._model
    assert model is not None
    buckets = [each for each in model.layout.buckets if each.group != STORED]
    if tensors is not None:
        wanted = model._replica.buckets_with(index for index, each in model.stepped.items() if id(each) in ids(tensors))
        buckets = [each for each in buckets if each.index in wanted]
    return sum(each.num_bytes for each in buckets)


def ids(tensors: Sequence[torch.Tensor]) -> set[int]:
    return {id(each) for each in tensors}


def await_early(optimizer: RemoteOptimizer) -> int:
    """Waits until what is sent during the backward pass has been; returns how many buckets that were."""
    early, model = optimizer._early, optimizer._model
    assert early is not None
    assert model is not None
    for job in list(early._jobs):
        job.exception(10.0)
    return 0 if model._early is None else len(model._early.buckets)


def sent_bytes(session: Cluster, action: Callable[[], Any]) -> int:
    """Bytes of tensors that a session sends for something."""
    before = session.statistics().sent_bytes
    action()
    return session.statistics().sent_bytes - before


def streams(cluster: LocalCluster) -> int:
    """Streams that servers have under way."""
    return sum(sum(node.shards._streams.values()) for node in cluster.nodes)


def await_no_streams(cluster: LocalCluster) -> None:
    until(lambda: not streams(cluster), lambda: f"{streams(cluster)} streams were left")


# Replies that are held


class HeldReplies:
    """Of the replies to each Step the first `let_through` come (None: all), the others once `release` was called.

    With `breaks` the connection breaks instead, once.
    """

    def __init__(self) -> None:
        self.let_through: int | None = None
        self.breaks = False
        self.held = threading.Event()
        self._released = threading.Event()

    def hold(self, let_through: int, *, breaks: bool = False) -> None:
        """From the next call on."""
        self._released.clear()
        self.held.clear()
        self.let_through, self.breaks = let_through, breaks

    def release(self) -> None:
        """What is held comes, and nothing is held from now on."""
        self.let_through = None
        self._released.set()

    async def pass_on(self, number: int, is_closed: Callable[[], bool]) -> None:
        """Returns when the reply of that number may come."""
        if self.let_through is None or number < self.let_through:
            return
        self.held.set()
        while not self._released.is_set() and not is_closed():
            await asyncio.sleep(0.002)
        if self.breaks or is_closed():
            self.breaks = False
            raise ServerUnavailable("the connection broke while the test held a reply")


class _HoldingChannel:
    def __init__(self, inner: Channel, replies: HeldReplies) -> None:
        self._inner = inner
        self._replies = replies
        self._closed = False

    @property
    def address(self) -> str:
        return self._inner.address

    async def call(
        self, method: Method, requests: AsyncIterable[Sendable], *, timeout_s: float, place: Place | None = None
    ) -> AsyncGenerator[Any, None]:
        number = 0
        async for reply in self._inner.call(method, requests, timeout_s=timeout_s, place=place):
            if method.name == "Step":
                await self._replies.pass_on(number, lambda: self._closed)
                number += 1
            yield reply

    async def close(self) -> None:
        self._closed = True
        await self._inner.close()


@contextmanager
def holding(cluster: LocalCluster) -> Iterator[HeldReplies]:
    """Sessions that are opened in the block suffer it, and get each bucket in a reply of its own."""
    replies = HeldReplies()
    connect: Connector = cluster.network.connect

    def connect_holding(address: str) -> Channel:
        return _HoldingChannel(connect(address), replies)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster.network, "connect", connect_holding)
        patch.setattr(chunks, "MESSAGE_BYTES", BUCKET_BYTES)
        yield replies
        replies.release()
