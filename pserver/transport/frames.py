"""Frames on a TCP connection: what streams of tensors travel in beside gRPC, which copies each byte several times.

A frame is its kind (1 byte), the length of its payload (4 bytes, little-endian) and the payload. A connection begins
with HELLO (the ticket that `Calls.FindStreams` gave) and then carries one call after another:

    client  CALL path, MESSAGE*, END        the requests
    server  MESSAGE*, then END or ERROR     the replies; ERROR is a `CarriedError`

The messages are those of the schema. A client gives a call up by closing the connection.
"""

import asyncio
import select
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum
from typing import NamedTuple

import torch

from pserver.errors import InvalidRequest
from pserver.transport.raw_chunks import Piece, memory_of_piece
from pserver.wire.tensors import memory_of

_HEADER = struct.Struct("<BI")
#: A peer that has vanished without closing is noticed after about 50 s.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 20), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))
#: While a frame comes, the event loop is woken for so many bytes; each time costs as much as receiving half of them.
WORTH_WAKING_BYTES = 256 << 10
#: So many bytes of a large message say where the rest belongs.
_BEGINNING_BYTES = 512
#: Smaller messages are received whole.
WORTH_PLACING_BYTES = 64 << 10
#: The kernel takes at most 1024 pieces of memory at once.
MAX_PARTS = 1024


class ConnectionBroken(Exception):
    """A connection has broken, or was closed. It is no OSError: handlers raise those, too."""


class Kind(IntEnum):
    """What a frame is."""

    HELLO = 1
    CALL = 2
    MESSAGE = 3
    END = 4
    ERROR = 5


class Frame(NamedTuple):
    """One frame."""

    kind: int
    payload: memoryview


#: Given the first bytes of a message and its size: where in it something begins that belongs elsewhere, and where.
Divert = Callable[[memoryview, int], tuple[int, memoryview] | None]


class FrameSocket:
    """Frames over a connected socket, which it owns. One sender and one receiver at a time, on one event loop.

    Args:
        connected: the socket.
        reuse: whether each frame that is received may take the memory of the one before; else each has its own.
    """

    def __init__(self, connected: socket.socket, *, reuse: bool) -> None:
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            connected.setsockopt(socket.IPPROTO_TCP, option, value)
        self._socket = connected
        self._reuse = reuse
        self._memory = memoryview(bytearray())
        self._header = memoryview(bytearray(_HEADER.size))
        self._beginning = memoryview(bytearray(_BEGINNING_BYTES))
        self._least_bytes = 1

    async def send(self, kind: Kind, *payload: Piece) -> None:
        """Sends a frame; other work of the event loop gets its turn.

        Raises:
            ConnectionBroken: it is of no use after this, nor once this has been cancelled.
        """
        try:
            await self._send([_HEADER.pack(kind, sum(map(len, payload))), *payload])
        except OSError as error:
            raise ConnectionBroken(str(error)) from None
        await asyncio.sleep(0)  # a socket that is always ready would keep the loop to itself

    async def _send(self, parts: Sequence[Piece]) -> None:
        first = start = 0  # what is to be sent next: part, and byte of it
        while first < len(parts):
            last = min(first + MAX_PARTS, len(parts))
            # Asked for anew each time: what is lent may have been taken back.
            memory = [memoryview(memory_of_piece(part)) for part in parts[first:last]]
            memory[0] = memory[0][start:]
            with suppress(BlockingIOError):
                start += self._socket.sendmsg(memory)
            while first < last and start >= len(parts[first]):
                start -= len(parts[first])
                first += 1
            if first < last:  # there is no room for more at the moment
                await self._writable()

    async def _writable(self) -> None:
        loop = asyncio.get_running_loop()
        writable = loop.create_future()
        loop.add_writer(self._socket, _settle, writable)
        try:
            await writable
        finally:
            loop.remove_writer(self._socket)

    async def receive(self, max_bytes: int, divert: Divert | None = None) -> Frame:
        """The next frame.

        Args:
            divert: asked where the rest of a large message belongs; then the payload is its beginning only.

        Raises:
            ConnectionBroken
            InvalidRequest: the payload is larger than `max_bytes`; no memory has been taken for it.
        """
        await self._fill(self._header)
        kind, num_bytes = _HEADER.unpack(self._header)
        if num_bytes > max_bytes:
            raise InvalidRequest(f"a message of {num_bytes} bytes came; at most {max_bytes} are accepted")
        payload = await self._payload(num_bytes, divert if kind == Kind.MESSAGE else None)
        await asyncio.sleep(0)
        return Frame(kind, payload)

    async def _payload(self, num_bytes: int, divert: Divert | None) -> memoryview:
        begun = self._beginning if divert is not None and num_bytes >= WORTH_PLACING_BYTES else self._beginning[:0]
        await self._fill(begun)
        if begun and (found := divert(begun, num_bytes)) is not None:  # type: ignore[misc]
            start, target = found
            target[: len(begun) - start] = begun[start:]
            await self._fill(target[len(begun) - start :])
            return begun
        payload = self._memory_for(num_bytes)
        payload[: len(begun)] = begun
        await self._fill(payload[len(begun) :])
        return payload

    def _memory_for(self, num_bytes: int) -> memoryview:
        if self._reuse and num_bytes <= len(self._memory):
            return self._memory[:num_bytes]
        memory = memory_of(torch.empty(num_bytes, dtype=torch.uint8))  # a bytearray would be zeroed first
        if self._reuse:
            self._memory = memory
        return memory

    async def _fill(self, memory: memoryview) -> None:
        loop = asyncio.get_running_loop()
        while memory:
            try:
                self._wait_for_at_least(min(len(memory), WORTH_WAKING_BYTES))
                received = await loop.sock_recv_into(self._socket, memory)
            except OSError as error:
                raise ConnectionBroken(str(error)) from None
            if not received:
                raise ConnectionBroken("the other side closed it")
            memory = memory[received:]

    def _wait_for_at_least(self, num_bytes: int) -> None:
        """Sets how much has to have come before the socket counts as readable (or that it has ended)."""
        if num_bytes != self._least_bytes:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)
            self._least_bytes = num_bytes

    @property
    def quiet(self) -> bool:
        """Whether it is open as far as is known, and nothing has come that was not received."""
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    @property
    def hung_up(self) -> bool:
        """Whether the other side has closed it, even if there is something left to receive."""
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP)
        return bool(poll.poll(0))

    def break_off(self) -> None:
        """Ends the connection: whoever sends or receives hears of it."""
        with suppress(OSError):  # it has ended already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Frees the connection. Nobody may be sending or receiving; see `break_off`."""
        self._socket.close()


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
