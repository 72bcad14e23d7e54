"""What every transport promises: `pserver.transport.channel.Channel` over gRPC and in process."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, suppress
from random import Random
from typing import Any

import grpc
import pytest

from pserver.errors import (
    ERRORS,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    ProtocolMismatch,
    PserverError,
    ServerUnavailable,
)
from pserver.transport.channel import Channel, one, unary
from pserver.transport.faults import Fault, FaultKind, FaultPlan, with_faults
from pserver.transport.gen import calls_pb2, coordinator_pb2
from pserver.transport.loop import LoopThread
from pserver.transport.methods import CARRY, COORDINATOR, Method
from pserver.transport.status import ERROR_KEY, MAX_ENCODED_BYTES
from tests.contract.transports import (
    BIDI,
    CLIENT_STREAM,
    SERVER_STREAM,
    SHAPES,
    UNARY,
    Requests,
    Transport,
    chunks_of,
    grpc_transport,
    plain,
    request_of,
    until,
)
from tests.hostile.mutations import spoiled

TIMEOUT_S = 5.0

every_shape = pytest.mark.parametrize("method", SHAPES.values(), ids=SHAPES)
streams_of_replies = pytest.mark.parametrize("method", [SERVER_STREAM, BIDI], ids=["server stream", "bidi"])


async def several(*messages: Any) -> Requests:
    for message in messages:
        yield message


async def outcome(
    channel: Channel, method: Method, *requests: Any, timeout_s: float = TIMEOUT_S
) -> tuple[list[Any], PserverError | None]:
    """All replies to these requests, or to one default request if there are none, and the error that ended them."""
    sent = several(*(requests or (request_of(method),)))
    replies = []
    try:
        async for reply in channel.call(method, sent, timeout_s=timeout_s):
            replies.append(plain(reply))
    except PserverError as error:
        return replies, error
    return replies, None


async def call(channel: Channel, method: Method, *requests: Any) -> list[Any]:
    """The replies of a call that must succeed."""
    replies, error = await outcome(channel, method, *requests)
    assert error is None
    return replies


async def failure(channel: Channel, method: Method, *requests: Any, timeout_s: float = TIMEOUT_S) -> PserverError:
    """The error of a call that must fail."""
    _, error = await outcome(channel, method, *requests, timeout_s=timeout_s)
    assert error is not None
    return error


def raising(error: Exception, *, after_replies: int = 0) -> Callable[[Method, Requests], AsyncIterator[Any]]:
    """A behaviour that reads one request, replies so many times and fails."""

    async def behaviour(method: Method, requests: Requests) -> AsyncIterator[Any]:
        async for _ in requests:
            break
        for _ in range(after_replies):
            yield method.reply_type()
        raise error

    return behaviour


async def never_answers(method: Method, requests: Requests) -> AsyncIterator[Any]:
    await asyncio.Event().wait()
    yield method.reply_type()


async def answers_once_and_waits(method: Method, requests: Requests) -> AsyncIterator[Any]:
    yield method.reply_type(round=1)
    await asyncio.Event().wait()


# Calls of every shape


def test_a_unary_call_carries_one_message_each_way(transport: Transport) -> None:
    async def scenario() -> Any:
        channel = transport.connect(transport.address)
        request = request_of(UNARY, 7)
        reply = await unary(channel, UNARY, request, coordinator_pb2.DropModelReply, timeout_s=TIMEOUT_S)
        await channel.close()
        return reply

    assert isinstance(transport.run(scenario()), coordinator_pb2.DropModelReply)
    assert transport.service.heard == [request_of(UNARY, 7)]


def test_a_client_stream_arrives_in_order_and_gets_one_reply(transport: Transport) -> None:
    requests = [request_of(CLIENT_STREAM, number, bytes([number])) for number in range(20)]

    async def scenario() -> list[Any]:
        channel = transport.connect(transport.address)
        replies = await call(channel, CLIENT_STREAM, *requests)
        await channel.close()
        return replies

    assert transport.run(scenario()) == [CLIENT_STREAM.reply_type()]
    assert transport.service.heard == requests


def test_a_server_stream_delivers_each_reply_as_it_is_made(transport: Transport) -> None:
    async def scenario() -> list[int]:
        may_go_on = asyncio.Queue[None]()

        async def behaviour(method: Method, requests: Requests) -> AsyncIterator[Any]:
            for number in range(1, 4):
                yield method.reply_type(round=number)
                await may_go_on.get()

        transport.service.behaviour = behaviour
        channel = transport.connect(transport.address)
        found = []
        async for reply in channel.call(SERVER_STREAM, one(request_of(SERVER_STREAM)), timeout_s=TIMEOUT_S):
            found.append(reply.round)  # type: ignore[attr-defined]
            may_go_on.put_nowait(None)
        await channel.close()
        return found

    assert transport.run(scenario()) == [1, 2, 3]


def test_a_bidi_stream_can_wait_for_each_reply_before_the_next_request(transport: Transport) -> None:
    async def scenario() -> list[int]:
        answered = asyncio.Queue[None]()

        async def requests() -> Requests:
            for number in range(5):
                yield request_of(BIDI, number, b"x")
                await answered.get()

        channel = transport.connect(transport.address)
        found = []
        async for reply in channel.call(BIDI, requests(), timeout_s=TIMEOUT_S):
            found.append(reply.chunks[0].bucket)  # type: ignore[attr-defined]
            answered.put_nowait(None)
        await channel.close()
        return found

    assert transport.run(scenario()) == [0, 1, 2, 3, 4]


def test_a_bidi_stream_without_replies_ends(transport: Transport) -> None:
    async def behaviour(method: Method, requests: Requests) -> AsyncIterator[Any]:
        async for _ in requests:
            pass
        return
        yield

    transport.service.behaviour = behaviour

    async def scenario() -> list[Any]:
        channel = transport.connect(transport.address)
        replies = await call(channel, BIDI, request_of(BIDI, 1), request_of(BIDI, 2))
        await channel.close()
        return replies

    assert transport.run(scenario()) == []
    assert len(transport.service.heard) == 2


def test_calls_on_one_channel_run_side_by_side(transport: Transport) -> None:
    """A call that waits does not hold up another one."""

    async def scenario() -> None:
        go_on = asyncio.Event()

        async def behaviour(method: Method, requests: Requests) -> AsyncIterator[Any]:
            if method is BIDI:
                await go_on.wait()
            else:
                go_on.set()
            yield method.reply_type()

        transport.service.behaviour = behaviour
        channel = transport.connect(transport.address)
        waiting = asyncio.ensure_future(call(channel, BIDI))
        await until(lambda: transport.service.running == 1, "the first call arrives")
        await call(channel, UNARY)
        assert len(await waiting) == 1
        await channel.close()

    transport.run(scenario())


@pytest.mark.parametrize("method", [CLIENT_STREAM, BIDI], ids=["client stream", "bidi"])
def test_messages_of_eight_mebibytes_pass_in_both_directions(method: Method, transport: Transport) -> None:
    data = bytes(range(256)) * (8 << 12)
    request = request_of(method, 1, data)

    async def scenario() -> list[Any]:
        channel = transport.connect(transport.address)
        replies = await call(channel, method, request)
        await channel.close()
        return replies

    (reply,) = transport.run(scenario())
    assert transport.service.heard[0].chunks[0].data == data
    if method is BIDI:
        assert chunks_of(reply)[0].data == data


def test_messages_arrive_as_copies(transport: Transport) -> None:
    """Who sends may use a message again; who receives may keep it."""

    async def scenario() -> None:
        channel = transport.connect(transport.address)
        request = request_of(UNARY, 1)
        await call(channel, UNARY, request)
        request.model = "changed"
        await channel.close()

    transport.run(scenario())
    assert transport.service.heard == [request_of(UNARY, 1)]


# Errors


@every_shape
@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
def test_an_error_arrives_with_its_class_and_message(
    error: type[PserverError], method: Method, transport: Transport
) -> None:
    message = "bucket 3: expected 12 bytes, got 7 (100 %); see \"docs\"\nand 'model.weight', größer als ∞"
    transport.service.behaviour = raising(error(message))

    async def scenario() -> PserverError:
        channel = transport.connect(transport.address)
        error = await failure(channel, method)
        await channel.close()
        return error

    found = transport.run(scenario())
    assert type(found) is error
    assert str(found) == message


@streams_of_replies
def test_an_error_in_the_middle_of_a_stream_comes_after_the_replies_before_it(
    method: Method, transport: Transport
) -> None:
    transport.service.behaviour = raising(InvalidRequest("the third is missing"), after_replies=2)

    async def scenario() -> tuple[list[Any], PserverError | None]:
        channel = transport.connect(transport.address)
        replies, error = await outcome(channel, method)
        await channel.close()
        return replies, error

    replies, error = transport.run(scenario())
    assert len(replies) == 2
    assert type(error) is InvalidRequest
    assert str(error) == "the third is missing"


@pytest.mark.parametrize("letter", ["x", "é", "\n"], ids=["ascii", "accented", "newlines"])
def test_a_very_long_message_is_cut_and_its_class_is_kept(letter: str, transport: Transport) -> None:
    transport.service.behaviour = raising(InvalidRequest("too long: " + letter * 100_000))

    async def scenario() -> PserverError:
        channel = transport.connect(transport.address)
        error = await failure(channel, UNARY)
        await channel.close()
        return error

    error = transport.run(scenario())
    assert type(error) is InvalidRequest
    assert str(error).startswith("too long: " + 100 * letter)
    assert len(str(error)) <= MAX_ENCODED_BYTES


@every_shape
@pytest.mark.parametrize(
    "error", [ValueError("three is not four"), KeyError("three"), TimeoutError("the handler's own")], ids=repr
)
def test_an_unexpected_exception_becomes_an_internal_error_and_the_server_lives_on(
    error: Exception, method: Method, transport: Transport
) -> None:
    transport.service.behaviour = raising(error)

    async def scenario() -> PserverError:
        channel = transport.connect(transport.address)
        error = await failure(channel, method)
        transport.service.behaviour = None
        assert len(await call(channel, method)) == 1
        await channel.close()
        return error

    found = transport.run(scenario())
    assert type(found) is InternalError
    assert type(error).__name__ in str(found)
    assert str(error) in str(found)
    assert method.name in str(found)


@every_shape
def test_an_unknown_address_is_named(method: Method, transport: Transport) -> None:
    async def scenario() -> PserverError:
        channel = transport.connect(transport.empty_address)
        error = await failure(channel, method)
        await channel.close()
        return error

    error = transport.run(scenario())
    assert type(error) is ServerUnavailable
    assert transport.empty_address in str(error)


@every_shape
def test_a_call_ends_at_its_deadline_and_says_where(method: Method, transport: Transport) -> None:
    transport.service.behaviour = never_answers

    async def scenario() -> tuple[float, PserverError]:
        channel = transport.connect(transport.address)
        began = time.monotonic()
        error = await failure(channel, method, timeout_s=0.1)
        lasted = time.monotonic() - began
        await until(lambda: transport.service.running == 0, "the handler ends, too")
        await channel.close()
        return lasted, error

    lasted, error = transport.run(scenario())
    assert type(error) is DeadlineExceeded
    assert isinstance(error, TimeoutError)
    assert transport.address in str(error)
    assert 0.1 <= lasted < 4.0


@streams_of_replies
def test_a_deadline_holds_for_the_whole_stream(method: Method, transport: Transport) -> None:
    transport.service.behaviour = answers_once_and_waits

    async def scenario() -> tuple[list[Any], PserverError | None]:
        channel = transport.connect(transport.address)
        replies, error = await outcome(channel, method, timeout_s=0.5)
        await until(lambda: transport.service.running == 0, "the handler ends, too")
        await channel.close()
        return replies, error

    replies, error = transport.run(scenario())
    assert replies == [method.reply_type(round=1)]
    assert type(error) is DeadlineExceeded


# Ends


@every_shape
def test_closing_a_channel_ends_its_calls(method: Method, transport: Transport) -> None:
    transport.service.behaviour = never_answers

    async def scenario() -> PserverError:
        channel = transport.connect(transport.address)
        calling = asyncio.ensure_future(failure(channel, method, timeout_s=60))
        await until(lambda: transport.service.running == 1, "the call arrives")
        await channel.close()
        async with asyncio.timeout(2):
            error = await calling
        await until(lambda: transport.service.running == 0, "the handler ends, too")
        return error

    error = transport.run(scenario())
    assert type(error) is ServerUnavailable
    assert transport.address in str(error)


@every_shape
def test_a_server_that_stops_ends_its_calls(method: Method, transport: Transport) -> None:
    transport.service.behaviour = never_answers

    async def scenario() -> PserverError:
        channel = transport.connect(transport.address)
        calling = asyncio.ensure_future(failure(channel, method, timeout_s=60))
        await until(lambda: transport.service.running == 1, "the call arrives")
        await transport.stop()
        async with asyncio.timeout(2):
            error = await calling
        await channel.close()
        return error

    error = transport.run(scenario())
    assert type(error) is ServerUnavailable
    assert transport.address in str(error)


@pytest.mark.parametrize("used_before", [True, False], ids=["used before", "never used"])
def test_a_closed_channel_refuses_calls_and_may_be_closed_again(used_before: bool, transport: Transport) -> None:
    async def scenario() -> PserverError:
        channel = transport.connect(transport.address)
        if used_before:
            await call(channel, UNARY)
        await channel.close()
        await channel.close()
        return await failure(channel, UNARY)

    error = transport.run(scenario())
    assert type(error) is ServerUnavailable
    assert transport.address in str(error)


def test_closing_one_channel_leaves_others_alone(transport: Transport) -> None:
    async def scenario() -> None:
        first, second = transport.connect(transport.address), transport.connect(transport.address)
        await call(first, UNARY)
        await call(second, UNARY)
        await first.close()
        assert len(await call(second, UNARY)) == 1
        await second.close()

    transport.run(scenario())


@streams_of_replies
def test_a_stream_that_the_client_abandons_does_not_leave_its_handler_running(
    method: Method, transport: Transport
) -> None:
    transport.service.behaviour = answers_once_and_waits

    async def scenario() -> None:
        channel = transport.connect(transport.address)
        async with aclosing(channel.call(method, one(request_of(method)), timeout_s=60)) as replies:
            async for _ in replies:
                break
        await until(lambda: transport.service.running == 0, "the handler ends")
        await channel.close()

    transport.run(scenario())


def test_a_stream_abandoned_while_requests_still_come_does_not_leave_its_handler_running(
    transport: Transport,
) -> None:
    async def scenario() -> None:
        async def endless() -> Requests:
            yield request_of(BIDI, 1, b"x")
            await asyncio.Event().wait()

        channel = transport.connect(transport.address)
        async with aclosing(channel.call(BIDI, endless(), timeout_s=60)) as replies:
            async for _ in replies:
                break
        await until(lambda: transport.service.running == 0, "the handler ends")
        await channel.close()

    transport.run(scenario())


@every_shape
def test_a_cancelled_call_does_not_leave_its_handler_running(method: Method, transport: Transport) -> None:
    transport.service.behaviour = never_answers

    async def scenario() -> None:
        channel = transport.connect(transport.address)
        calling = asyncio.ensure_future(call(channel, method))
        await until(lambda: transport.service.running == 1, "the call arrives")
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        await until(lambda: transport.service.running == 0, "the handler ends")
        await channel.close()

    transport.run(scenario())


@pytest.mark.parametrize("method", [CLIENT_STREAM, BIDI], ids=["client stream", "bidi"])
def test_requests_that_fail_to_be_made_end_the_call_on_both_sides(method: Method, transport: Transport) -> None:
    """Over gRPC the handler may see a short stream in place of a broken one: services check that everything came."""

    async def scenario() -> None:
        async def broken() -> Requests:
            yield request_of(method, 1, b"x")
            await until(lambda: len(transport.service.heard) == 1, "the first request arrives")
            raise InvalidRequest("the second cannot be made")

        channel = transport.connect(transport.address)
        with pytest.raises(InvalidRequest, match="the second cannot be made"):
            _ = [reply async for reply in channel.call(method, broken(), timeout_s=TIMEOUT_S)]
        await until(lambda: transport.service.running == 0, "the handler ends")
        assert len(transport.service.heard) == 1
        await channel.close()

    transport.run(scenario())


# Faults


async def disturbed(transport: Transport, plan: FaultPlan, method: Method) -> tuple[int, PserverError | None]:
    """Number of replies to two requests (one if the RPC takes no more), and the error."""
    channel = with_faults(transport.connect, plan)(transport.address)
    requests = [request_of(method, number, b"x") for number in range(1 + method.client_streaming)]
    replies, error = await outcome(channel, method, *requests)
    await until(lambda: transport.service.running == 0, "the handler ends")
    await channel.close()
    return len(replies), error


@every_shape
def test_a_lost_request_is_never_seen_by_the_server(method: Method, transport: Transport) -> None:
    plan = FaultPlan([Fault(kind=FaultKind.LOSE_REQUEST, method=method.name)])
    num_replies, error = transport.run(disturbed(transport, plan, method))
    assert (num_replies, type(error), plan.struck) == (0, ServerUnavailable, 1)
    assert transport.service.heard == []


@every_shape
def test_a_lost_reply_is_one_to_a_call_that_was_carried_out(method: Method, transport: Transport) -> None:
    plan = FaultPlan([Fault(kind=FaultKind.LOSE_REPLY, method=method.name)])
    num_replies, error = transport.run(disturbed(transport, plan, method))
    assert (num_replies, type(error), plan.struck) == (0, ServerUnavailable, 1)
    assert len(transport.service.heard) == 1 + method.client_streaming
    assert transport.service.finished == 1


@every_shape
def test_a_broken_stream_brings_one_request_and_no_reply(method: Method, transport: Transport) -> None:
    plan = FaultPlan([Fault(kind=FaultKind.BREAK_STREAM, method=method.name)])
    num_replies, error = transport.run(disturbed(transport, plan, method))
    assert (num_replies, type(error), plan.struck) == (0, ServerUnavailable, 1)
    assert len(transport.service.heard) <= 1


@pytest.mark.parametrize("kind", FaultKind, ids=lambda kind: kind.value)
def test_faults_strike_as_often_as_told_then_calls_pass(kind: FaultKind, transport: Transport) -> None:
    plan = FaultPlan([Fault(kind=kind, method=BIDI.name, times=2)])
    found = [transport.run(disturbed(transport, plan, BIDI)) for _ in range(3)]
    assert [type(error) for _, error in found] == [ServerUnavailable, ServerUnavailable, type(None)]
    assert found[2][0] == 2
    assert plan.struck == 2


def test_faults_strike_only_the_method_and_address_they_name(transport: Transport) -> None:
    plan = FaultPlan(
        [
            Fault(kind=FaultKind.LOSE_REQUEST, method=UNARY.name, address="elsewhere:1"),
            Fault(kind=FaultKind.LOSE_REQUEST, method="Join"),
        ]
    )
    for method in SHAPES.values():
        _, error = transport.run(disturbed(transport, plan, method))
        assert error is None
    assert plan.struck == 0


# What only a network can do


@pytest.fixture
def grpc_only(loop: LoopThread) -> Iterator[Transport]:
    """In process, messages have no bytes to spoil and every server knows every RPC."""
    with grpc_transport(loop) as running:
        yield running


@every_shape
def test_bytes_that_cannot_be_decoded_are_refused_by_name(method: Method, grpc_only: Transport) -> None:
    sides = ("stream" if each else "unary" for each in (method.client_streaming, method.server_streaming))
    kind = "_".join(sides)

    async def send(spoiled: bytes) -> None:
        async with grpc.aio.insecure_channel(grpc_only.address) as channel:
            stub = getattr(channel, kind)(method.path)
            argument = several(spoiled) if method.client_streaming else spoiled
            if method.server_streaming:
                _ = [reply async for reply in stub(argument, timeout=TIMEOUT_S)]
            else:
                await stub(argument, timeout=TIMEOUT_S)

    async def scenario() -> grpc.aio.AioRpcError:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await send(b"\xff\xff\xff")
        good = grpc_only.connect(grpc_only.address)
        assert len(await call(good, method)) == 1
        await good.close()
        return raised.value

    error = grpc_only.run(scenario())
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert dict(error.trailing_metadata())[ERROR_KEY] == "InvalidRequest"
    assert method.path in error.details()


def test_an_rpc_that_the_server_does_not_know_is_a_protocol_mismatch(grpc_only: Transport) -> None:
    async def scenario() -> PserverError:
        channel = grpc_only.connect(grpc_only.address)
        error = await failure(channel, COORDINATOR["Status"], coordinator_pb2.StatusRequest())
        await channel.close()
        return error

    error = grpc_only.run(scenario())
    assert type(error) is ProtocolMismatch
    assert grpc_only.address in str(error)


@pytest.mark.parametrize("seed", range(20))
def test_spoiled_carried_calls_leave_a_live_server_and_nothing_running(seed: int, grpc_only: Transport) -> None:
    random = Random(seed)

    def request(call_id: int) -> calls_pb2.CarriedRequest:
        payload = request_of(UNARY, call_id).SerializeToString()
        return calls_pb2.CarriedRequest(id=call_id, path=UNARY.path, request=payload)

    async def attack(channel: grpc.aio.Channel) -> None:
        payloads = spoiled([request(number) for number in range(4)], random)
        stream = channel.stream_stream(CARRY.path)(several(*payloads), timeout=TIMEOUT_S)
        with suppress(grpc.aio.AioRpcError):
            _ = [calls_pb2.CarriedReply.FromString(reply) async for reply in stream]

    async def scenario() -> None:
        async with grpc.aio.insecure_channel(grpc_only.address) as channel:
            for _ in range(20):
                await attack(channel)
        good = grpc_only.connect(grpc_only.address)
        assert len(await call(good, UNARY)) == 1
        await good.close()
        await until(lambda: grpc_only.service.running == 0, "every call has ended")

    grpc_only.run(scenario())
