"""A server that is reachable over gRPC and in process, a victim that trains on it, and an attacker that misbehaves."""

import asyncio
import gc
import itertools
import secrets
import weakref
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc
import torch
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pserver.config import ServerSettings
from pserver.core.coding import Coding
from pserver.core.messages import CreateShard, DropShard, ModelSpec
from pserver.core.optimizers import constructor_arguments, numeric_options
from pserver.core.staging import Staging
from pserver.core.state_staging import StateStaging
from pserver.errors import ERRORS, DeadlineExceeded, InternalError, PserverError, ServerUnavailable
from pserver.server.node import ServerNode
from pserver.transport.convert import options_to_bytes, spec_to_proto
from pserver.transport.gen import coordinator_pb2, shards_pb2, types_pb2
from pserver.transport.grpc_channel import GrpcChannel
from pserver.transport.grpc_server import GrpcServer
from pserver.transport.inprocess import InProcessNetwork
from pserver.transport.loop import LoopThread
from pserver.transport.methods import COORDINATOR, REPLICAS, SHARDS, Method
from pserver.transport.status import ERROR_KEY, from_rpc_error
from pserver.types import PROTOCOL_VERSION
from pserver.wire.layout import STORED, Bucket, Layout, TensorSpec
from pserver.wire.shared_buckets import BucketOffsets, SharedBuckets
from pserver.wire.shm import map_segment
from pserver.wire.tensors import element_type, from_bytes, to_bytes
from tests.waiting import POLL_S, until

TRANSPORTS = ("grpc", "in process")
#: Of one hostile call: whatever it asks for, its answer must be there by then.
CALL_TIMEOUT_S = 5.0
#: How long a hostile call asks the server to wait, unless that is what was spoiled.
WAIT_S = 0.05

MESSAGE_LIMIT = 6000
#: No shard is of a later one.
HUGE_EPOCH = (1 << 63) - 1

