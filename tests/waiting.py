"""Waiting in tests: until something holds, and no longer than a session's deadline."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from pserver.client.cluster import Cluster
from pserver.types import ClusterStatus

#: A condition that a test polls for must hold by then, in seconds.
POLL_S = 10.0


def until(condition: Callable[[], bool], what: str | Callable[[], str], *, limit_s: float = POLL_S) -> None:
    """Polls until a condition holds; `what` says what that would be, also as of the end.

    Raises:
        AssertionError: it does not within `limit_s`.
    """
    give_up = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < give_up, f"not in time: {what if isinstance(what, str) else what()}"
        time.sleep(0.005)


def until_shards(status: Callable[[], ClusterStatus], name: str, *, round_number: int, version: int) -> None:
    """Polls until the coordinator has heard that all shards of a model are at this round and version.

    Nobody waits for that news, so it comes a little later than the outcome of a step.
    """
    expected = (round_number, version)

    def found() -> set[tuple[int, int]]:
        (model,) = [each for each in status().models if each.name == name]
        return {(shard.round, shard.version) for shard in model.shards}

    until(lambda: found() == {expected}, lambda: f"all shards at {expected}; they are at {found()}")


def run_limited(scenario: Coroutine[Any, Any, None], limit_s: float = POLL_S) -> None:
    """Runs a scenario on an event loop of its own; raises TimeoutError if it is not over within `limit_s`."""

    async def limited() -> None:
        async with asyncio.timeout(limit_s):
            await scenario

    asyncio.run(limited())


async def settle() -> None:
    """Lets everything on the event loop that can go on do so."""
    for _ in range(20):
        await asyncio.sleep(0)


def set_timeout(session: Cluster, timeout_s: float) -> None:
    """Changes the deadline of a session's later operations, so that registering may take its time."""
    session.settings = replace(session.settings, timeout_s=timeout_s)
