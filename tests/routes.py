"""The routes that a step can take from a trainer to a shard; each must lose, repeat and refuse alike."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from pserver.client import replica, shard_client


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """How sessions are opened for it (`transport` of `connect`), which RPC carries its steps, and whether those stream.

    The models of tests are so small that they stream, and are copied in parts, only while `taken`.
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
                patch.setattr(replica, "PART_BYTES", 64)
            yield


STREAM = Route(transport="grpc", method="Step", streams=True)
SOCKETS = Route(transport="tcp", method="Step", streams=True)
ONE_MESSAGE = Route(transport="grpc", method="StepOnce")
MEMORY = Route(transport="shm", method="StepOnce")

ROUTES = {"stream": STREAM, "one message": ONE_MESSAGE, "memory": MEMORY}
#: Where there is a network: streams go over gRPC or beside it.
NETWORK_ROUTES = {**ROUTES, "sockets": SOCKETS}
