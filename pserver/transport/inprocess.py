"""The in-process twin of gRPC: the same handlers, the same bytes, no sockets. For tests and for a server's own link."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Mapping

from google.protobuf.message import Message

from pserver.errors import DeadlineExceeded, InternalError, PserverError, ServerUnavailable
from pserver.transport.methods import Handler, Method
from pserver.transport.status import from_wire, to_wire


class InProcessNetwork:
    """Servers by address, all on one event loop."""

    def __init__(self) -> None:
        self._servers: dict[str, Mapping[str, tuple[Method, Handler]]] = {}

    def serve(self, address: str, handlers: Mapping[str, tuple[Method, Handler]]) -> None:
        """Makes a server reachable."""
        self._servers[address] = handlers

    def stop(self, address: str) -> None:
        """Makes a server unreachable; calls under way end at their next message."""
        self._servers.pop(address, None)

    def connect(self, address: str) -> "InProcessChannel":
        """A channel; see `Connector`."""
        return InProcessChannel(self, address)

    def handler(self, address: str, method: Method) -> Handler:
        """The handler of an RPC.

        Raises:
            ServerUnavailable: nobody serves that address.
        """
        handlers = self._servers.get(address)
        if handlers is None:
            raise ServerUnavailable(f"server at {address}: nobody serves this address in this process; start it first")
        return handlers[method.path][1]


class InProcessChannel:
    """A `Channel` to a server in this process."""

    def __init__(self, network: InProcessNetwork, address: str) -> None:
        self._network = network
        self._address = address
        self._closed = False

    @property
    def address(self) -> str:
        return self._address

    async def call(
        self, method: Method, requests: AsyncIterable[Message], *, timeout_s: float
    ) -> AsyncGenerator[Message, None]:
        self._check_open()
        handler = self._network.handler(self._address, method)
        replies = handler(_copied(method.request_type, requests))
        give_up = asyncio.get_running_loop().time() + timeout_s
        try:
            while True:
                try:
                    async with asyncio.timeout_at(give_up):
                        reply = await anext(replies)
                except StopAsyncIteration:
                    return
                self._network.handler(self._address, method)
                self._check_open()
                yield method.reply_type.FromString(reply.SerializeToString())
        except PserverError as error:
            raise from_wire(*to_wire(error)) from None
        except TimeoutError:
            raise DeadlineExceeded(
                f"server at {self._address}: {method.path} did not answer within {timeout_s:g} s"
            ) from None
        except Exception as error:
            raise InternalError(f"{method.path} failed with {type(error).__name__}: {error}") from error
        finally:
            await replies.aclose()

    async def close(self) -> None:
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise ServerUnavailable(f"server at {self._address}: the channel was closed")


async def _copied(request_type: type[Message], requests: AsyncIterable[Message]) -> AsyncIterator[Message]:
    async for request in requests:
        yield request_type.FromString(request.SerializeToString())
