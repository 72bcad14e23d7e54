"""Every RPC as a value, read from the descriptors of the generated code."""

import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from pserver.errors import InvalidRequest
from pserver.transport.gen import coordinator_pb2, shards_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One RPC: its path on the wire, message classes, and which sides stream."""

    service: str
    name: str
    request_type: type[Message]
    reply_type: type[Message]
    client_streaming: bool
    server_streaming: bool

    @property
    def path(self) -> str:
        return f"/{self.service}/{self.name}"

    @property
    def handler_name(self) -> str:
        """Name of the method of a service class that serves it."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", self.name).lower()


def _methods(service: ServiceDescriptor) -> dict[str, Method]:
    return {each.name: _method(service, each) for each in service.methods}


def _method(service: ServiceDescriptor, method: MethodDescriptor) -> Method:
    return Method(
        service=service.full_name,
        name=method.name,
        request_type=GetMessageClass(method.input_type),
        reply_type=GetMessageClass(method.output_type),
        client_streaming=method.client_streaming,
        server_streaming=method.server_streaming,
    )


COORDINATOR: dict[str, Method] = _methods(coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"])
SHARDS: dict[str, Method] = _methods(shards_pb2.DESCRIPTOR.services_by_name["Shards"])

T = TypeVar("T")

#: A served RPC: requests in, replies out, whatever the RPC's own shape is.
Handler = Callable[[AsyncIterator[Any]], AsyncGenerator[Message, None]]


async def first_of(requests: AsyncIterator[T]) -> T:
    """The first message of a stream.

    Raises:
        InvalidRequest: there is none.
    """
    async for request in requests:
        return request
    raise InvalidRequest("the stream ended before its first message")


def bind(methods: dict[str, Method], service: object) -> dict[str, tuple[Method, Handler]]:
    """The handlers of a service object by path; each RPC is served by the method named like it in snake_case."""
    return {
        method.path: (method, _uniform(method, getattr(service, method.handler_name))) for method in methods.values()
    }


def _uniform(method: Method, function: Callable[[Any], Any]) -> Handler:
    async def handler(requests: AsyncIterator[Any]) -> AsyncGenerator[Message, None]:
        argument = requests if method.client_streaming else await first_of(requests)
        if method.server_streaming:
            async for reply in function(argument):
                yield reply
        else:
            yield await function(argument)

    return handler
