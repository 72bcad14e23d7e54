"""The three routes that a step can take from a trainer to a shard; each must lose, repeat and refuse alike."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from pserver.client import shard_client


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """How sessions are opened for it (`transport` of `connect`), which RPC carries its steps, and whether those stream.

    The models of tests are so small that they stream only while `taken`.
    """

    transport: str
    method: str
    streams: bool = False

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Steps of sessions of this transport take this route."""
        with pytest.MonkeyPatch.context() as patch:
            if self.streams:
                patch.setattr(shard_client, "SMALL_BYTES", 0)
            yield


STREAM = Route(transport="grpc", method="Step", streams=True)
ONE_MESSAGE = Route(transport="grpc", method="StepOnce")
MEMORY = Route(transport="shm", method="StepOnce")

ROUTES = {"stream": STREAM, "one message": ONE_MESSAGE, "memory": MEMORY}
