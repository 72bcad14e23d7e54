"""A trainer that speaks the protocol message by message, so that tests can say what no correct client says."""

import itertools
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from typing import Any

import torch

from pserver.core.messages import ModelSpec
from pserver.core.optimizers import constructor_arguments, numeric_options
from pserver.core.sync import Bsp, policy_arguments
from pserver.transport.convert import options_to_bytes, placement_from_proto, spec_to_proto
from pserver.transport.gen import coordinator_pb2, shards_pb2, types_pb2
from pserver.transport.methods import COORDINATOR, SHARDS
from pserver.types import PROTOCOL_VERSION
from pserver.wire.layout import TensorSpec, build_layout
from pserver.wire.shared_buckets import BucketOffsets, SharedBuckets
from pserver.wire.shm import map_segment
from tests.routes import MEMORY, Route
from tests.service.grpc_cluster import GrpcCluster

NUM_ELEMENTS = 64
#: Plain SGD with learning rate 1, as a trainer describes it.
ARGUMENTS = constructor_arguments("SGD", torch.optim.SGD([torch.zeros(1)], lr=1.0).param_groups[0])


def spec(name: str, **replaced: Any) -> ModelSpec:
    """A model of one tensor of two buckets, stepped by plain SGD with learning rate 1."""
    fields: dict[str, Any] = {
        "name": name,
        "tensors": (TensorSpec(name="weight", shape=(NUM_ELEMENTS,), dtype=torch.float32, group=0),),
        "bucket_bytes": NUM_ELEMENTS * 4 // 2,
        "optimizer": "SGD",
        "optimizer_groups": (ARGUMENTS,),
        "sync_policy": "bsp",
        "sync_policy_arguments": policy_arguments(Bsp()),
        "world_size": 1,
        "buffers": "lowest",
    }
    return ModelSpec(**{**fields, **replaced})


class WireTrainer:
    """Joined, but renews no lease and retries nothing."""

    def __init__(self, cluster: GrpcCluster, rank: int = -1) -> None:
        self.cluster = cluster
        self.nonce = secrets.token_hex(16)
        self._sequence = itertools.count(1)
        self.trainer_id = self.join(rank=rank).trainer_id

    def join(self, **replaced: Any) -> Any:
        """Joins with this trainer's nonce."""
        fields = {"nonce": self.nonce, "rank": -1, "protocol": PROTOCOL_VERSION, **replaced}
        return self.coordinator("Join", coordinator_pb2.JoinRequest(**fields))

    def coordinator(self, method: str, request: Any, **more: Any) -> Any:
        """The one reply of the coordinator."""
        (reply,) = self.cluster.call(COORDINATOR[method], request, **more)
        return reply

    def push_id(self, **replaced: int) -> types_pb2.PushId:
        """A new push id; nothing before it is acknowledged."""
        fields = {"trainer_id": self.trainer_id, "sequence": next(self._sequence), "lowest_unacknowledged": 1}
        return types_pb2.PushId(**{**fields, **replaced})

    def register(
        self, model: ModelSpec, *, wait_s: float = 5.0, initialised: int = 0
    ) -> coordinator_pb2.RegisterModelReply:
        """One registration."""
        request = coordinator_pb2.RegisterModelRequest(
            push_id=self.push_id(), spec=spec_to_proto(model), wait_s=wait_s, initialised=initialised
        )
        return self.coordinator("RegisterModel", request)

    def attach(self, name: str, epoch: int = 1) -> Any:
        """Attaches to a model."""
        request = coordinator_pb2.AttachRequest(push_id=self.push_id(), model=name, epoch=epoch)
        return self.coordinator("Attach", request)

    def renew(self) -> Any:
        """Renews the lease once."""
        return self.coordinator("Renew", coordinator_pb2.RenewRequest(trainer_id=self.trainer_id))

    def leave(self) -> Any:
        """Leaves."""
        return self.coordinator("Leave", coordinator_pb2.LeaveRequest(push_id=self.push_id()))

    def model(self, name: str, *, world_size: int = 1, value: float = 0.0) -> "WireModel":
        """Registers, initialises with one value if asked to, and attaches."""
        reply = self.register(spec(name, world_size=world_size))
        model = WireModel(self, name, reply)
        if reply.initialise:
            for server in range(len(model.placement)):
                model.call("Initialise", *model.initialise_requests(server, value), server=server)
            self.register(spec(name, world_size=world_size), initialised=reply.epoch)
        model.round = self.attach(name, reply.epoch).round
        return model


