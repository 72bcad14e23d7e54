"""What of a round can be known and read while it is still being applied."""

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from pserver.core.messages import Applied, Decision
from pserver.core.shard import Progress
from pserver.errors import DeadlineExceeded, ModelFailed
from pserver.server.hosted_shard import INLINE_BYTES, HostedShard
from pserver.transport.raw_chunks import Lent
from pserver.types import PushId
from tests.results import step_result
from tests.waiting import run_limited

LIMIT_S = 10.0
PUSH = PushId(7, 3, 1)
BUCKETS = [SimpleNamespace(index=index, num_master_bytes=64) for index in range(3)]


def decision(round_number: int) -> Decision:
    return Decision(round=round_number, contributions=(), divisor=1, options=())


class SlowShard:
    """Steps a bucket each time that it is let, on the thread of the arithmetic; a bucket's value is its round."""

    def __init__(self) -> None:
        self.buckets = BUCKETS
        self.num_bytes = INLINE_BYTES
        self.spec = SimpleNamespace(name="slow")
        self.round = 0
        self.failure: str | None = None
        self.memory = [bytearray(1) for _ in range(3)]
        self.let = threading.Semaphore(0)
        self.error: Exception | None = None
        self._outcomes: dict[PushId, Any] = {PUSH: "waits"}

    def apply(self, decided: Decision, progress: Progress) -> Applied:
        progress.begun(decided.round, {PUSH: step_result(decided.round)})
        for number in range(3):
            assert self.let.acquire(timeout=LIMIT_S)
            if self.error is not None:
                raise self.error
            self.memory[number][0] = decided.round
            progress.stepped(number)
        assert self.let.acquire(timeout=LIMIT_S)
        self.round = decided.round
        self._outcomes[PUSH] = step_result(decided.round)
        return Applied(model="slow", shard=0, epoch=1, round=self.round, version=self.round)

    def outcome(self, push_id: PushId) -> Any:
        return self._outcomes.get(push_id)

    def read(self, bucket: int) -> memoryview:
        return memoryview(self.memory[bucket])


@asynccontextmanager
async def hosting() -> AsyncIterator[tuple[SlowShard, HostedShard]]:
    shard = SlowShard()
    with ThreadPoolExecutor(1) as arithmetic:
        try:
            yield shard, HostedShard("s0", shard, arithmetic)  # type: ignore[arg-type]
        finally:
            shard.let.release(10)


def read(hosted: HostedShard, bucket: int) -> "asyncio.Task[tuple[int, int]]":
    """The round that a bucket is said to be of, and its value."""
    return asyncio.create_task(
        hosted.read(BUCKETS[bucket], lambda round_number, data: (round_number, data[0]))  # type: ignore[arg-type]
    )


def lend(hosted: HostedShard, bucket: int) -> "asyncio.Task[Lent]":
    return asyncio.create_task(
        hosted.read(BUCKETS[bucket], lambda _, data: hosted.lend(data))  # type: ignore[arg-type]
    )


async def rest() -> None:
    await asyncio.sleep(0.05)


def test_buckets_are_read_as_they_are_stepped_and_the_outcome_is_known_from_the_start() -> None:
    async def scenario() -> None:
        async with hosting() as (shard, hosted):
            patient = asyncio.create_task(hosted.outcome(PUSH, LIMIT_S))
            eager = asyncio.create_task(hosted.outcome(PUSH, LIMIT_S, early=True))
            await rest()
            applying = asyncio.create_task(hosted.apply(decision(1)))
            assert await eager == step_result(1)
            reads = [read(hosted, bucket) for bucket in range(3)]
            for bucket in range(3):
                await rest()
                assert [each.done() for each in reads] == [number < bucket for number in range(3)]
                shard.let.release()
            assert await asyncio.gather(*reads) == [(1, 1)] * 3
            assert await read(hosted, 0) == (1, 1)
            assert not patient.done()
            assert not applying.done()
            shard.let.release()
            assert (await applying).round == 1
            assert await patient == step_result(1)
            assert await read(hosted, 2) == (1, 1)

    run_limited(scenario(), LIMIT_S)


def test_a_round_that_fails_half_way_is_read_by_nobody() -> None:
    async def scenario() -> None:
        async with hosting() as (shard, hosted):
            applying = asyncio.create_task(hosted.apply(decision(1)))
            assert await hosted.outcome(PUSH, LIMIT_S, early=True) == step_result(1)
            shard.let.release()
            assert await read(hosted, 0) == (1, 1)
            late = read(hosted, 1)
            await rest()
            shard.error = ZeroDivisionError("in the optimizer")
            shard.let.release()
            with pytest.raises(ZeroDivisionError):
                await applying
            for each in (late, read(hosted, 0), asyncio.create_task(hosted.outcome(PUSH, LIMIT_S, early=True))):
                with pytest.raises(ModelFailed, match=r"server s0 could not apply round 1: ZeroDivisionError"):
                    await each

    run_limited(scenario(), LIMIT_S)


def test_who_waits_for_another_round_is_not_told_of_this_one() -> None:
    async def scenario() -> None:
        async with hosting() as (shard, hosted):
            other = PushId(7, 4, 1)
            shard._outcomes[other] = "waits"
            waiting = asyncio.create_task(hosted.outcome(other, 0.2, early=True))
            await rest()
            applying = asyncio.create_task(hosted.apply(decision(1)))
            await rest()
            shard.let.release(4)
            await applying
            with pytest.raises(DeadlineExceeded):
                await waiting

    run_limited(scenario(), LIMIT_S)


def test_a_bucket_that_is_lent_keeps_the_values_of_its_round() -> None:
    async def scenario() -> None:
        async with hosting() as (shard, hosted):
            first = await lend(hosted, 0)
            assert first.memory.obj is shard.memory[0]
            shard.let.release(4)
            await hosted.apply(decision(1))
            assert bytes(first.memory) == b"\0"  # of before
            applying = asyncio.create_task(hosted.apply(decision(2)))
            shard.let.release(1)
            early = await lend(hosted, 0)  # of the round that is being applied, and in nobody's way
            waiting = lend(hosted, 1)
            await rest()
            shard.let.release(3)
            await applying
            assert early.memory.obj is shard.memory[0]
            assert (await waiting).memory.obj is shard.memory[1]
            shard.let.release(4)
            await hosted.apply(decision(3))
            assert [bytes(each.memory) for each in (first, early, waiting.result())] == [b"\0", b"\2", b"\2"]
            assert [bytes(each) for each in shard.memory] == [b"\3"] * 3

    run_limited(scenario(), LIMIT_S)


def test_what_was_let_go_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with hosting() as (shard, hosted):
            lent = [await lend(hosted, number) for number in range(3)]
            del lent[1:]
            await rest()
            shard.let.release(4)
            await hosted.apply(decision(1))
            assert taken_back == lent

    taken_back: list[Lent] = []
    monkeypatch.setattr(Lent, "take_back", lambda lent: taken_back.append(lent))
    run_limited(scenario(), LIMIT_S)
