"""A proxy between a trainer and a server that reads the HTTP/2 frames it passes on (RFC 9113, section 4.1)."""

import asyncio
import contextlib
from collections import Counter
from dataclasses import dataclass, field

from pserver.transport.loop import LoopThread

_PREFACE_BYTES = 24
_HEAD_BYTES = 9
_TYPES = {6: "ping", 7: "goaway"}
_ACK = 1


@dataclass(slots=True)
class Frames:
    """What has passed: frames by direction ("sent" by the trainer, "received") and kind, connections, GOAWAY texts."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    num_connections: int = 0
    farewells: list[bytes] = field(default_factory=list)


class FrameProxy:
    """Passes bytes on to one server. Use it in a `with` block.

    Args:
        target: address of the server.
        accepts_after_s: how long a connection waits before the server hears of it, in seconds.
    """

    def __init__(self, target: str, *, accepts_after_s: float = 0.0) -> None:
        self._accepts_after_s = accepts_after_s
        self.frames = Frames()
        self._target = target
        self._loop = LoopThread("frame-proxy")

    def __enter__(self) -> "FrameProxy":
        self._loop.start()
        self.address = self._loop.run(self._start())
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.close()

    async def _start(self) -> str:
        self._server = await asyncio.start_server(self._pass_on, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.frames.num_connections += 1
        # asyncio logs a cancelled connection as a failure: https://github.com/python/cpython/issues/113538
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await asyncio.sleep(self._accepts_after_s)
            host, port = self._target.split(":")
            onward_reader, onward_writer = await asyncio.open_connection(host, int(port))
            with contextlib.closing(writer), contextlib.closing(onward_writer):
                await asyncio.gather(
                    self._copy("sent", reader, onward_writer, _PREFACE_BYTES),
                    self._copy("received", onward_reader, writer, 0),
                )

    async def _copy(
        self, direction: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, preface_bytes: int
    ) -> None:
        writer.write(await reader.readexactly(preface_bytes))
        while True:
            head = await reader.readexactly(_HEAD_BYTES)
            body = await reader.readexactly(int.from_bytes(head[:3]))
            writer.write(head + body)
            await writer.drain()
            kind = _TYPES.get(head[3], "other")
            if kind == "ping" and head[4] & _ACK:
                kind = "ping answer"
            if kind == "goaway":
                self.frames.farewells.append(body)
            self.frames.counts[direction, kind] += 1