class WireModel:
    """A registered model of `spec`; each of two servers owns one bucket, as the shard of its own number.

    `round` is the last one it knows of.
    """

    def __init__(self, trainer: WireTrainer, name: str, reply: coordinator_pb2.RegisterModelReply) -> None:
        self.trainer = trainer
        self.name = name
        self.epoch = reply.epoch
        self.round = 0
        self.placement = placement_from_proto(reply.placement)
        self.layout = build_layout(spec(name).tensors, spec(name).bucket_bytes)
        self._mailboxes: dict[int, SharedBuckets] = {}

    def of(self, trainer: WireTrainer) -> "WireModel":
        """The same model as another trainer addresses it, attached or not."""
        theirs = copy(self)
        theirs.trainer, theirs._mailboxes = trainer, {}
        return theirs

    def address(self, **replaced: Any) -> shards_pb2.ShardAddress:
        """Whom messages are for; `call` says which shard, since that is the server's number."""
        fields = {"model": self.name, "epoch": self.epoch, "fingerprint": self.layout.fingerprint}
        return shards_pb2.ShardAddress(**{**fields, **replaced})

    def chunk(self, server: int, value: float, **replaced: Any) -> types_pb2.Chunk:
        """The bucket of a server, filled with one value."""
        (run,) = self.placement[server].runs
        bucket = self.layout.buckets[run.start]
        data = torch.full((bucket.num_elements,), value).numpy().tobytes()
        return types_pb2.Chunk(**{"bucket": bucket.index, "offset_bytes": 0, "dtype": 1, "data": data, **replaced})

    def initialise_requests(self, server: int, value: float = 0.0, **replaced: Any) -> list[Any]:
        """The messages of an Initialise call, in two pieces."""
        first = {"shard": self.address(), "push_id": self.trainer.push_id(), **replaced}
        return [
            shards_pb2.InitialiseRequest(**first),
            shards_pb2.InitialiseRequest(chunks=[self.chunk(server, value)]),
        ]

    def commit(self, step: int, **replaced: Any) -> types_pb2.Commit:
        """A commit of one sample, computed on the last round."""
        fields = {
            "step": step,
            "samples": 1,
            "options": options_to_bytes([numeric_options("SGD", ARGUMENTS)]),
            "base_round": self.round,
            "nonfinite": "pass",
            **replaced,
        }
        return types_pb2.Commit(**fields)

    def step_request(self, server: int, value: float, **replaced: Any) -> shards_pb2.StepRequest:
        """The one message of a Step or StepOnce call; without a commit unless one is given, which waits 5 s."""
        fields = {
            "shard": self.address(),
            "push_id": self.trainer.push_id(),
            "context_id": 1,
            "chunks": [self.chunk(server, value)],
            "wait_s": 5.0,
            **replaced,
        }
        return shards_pb2.StepRequest(**fields)

    def pull_request(self, **replaced: Any) -> shards_pb2.PullRequest:
        """A Pull of what there is."""
        return shards_pb2.PullRequest(
            **{"shard": self.address(), "trainer_id": self.trainer.trainer_id, "wait_s": 2.0, **replaced}
        )

    def pull_state_request(self, **replaced: Any) -> shards_pb2.PullStateRequest:
        """A PullState of what there is."""
        return shards_pb2.PullStateRequest(
            **{"shard": self.address(), "trainer_id": self.trainer.trainer_id, "wait_s": 2.0, **replaced}
        )

    def drop_context_request(self, context_id: int, **replaced: Any) -> shards_pb2.DropContextRequest:
        """A DropContext."""
        fields = {"shard": self.address(), "push_id": self.trainer.push_id(), "context_id": context_id, **replaced}
        return shards_pb2.DropContextRequest(**fields)

    def call(self, method: str, *requests: Any, server: int = 0, timeout_s: float = 5.0) -> list[Any]:
        """One attempt at an RPC of a server's shards."""
        for request in requests:
            addressed = "shard" in request.DESCRIPTOR.fields_by_name and request.HasField("shard")
            if addressed and request.shard.shard in range(len(self.placement)):
                request.shard.shard = server
        return self.trainer.cluster.call(SHARDS[method], *requests, server=server, timeout_s=timeout_s)

    def push(
        self, request: shards_pb2.StepRequest, route: Route, *, server: int = 0, timeout_s: float = 5.0
    ) -> list[Any]:
        """Sends what `step_request` made along a route; the replies.

        Through memory, its chunks are put into the mailbox first, each bucket under the push's sequence number.
        """
        if route is MEMORY:
            request, chunks = self._without_chunks(request)
            mailbox = self.mailbox(server)
            for chunk in chunks:
                mailbox.bytes_of(chunk.bucket)[:] = chunk.data
                mailbox.set_word(chunk.bucket, request.push_id.sequence)
        replies = self.call(route.method, request, server=server, timeout_s=timeout_s)
        if not route.streams and not request.HasField("commit"):
            (reply,) = replies
            assert not reply.HasField("outcome")
            return []
        return replies

    @staticmethod
    def _without_chunks(request: shards_pb2.StepRequest) -> tuple[shards_pb2.StepRequest, list[types_pb2.Chunk]]:
        """The same as it goes if its gradients lie in memory, and those."""
        copied = shards_pb2.StepRequest()
        copied.CopyFrom(request)
        del copied.chunks[:]
        copied.in_memory, copied.without_values = bool(request.chunks), True
        return copied, list(request.chunks)

    def open_memory_request(self, server: int = 0, **replaced: Any) -> shards_pb2.OpenMemoryRequest:
        """An OpenMemory with the nonce of a server."""
        fields = {
            "shard": self.address(),
            "trainer_id": self.trainer.trainer_id,
            "nonce": self.nonce(server),
            **replaced,
        }
        return shards_pb2.OpenMemoryRequest(**fields)

    def nonce(self, server: int = 0) -> bytes:
        """What proves to be on a server's machine."""
        (found,) = self.call("FindMemory", shards_pb2.FindMemoryRequest(), server=server)
        return bytes(map_segment(found.segment, writable=False))

    def mailbox(self, server: int = 0) -> SharedBuckets:
        """This trainer's mailbox on a server, opened when it is first needed."""
        if server not in self._mailboxes:
            (opened,) = self.call("OpenMemory", self.open_memory_request(server), server=server)
            offsets = BucketOffsets(self.layout.part(self.placement[server].runs))
            self._mailboxes[server] = SharedBuckets(map_segment(opened.mailbox, writable=True), offsets)
        return self._mailboxes[server]

    def step(self, number: int, *values: float, method: str = "Step") -> None:
        """A whole step of a lone trainer; of several values the last one is to count."""
        commit = self.commit(number)

        def one(server: int) -> Any:
            chunks = [self.chunk(server, value) for value in values]
            request = self.step_request(server, 0.0, chunks=chunks, context_id=1000 + number, commit=commit)
            return self.call(method, request, server=server)

        with ThreadPoolExecutor(len(self.placement)) as pool:
            for reply, *_ in pool.map(one, range(len(self.placement))):
                assert reply.outcome.accepted, reply.outcome.reason
                self.round = reply.outcome.round

    def values(self, server: int) -> list[float]:
        """What a shard holds."""
        replies = self.call("Pull", self.pull_request(), server=server)
        data = b"".join(chunk.data for reply in replies for chunk in reply.chunks)
        return torch.frombuffer(bytearray(data), dtype=torch.float32).tolist()


def everywhere(value: float) -> Sequence[float]:
    """What a shard holds if all of its elements are equal."""
    return [value] * (NUM_ELEMENTS // 2)