METHODS = {**COORDINATOR, **SHARDS, **REPLICAS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one call. `named`: the server itself said why it failed."""

    replies: list[Any]
    error: PserverError | None
    named: bool


class _Raw:
    """Bytes that pass as a message of the in-process transport."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def SerializeToString(self) -> bytes:
        return self._data


class World:
    """Use it in a `with` block. `transport` is how `send` reaches the server; the server serves both."""

    def __init__(self, transport: str, *, server_lease_s: float = 5.0) -> None:
        self.transport = transport
        self.loop = LoopThread("hostile-tests")
        self._epochs = itertools.count(7)
        self._settings = ServerSettings(name="s0", trainer_lease_s=3600.0, server_lease_s=server_lease_s)

    def __enter__(self) -> "World":
        self.loop.start()
        self.loop.run(self._start())
        self.victim = Trainer(self, "victim")
        self.victim_model = self.victim.model(victim_spec(), dict(VICTIM_VALUES))
        self._mirror = Mirror()
        self.check_victim()
        return self

    def __exit__(self, *error: object) -> None:
        self.loop.run(self._stop())
        self.loop.close()

    async def _start(self) -> None:
        self.node = ServerNode(self._settings)
        self._server = GrpcServer(self.node.handlers, host="127.0.0.1", port=0)
        self.address = await self._server.start()
        await self.node.start(self.address, GrpcChannel)
        self._network = InProcessNetwork()
        self._network.serve(self.address, self.node.handlers)
        self.channel = grpc.aio.insecure_channel(
            self.address, options=(("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1))
        )

    async def _stop(self) -> None:
        await self.channel.close()
        await self.node.stop()
        await self._server.stop()

    # Calls

    def send(self, method: Method, payloads: Sequence[bytes], timeout_s: float = CALL_TIMEOUT_S) -> Outcome:
        """One call with exactly these bytes as its messages."""
        return self.loop.run(self.attempt(method, _several(payloads), timeout_s))

    async def attempt(
        self, method: Method, payloads: AsyncIterator[bytes], timeout_s: float = CALL_TIMEOUT_S
    ) -> Outcome:
        """As `send`, on the server's loop, with messages that may take their time."""
        call = self._over_grpc if self.transport == "grpc" else self._in_process
        return await call(method, payloads, timeout_s)

    async def _over_grpc(self, method: Method, payloads: AsyncIterator[bytes], timeout_s: float) -> Outcome:
        replies: list[Any] = []
        argument: Any = payloads if method.client_streaming else await anext(payloads)
        try:
            call = self.stub(method)(argument, timeout=timeout_s, wait_for_ready=True)
            if method.server_streaming:
                async for data in call:
                    replies.append(method.reply_type.FromString(data))
            else:
                replies.append(method.reply_type.FromString(await call))
        except grpc.aio.AioRpcError as error:
            named = ERROR_KEY in dict(error.trailing_metadata() or ())
            return Outcome(replies=replies, error=from_rpc_error(error, self.address), named=named)
        return Outcome(replies=replies, error=None, named=False)

    def stub(self, method: Method) -> Any:
        """The RPC on raw bytes."""
        sides = ("stream" if each else "unary" for each in (method.client_streaming, method.server_streaming))
        return getattr(self.channel, "_".join(sides))(method.path)

    async def _in_process(self, method: Method, payloads: AsyncIterator[bytes], timeout_s: float) -> Outcome:
        replies: list[Any] = []
        channel = self._network.connect(self.address)
        messages: Any = (_Raw(each) async for each in payloads)
        try:
            async with aclosing(channel.call(method, messages, timeout_s=timeout_s)) as call:
                async for reply in call:
                    replies.append(reply)
        except PserverError as error:
            return Outcome(replies=replies, error=error, named="did not answer within" not in str(error))
        return Outcome(replies=replies, error=None, named=False)

    def hold(self, name: str, *messages: Message) -> "HeldCall":
        """A call that sends these messages and then neither another one nor the end; see `HeldCall`."""
        return HeldCall(self, METHODS[name], [each.SerializeToString() for each in messages])

    def call(self, name: str, *messages: Message, timeout_s: float = CALL_TIMEOUT_S) -> list[Any]:
        """A call that is meant well; raises the server's error."""
        outcome = self.send(METHODS[name], [each.SerializeToString() for each in messages], timeout_s)
        if outcome.error is not None:
            raise outcome.error
        return outcome.replies

    # What must hold, whatever was sent

    def check_alive(self) -> None:
        """The server says that it serves, and what the cluster looks like."""

        async def check() -> Any:
            stub = health_pb2_grpc.HealthStub(self.channel)
            return await stub.Check(health_pb2.HealthCheckRequest(), timeout=CALL_TIMEOUT_S)

        assert self.loop.run(check()).status == health_pb2.HealthCheckResponse.SERVING
        assert ("s0", True) in {(each.name, each.alive) for each in self.status().servers}

    def check_at_rest(self) -> None:
        """Everybody but the victim goes; nothing is left of them, and the victim trains on."""
        self.clean_up()
        self.check_alive()
        self.check_victim()

    def check_victim(self) -> None:
        """The victim's next step works, and gives the bits that torch gives."""
        expected = self._mirror.step_()
        found = self.victim_model.step(self._mirror.gradients)
        for name, values in expected.items():
            assert torch.equal(found[name], values), (name, found[name], values)
        assert all(torch.equal(values, expected[name]) for name, values in self.victim_model.values().items())

    def clean_up(self) -> None:
        """Ends every trainer but the victim and drops every model but its own; nothing may be left of them."""
        for trainer in self.status().trainers:
            if trainer.trainer_id != self.victim.trainer_id:
                push_id = types_pb2.PushId(trainer_id=trainer.trainer_id, sequence=1, lowest_unacknowledged=1)
                self.call("Leave", coordinator_pb2.LeaveRequest(push_id=push_id))
        for model in self.status().models:
            if model.name != self.victim_model.spec.name:
                push_id = self.victim.push_id()
                self.call("DropModel", coordinator_pb2.DropModelRequest(push_id=push_id, model=model.name))
        self.loop.run(self._drop_copies())
        until(lambda: self.footprint() == Footprint(), lambda: f"still there: {self.footprint()}")

    def copy(self, spec: ModelSpec) -> int:
        """Has the server keep a new copy of a model's only shard, of which the coordinator knows nothing; its epoch."""
        epoch = next(self._epochs)
        runs = (range(len(spec.layout().buckets)),)
        host = self.node.shards

        async def copy() -> None:
            await host.handle(DropShard(model=spec.name, shard=0, epoch=HUGE_EPOCH))
            send = host._send
            host.send_reports_to(lambda report: None)  # or the coordinator would have it dropped
            await host.handle(CreateShard(spec=spec, shard=0, epoch=epoch, runs=runs, replica=True))
            host.send_reports_to(send)

        self.loop.run(copy())
        return epoch

    async def _drop_copies(self) -> None:
        for (name, shard), hosted in list(self.node.shards._shards.items()):
            if hosted.is_replica:
                await self.node.shards.handle(DropShard(model=name, shard=shard, epoch=HUGE_EPOCH))

    def footprint(self) -> "Footprint":
        """What the server holds beside what belongs to the victim."""
        return self.loop.run(self._footprint())

    async def _footprint(self) -> "Footprint":
        shards = self.node.shards
        assert self.node.coordinator is not None
        core = self.node.coordinator.core
        hosted = shards._shards[self.victim_model.spec.name, 0]
        shard = hosted._shard
        assert hosted.memory is not None
        return Footprint(
            models=sorted({*core._models, *(name for name, _ in shards._shards)} - {self.victim_model.spec.name}),
            num_contexts=shard.num_contexts,
            num_outcomes=len([key for key in shard._outcomes._outcomes if key != self.victim.trainer_id]),
            num_initial=len(shard._initial),
            num_living=len(shards._living - {self.victim.trainer_id}),
            num_streams=sum(shards._streams.values()),
            num_mailboxes=len(hosted.memory._mailboxes.keys() - {self.victim.trainer_id}),
            num_members=len(core._membership.members) - 1,
        )

    def memory_segment(self) -> str:
        """The segment that holds what proves to be on the server's machine."""
        (found,) = self.call("FindMemory", shards_pb2.FindMemoryRequest())
        return str(found.segment)

    def nonce(self) -> bytes:
        """What proves to be on the server's machine."""
        return bytes(map_segment(self.memory_segment(), writable=False))

    def status(self) -> coordinator_pb2.StatusReply:
        """What the coordinator says."""
        (reply,) = self.call("Status", coordinator_pb2.StatusRequest())
        return reply


class HeldCall:
    """A call under way, whose client has gone silent."""

    def __init__(self, world: World, method: Method, payloads: Sequence[bytes]) -> None:
        self._world = world
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        for each in payloads:
            self._queue.put_nowait(each)
        calling = world.attempt(method, self._messages(), 30.0)
        self._future = asyncio.run_coroutine_threadsafe(calling, world.loop._loop)

    async def _messages(self) -> AsyncIterator[bytes]:
        while (payload := await self._queue.get()) is not None:
            yield payload

    def go_on(self, *messages: Message) -> None:
        """Sends more."""
        for each in messages:
            self._world.loop._loop.call_soon_threadsafe(self._queue.put_nowait, each.SerializeToString())

    def outcome(self) -> Outcome:
        """Waits for the server to end the call."""
        return self._future.result(POLL_S)

    def end(self) -> None:
        """Says that no more comes."""
        self._world.loop._loop.call_soon_threadsafe(self._queue.put_nowait, None)

    def finish(self) -> Outcome:
        """Says that no more comes, and waits for the server to end the call."""
        self.end()
        return self.outcome()

    def break_off(self) -> None:
        """Cancels the call."""
        self._future.cancel()


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """What a server holds for others than the victim; empty unless told otherwise."""

    models: Sequence[str] = ()
    num_contexts: int = 0
    num_outcomes: int = 0
    num_initial: int = 0
    num_living: int = 0
    num_streams: int = 0
    num_mailboxes: int = 0
    num_members: int = 0

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Footprint)
        return {**vars(self), "models": list(self.models)} == {**vars(other), "models": list(other.models)}

    __hash__ = None  # type: ignore[assignment]


_staged: weakref.WeakSet[Any] = weakref.WeakSet()


class CountedStaging(Staging):
    """Known to `num_staged` for as long as it lives."""

    def __init__(self, buckets: Iterable[Bucket], coding: Coding | None = None) -> None:
        super().__init__(buckets, coding)
        _staged.add(self)


class CountedStateStaging(StateStaging):
    """Known to `num_staged` for as long as it lives."""

    def __init__(self, buckets: Iterable[Bucket] | None = None) -> None:
        super().__init__(buckets)
        _staged.add(self)


def num_staged() -> int:
    """Streams whose bytes are held somewhere in this process."""
    if _staged:
        gc.collect()
    return len(_staged)


def check_clean(outcome: Outcome, *, may_wait: bool = False, may_break: bool = False, may_fail: bool = False) -> None:
    """An error, if there is one, is ours, says something, and is not too long to travel.

    Args:
        may_wait: the call asked for a longer wait than its own deadline.
        may_break: the server does not let this client finish, and a write that meets the end of a call hides why it
            ended: https://github.com/grpc/grpc/issues/36066
        may_fail: the server says that it cannot do what it was told.
    """
    error = outcome.error
    if error is None or (may_break and isinstance(error, ServerUnavailable)):
        return
    assert type(error) in ERRORS.values(), repr(error)
    assert may_fail or not isinstance(error, InternalError), repr(error)
    assert not isinstance(error, ServerUnavailable), repr(error)
    assert 10 <= len(str(error)) <= MESSAGE_LIMIT, repr(error)
    assert outcome.named or (may_wait and isinstance(error, DeadlineExceeded)), repr(error)


async def _several(items: Any) -> AsyncIterator[Any]:
    for each in items:
        yield each


# Those who behave

FLOAT, DOUBLE = torch.float32, torch.float64


def tensor(name: str, *shape: int, dtype: torch.dtype = FLOAT, group: int = 0) -> TensorSpec:
    """One tensor of a model."""
    return TensorSpec(name=name, shape=shape, dtype=dtype, group=group)


def model_spec(name: str, **replaced: Any) -> ModelSpec:
    """A model of one tensor in two buckets, stepped by plain SGD with learning rate 1."""
    arguments = constructor_arguments("SGD", torch.optim.SGD([torch.zeros(1)], lr=1.0).param_groups[0])
    fields: dict[str, Any] = {
        "name": name,
        "tensors": (tensor("w", 32),),
        "bucket_bytes": 64,
        "optimizer": "SGD",
        "optimizer_groups": (arguments,),
        "sync_policy": "bsp",
        "sync_policy_arguments": {},
        "world_size": 1,
        "buffers": "lowest",
    }
    return ModelSpec(**{**fields, **replaced})


def adam(lr: float = 0.125) -> dict[str, object]:
    """Adam's arguments, complete."""
    return constructor_arguments("Adam", torch.optim.Adam([torch.zeros(1)], lr=lr).param_groups[0])


def victim_spec() -> ModelSpec:
    """Adam on two tensors that are cut into five buckets."""
    tensors = (tensor("w", 5, 8), tensor("d", 9, dtype=DOUBLE))
    return model_spec("victim", tensors=tensors, optimizer="Adam", optimizer_groups=(adam(),))


VICTIM_VALUES = {
    "w": torch.linspace(-1, 1, 40).reshape(5, 8),
    "d": torch.linspace(0, 3, 9, dtype=DOUBLE),
}


class Mirror:
    """The victim's model, trained by torch in this process."""

    def __init__(self) -> None:
        self._parameters = {name: torch.nn.Parameter(values.clone()) for name, values in VICTIM_VALUES.items()}
        self._optimizer = torch.optim.Adam(list(self._parameters.values()), lr=0.125, fused=True)
        self._generator = torch.Generator().manual_seed(7)
        self.gradients: dict[str, torch.Tensor] = {}

    def step_(self) -> dict[str, torch.Tensor]:
        """One step on new gradients; returns the parameters."""
        for name, parameter in self._parameters.items():
            parameter.grad = torch.randn(parameter.shape, dtype=parameter.dtype, generator=self._generator)
            self.gradients[name] = parameter.grad.clone()
        self._optimizer.step()
        return {name: parameter.detach() for name, parameter in self._parameters.items()}


class Trainer:
    """Joined; speaks the protocol message by message, and as `world` is asked."""

    def __init__(self, world: World, name: str = "", *, rank: int = -1) -> None:
        self.world = world
        request = coordinator_pb2.JoinRequest(
            nonce=f"{name}{secrets.token_hex(8)}", rank=rank, protocol=PROTOCOL_VERSION
        )
        (reply,) = world.call("Join", request)
        self.trainer_id = reply.trainer_id
        self._sequence = itertools.count(1)

    def push_id(self, **replaced: int) -> types_pb2.PushId:
        """A new push id; everything before it is acknowledged."""
        number = next(self._sequence)
        return types_pb2.PushId(
            **{"trainer_id": self.trainer_id, "sequence": number, "lowest_unacknowledged": number, **replaced}
        )

    def register_request(self, spec: ModelSpec, **replaced: Any) -> coordinator_pb2.RegisterModelRequest:
        """A registration."""
        fields = {"push_id": self.push_id(), "spec": spec_to_proto(spec), "wait_s": 5.0, **replaced}
        return coordinator_pb2.RegisterModelRequest(**fields)

    def register(self, spec: ModelSpec) -> "WireModel":
        """Registers a model and does not initialise it."""
        (reply,) = self.world.call("RegisterModel", self.register_request(spec), timeout_s=30.0)
        return WireModel(self, spec, reply.epoch)

    def model(self, spec: ModelSpec, values: dict[str, torch.Tensor] | None = None) -> "WireModel":
        """Registers a model, initialises it (with zeros, unless told otherwise) and attaches."""
        model = self.register(spec)
        self.world.call("Initialise", *model.initialise_requests(values or {}))
        self.world.call("RegisterModel", self.register_request(spec, initialised=model.epoch))
        self.world.call(
            "Attach", coordinator_pb2.AttachRequest(push_id=self.push_id(), model=spec.name, epoch=model.epoch)
        )
        return model


class WireModel:
    """A registered model whose only shard is on the world's server."""

    def __init__(self, trainer: Trainer, spec: ModelSpec, epoch: int) -> None:
        self.trainer = trainer
        self.world = trainer.world
        self.spec = spec
        self.epoch = epoch
        self.layout: Layout = spec.layout()
        self._step = itertools.count(1)
        self._context = itertools.count(1)
        self._mailbox: SharedBuckets | None = None

    def address(self, **replaced: Any) -> shards_pb2.ShardAddress:
        """Whom messages are for."""
        fields = {"model": self.spec.name, "epoch": self.epoch, "fingerprint": self.layout.fingerprint}
        return shards_pb2.ShardAddress(**{**fields, **replaced})

    def chunks(self, tensors: dict[str, torch.Tensor], **replaced: Any) -> list[types_pb2.Chunk]:
        """Every bucket as one chunk; tensors not given are zeros."""
        flats = [torch.zeros(flat.num_elements, dtype=flat.dtype) for flat in self.layout.flats]
        for spec, place in zip(self.layout.tensors, self.layout.places, strict=True):
            if spec.name in tensors:
                flats[place.flat][place.offset : place.offset + spec.num_elements] = tensors[spec.name].reshape(-1)
        return [self._chunk(bucket, flats[bucket.flat][bucket.start : bucket.stop]) for bucket in self.layout.buckets]

    def _chunk(self, bucket: Bucket, values: torch.Tensor) -> types_pb2.Chunk:
        code: Any = element_type(bucket.dtype).code
        return types_pb2.Chunk(bucket=bucket.index, offset_bytes=0, dtype=code, data=to_bytes(values))

    def initialise_requests(self, values: dict[str, torch.Tensor]) -> list[shards_pb2.InitialiseRequest]:
        """The messages of an Initialise call."""
        first = shards_pb2.InitialiseRequest(shard=self.address(), push_id=self.trainer.push_id())
        return [first, shards_pb2.InitialiseRequest(chunks=self.chunks(values))]

    def commit(self, **replaced: Any) -> types_pb2.Commit:
        """A commit of one sample, for the next step unless told otherwise."""
        options = [numeric_options(self.spec.optimizer, group) for group in self.spec.optimizer_groups]
        fields = {"samples": 1, "options": options_to_bytes(options), "nonfinite": "pass", **replaced}
        if "step" not in fields:
            fields["step"] = next(self._step)
        return types_pb2.Commit(**fields)

    def step_requests(
        self, gradients: dict[str, torch.Tensor], *, wait_s: float = 5.0, **replaced: Any
    ) -> list[shards_pb2.StepRequest]:
        """The messages of a Step call with a commit: gradients, then the commit."""
        return [self.push_request(gradients, **replaced), shards_pb2.StepRequest(commit=self.commit(), wait_s=wait_s)]

    def push_request(self, gradients: dict[str, torch.Tensor], **replaced: Any) -> shards_pb2.StepRequest:
        """The message of a Step call without a commit."""
        fields = {
            "shard": self.address(),
            "push_id": self.trainer.push_id(),
            "context_id": next(self._context),
            "chunks": self.chunks(gradients),
            **replaced,
        }
        return shards_pb2.StepRequest(**fields)

    def open_memory_request(self, **replaced: Any) -> shards_pb2.OpenMemoryRequest:
        """An OpenMemory with the server's nonce."""
        fields = {
            "shard": self.address(),
            "trainer_id": self.trainer.trainer_id,
            "nonce": self.world.nonce(),
            **replaced,
        }
        return shards_pb2.OpenMemoryRequest(**fields)

    def mailbox(self) -> SharedBuckets:
        """This trainer's mailbox, opened when it is first needed."""
        if self._mailbox is None:
            (opened,) = self.world.call("OpenMemory", self.open_memory_request())
            exchanged = [bucket for bucket in self.layout.buckets if bucket.group != STORED]
            self._mailbox = SharedBuckets(map_segment(opened.mailbox, writable=True), BucketOffsets(exchanged))
        return self._mailbox

    def step(self, gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A whole step; returns the new parameters. Computed on the last round."""
        first, last = self.step_requests(gradients)
        last.commit.base_round = last.commit.step - 1
        replies = self.world.call("Step", first, last)
        outcome = replies[0].outcome
        assert (outcome.accepted, outcome.stepped) == (True, True), outcome
        return self._joined(replies)

    def values(self) -> dict[str, torch.Tensor]:
        """What the shard holds."""
        request = shards_pb2.PullRequest(
            shard=self.address(), trainer_id=self.trainer.trainer_id, include_all=True, wait_s=5.0
        )
        return self._joined(self.world.call("Pull", request))

    def _joined(self, replies: Sequence[Any]) -> dict[str, torch.Tensor]:
        data: dict[int, bytes] = {}
        for chunk in (each for reply in replies for each in reply.chunks):
            data[chunk.bucket] = data.get(chunk.bucket, b"") + chunk.data
        flats = [torch.zeros(flat.num_elements, dtype=flat.dtype) for flat in self.layout.flats]
        for bucket in self.layout.buckets:
            values = from_bytes(data[bucket.index], bucket.dtype, (bucket.num_elements,))
            flats[bucket.flat][bucket.start : bucket.stop] = values
        return {
            spec.name: flats[place.flat][place.offset : place.offset + spec.num_elements].view(spec.shape)
            for spec, place in zip(self.layout.tensors, self.layout.places, strict=True)
        }
