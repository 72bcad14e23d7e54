"""The Coordinator service: decode, call the core, encode."""

import asyncio
from collections.abc import AsyncIterator

from pserver.config import parse_address
from pserver.core.membership import check_figures
from pserver.core.messages import HeartbeatHeard
from pserver.errors import ConfigError, InvalidRequest, ProtocolMismatch
from pserver.server.coordinator_host import CoordinatorHost, ServerLink
from pserver.transport.convert import (
    command_to_proto,
    placement_to_proto,
    push_id_from_proto,
    report_from_proto,
    spec_from_proto,
    status_to_proto,
)
from pserver.transport.deadline import check_wait_s
from pserver.transport.gen import coordinator_pb2 as pb
from pserver.transport.methods import first_of
from pserver.types import PROTOCOL_VERSION

#: Longest name and longest address of a server, in characters.
MAX_SERVER_NAME_LENGTH = 255
MAX_ADDRESS_LENGTH = 512
#: A model of this many tensors is decoded on a thread: the event loop has leases to renew.
INLINE_TENSORS = 1000


class CoordinatorService:
    """Serves the RPCs of coordinator.proto."""

    def __init__(self, host: CoordinatorHost) -> None:
        self._host = host

    async def join(self, request: pb.JoinRequest) -> pb.JoinReply:
        _check_protocol(request.protocol, "trainer")
        member = self._host.core.join(request.nonce, request.rank, self._host.now_s())
        self._host.changed()
        await self._host.kept()
        return pb.JoinReply(trainer_id=member.trainer_id, rank=member.rank, lease_s=self._host.core.trainer_lease_s)

    async def renew(self, request: pb.RenewRequest) -> pb.RenewReply:
        check_figures(request.reported, request.sent_bytes, request.received_bytes)
        self._host.core.renew(
            request.trainer_id,
            sent_bytes=request.sent_bytes,
            received_bytes=request.received_bytes,
            reported=request.reported,
            now_s=self._host.now_s(),
        )
        return pb.RenewReply(lease_s=self._host.core.trainer_lease_s)

    async def leave(self, request: pb.LeaveRequest) -> pb.LeaveReply:
        self._host.core.leave(push_id_from_proto(request.push_id), self._host.now_s())
        self._host.changed()
        await self._host.kept()
        return pb.LeaveReply()

    async def register_model(self, request: pb.RegisterModelRequest) -> pb.RegisterModelReply:
        if len(request.spec.tensors) < INLINE_TENSORS:
            spec = spec_from_proto(request.spec)
        else:
            spec = await asyncio.to_thread(spec_from_proto, request.spec)
        registration = await self._host.register(
            push_id_from_proto(request.push_id),
            spec,
            initialised=request.initialised,
            replaces=request.replaces,
            wait_s=check_wait_s(request.wait_s),
        )
        await self._host.kept()
        return pb.RegisterModelReply(
            initialise=registration.initialise,
            placement=placement_to_proto(registration.placement),
            epoch=registration.epoch,
        )

    async def attach(self, request: pb.AttachRequest) -> pb.AttachReply:
        attachment = self._host.core.attach(
            push_id_from_proto(request.push_id), request.model, request.epoch, self._host.now_s()
        )
        self._host.changed()
        await self._host.kept()
        return pb.AttachReply(round=attachment.round, step=attachment.step)

    async def drop_model(self, request: pb.DropModelRequest) -> pb.DropModelReply:
        self._host.core.drop_model(push_id_from_proto(request.push_id), request.model)
        self._host.changed()
        await self._host.kept()
        return pb.DropModelReply()

    async def watch(self, request: pb.WatchRequest) -> pb.WatchReply:
        placement = await self._host.watch(request.model, request.version, check_wait_s(request.wait_s))
        return pb.WatchReply(
            version=placement.version, placement=placement_to_proto(placement.shards), epoch=placement.epoch
        )

    async def status(self, request: pb.StatusRequest) -> pb.StatusReply:
        return status_to_proto(self._host.core.status(self._host.now_s()))

    async def link(self, messages: AsyncIterator[pb.ServerMessage]) -> AsyncIterator[pb.CoordinatorMessage]:
        first = await first_of(messages)
        if first.WhichOneof("kind") != "hello":
            raise InvalidRequest("the first message of a link must be Hello")
        hello = first.hello
        _check_protocol(hello.protocol, "server")
        _check_server(hello.name, hello.address)
        link = self._host.open_link(hello.name, hello.address, hello.incarnation, hello.arithmetic)
        reader = asyncio.create_task(self._read(link, messages))
        try:
            yield pb.CoordinatorMessage(
                welcome=pb.Welcome(lease_s=self._host.core.server_lease_s, term=self._host.term)
            )
            async for command in link.commands():
                yield command_to_proto(command)
            if reader.done():
                reader.result()  # raises what was wrong with a message
        finally:
            reader.cancel()
            self._host.close_link(link)

    async def _read(self, link: ServerLink, messages: AsyncIterator[pb.ServerMessage]) -> None:
        try:
            async for message in messages:
                if message.WhichOneof("kind") == "heartbeat":
                    self._host.heard(link, None)
                    link.tell(HeartbeatHeard(sent_ns=message.heartbeat.sent_ns))
                else:
                    self._host.heard(link, report_from_proto(message))
        finally:
            link.end()


def _check_protocol(version: int, who: str) -> None:
    if version != PROTOCOL_VERSION:
        raise ProtocolMismatch(
            f"this coordinator speaks protocol {PROTOCOL_VERSION}, the {who} {version}; install the same pserver "
            "on both"
        )


def _check_server(name: str, address: str) -> None:
    if not 1 <= len(name) <= MAX_SERVER_NAME_LENGTH:
        raise ConfigError(
            f"a server's name must have 1 to {MAX_SERVER_NAME_LENGTH} characters, but this one has {len(name)}: "
            f"{name[:40]!r}"
        )
    if len(address) > MAX_ADDRESS_LENGTH:
        raise ConfigError(
            f"a server's address may have {MAX_ADDRESS_LENGTH} characters, but this one has {len(address)}"
        )
    parse_address(address)
