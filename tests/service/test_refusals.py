"""What no correct client sends is refused by name, and the servers go on."""

from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import pytest
import torch

import pserver
from pserver.client.cluster import Cluster
from pserver.errors import (
    DeadlineExceeded,
    InvalidRequest,
    LayoutMismatch,
    ProtocolMismatch,
    PserverError,
    StaleEpoch,
    TrainerEnded,
    UnknownModel,
    UnsupportedModel,
    UnsupportedOptimizer,
)
from pserver.transport.convert import options_to_bytes, spec_to_proto
from pserver.transport.gen import coordinator_pb2, shards_pb2, types_pb2
from pserver.transport.methods import COORDINATOR
from pserver.types import PROTOCOL_VERSION
from pserver.wire.layout import TensorSpec
from tests.routes import Route
from tests.service.grpc_cluster import GrpcCluster
from tests.service.wire_trainer import ARGUMENTS, WireModel, WireTrainer, everywhere, spec
from tests.waiting import until

FLOAT = torch.float32
HUGE = (1 << 62) - 1


@pytest.fixture
def trainer(cluster: GrpcCluster) -> Iterator[WireTrainer]:
    """A trainer that leaves at the end, whatever it has said."""
    joined = WireTrainer(cluster)
    yield joined
    joined.leave()


@pytest.fixture
def model(trainer: WireTrainer, name: str) -> Iterator[WireModel]:
    """A model of zeros that must train as if nothing had happened, at the end of the test."""
    registered = trainer.model(name)
    yield registered
    registered.step(1, 2.0)
    assert [registered.values(0), registered.values(1)] == [everywhere(-2.0)] * 2


# Whom a message is for

Requests = Callable[[WireModel, shards_pb2.ShardAddress], list[Any]]

ADDRESSED: dict[str, Requests] = {
    "Initialise": lambda model, address: model.initialise_requests(0, shard=address),
    "Step": lambda model, address: [model.step_request(0, 9.0, shard=address)],
    "StepOnce": lambda model, address: [model.step_request(0, 9.0, shard=address)],
    "OpenMemory": lambda model, address: [model.open_memory_request(shard=address)],
    "Pull": lambda model, address: [model.pull_request(shard=address)],
    "PullState": lambda model, address: [model.pull_state_request(shard=address)],
    "DropContext": lambda model, address: [model.drop_context_request(1, shard=address)],
}


@pytest.mark.parametrize("method", ADDRESSED)
@pytest.mark.parametrize(
    ("replaced", "error", "names"),
    [
        ({"model": "no such model"}, UnknownModel, "no such model"),
        ({"model": ""}, UnknownModel, "''"),
        ({"shard": 2}, UnknownModel, "does not hold shard 2"),
        ({"shard": -1}, UnknownModel, "does not hold shard -1"),
        ({"epoch": 1 << 40}, StaleEpoch, "1099511627776"),
        ({"epoch": -1}, StaleEpoch, "-1"),
        ({"fingerprint": 0xABC}, LayoutMismatch, "0000000000000abc"),
    ],
    ids=[
        "unknown model",
        "no model",
        "unknown shard",
        "negative shard",
        "later epoch",
        "negative epoch",
        "fingerprint",
    ],
)
def test_a_message_for_another_shard_is_refused(
    method: str, replaced: dict[str, Any], error: type[PserverError], names: str, model: WireModel
) -> None:
    requests = ADDRESSED[method](model, model.address(**replaced))
    with pytest.raises(error, match=names):
        model.call(method, *requests)


@pytest.mark.parametrize("method", ADDRESSED)
def test_a_trainer_that_has_left_is_refused_by_shards(method: str, cluster: GrpcCluster, name: str) -> None:
    trainer = WireTrainer(cluster)
    model = trainer.model(name)
    requests = ADDRESSED[method](model, model.address())
    trainer.leave()
    until(lambda: _is_refused(model, method, requests), "shards hear that the trainer has left")


def _is_refused(model: WireModel, method: str, requests: list[Any]) -> bool:
    try:
        model.call(method, *requests)
    except TrainerEnded as error:
        return str(model.trainer.trainer_id) in str(error)
    except InvalidRequest:  # initial values for a model that is ready
        return False
    return False


# Mutations' ids

NONSENSE_IDS = [
    {"sequence": 0},
    {"sequence": -5},
    {"lowest_unacknowledged": 0},
    {"lowest_unacknowledged": -1},
    {"lowest_unacknowledged": HUGE},
]


@pytest.mark.parametrize("method", ["Initialise", "Step", "StepOnce", "DropContext"])
@pytest.mark.parametrize("replaced", NONSENSE_IDS, ids=str)
def test_push_ids_that_make_no_sense_are_refused_by_shards(
    method: str, replaced: dict[str, int], model: WireModel
) -> None:
    requests = ADDRESSED[method](model, model.address())
    requests[0].push_id.CopyFrom(model.trainer.push_id(**replaced))
    with pytest.raises(InvalidRequest):
        model.call(method, *requests)


@pytest.mark.parametrize("method", ["RegisterModel", "Attach", "DropModel"])
@pytest.mark.parametrize("replaced", NONSENSE_IDS, ids=str)
def test_push_ids_that_make_no_sense_are_refused_by_the_coordinator(
    method: str, replaced: dict[str, int], model: WireModel
) -> None:
    push_id = model.trainer.push_id(**replaced)
    requests = {
        "RegisterModel": coordinator_pb2.RegisterModelRequest(push_id=push_id, spec=spec_to_proto(spec(model.name))),
        "Attach": coordinator_pb2.AttachRequest(push_id=push_id, model=model.name),
        "DropModel": coordinator_pb2.DropModelRequest(push_id=push_id, model=model.name),
    }
    with pytest.raises(InvalidRequest):
        model.trainer.coordinator(method, requests[method])


@pytest.mark.parametrize("trainer_id", [0, -1, 12345, HUGE])
def test_trainers_that_never_joined_are_refused_by_the_coordinator(
    trainer_id: int, model: WireModel, name: str
) -> None:
    push_id = model.trainer.push_id(trainer_id=trainer_id)
    for method, request in (
        ("Renew", coordinator_pb2.RenewRequest(trainer_id=trainer_id)),
        (
            "RegisterModel",
            coordinator_pb2.RegisterModelRequest(push_id=push_id, spec=spec_to_proto(spec(model.name)), wait_s=1),
        ),
        ("Attach", coordinator_pb2.AttachRequest(push_id=push_id, model=name)),
        ("DropModel", coordinator_pb2.DropModelRequest(push_id=push_id, model=name)),
    ):
        with pytest.raises(InvalidRequest, match=str(trainer_id)):
            model.trainer.coordinator(method, request)
    model.trainer.coordinator("Leave", coordinator_pb2.LeaveRequest(push_id=push_id))


def test_a_trainer_that_never_joined_is_refused_by_shards_once_the_news_of_it_could_have_come(
    model: WireModel, route: Route, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pserver.server.shard_host.ADMISSION_WAIT_S", 0.2)
    stranger = model.trainer.push_id(trainer_id=HUGE)
    request = model.step_request(0, 500.0, push_id=stranger, commit=model.commit(1), wait_s=0.2)
    with pytest.raises(InvalidRequest, match=f"trainer {HUGE} has not joined"):
        model.push(request, route)
    assert model.trainer.cluster.num_contexts(model.name) == [0, 0]


def test_a_commit_of_a_trainer_that_never_attached_enters_no_round(
    model: WireModel, route: Route, cluster: GrpcCluster
) -> None:
    stranger = WireTrainer(cluster)
    strangers = model.of(stranger)
    for server in (0, 1):
        request = strangers.step_request(server, 500.0, commit=model.commit(1), wait_s=0.0, context_id=9)
        with pytest.raises(DeadlineExceeded):
            strangers.push(request, route, server=server)
    assert cluster.model_status(model.name).round == 0
    stranger.leave()


# Chunks

CHUNKS: dict[str, dict[str, Any]] = {
    "negative bucket": {"bucket": -1},
    "no such bucket": {"bucket": (1 << 31) - 1},
    "another shard's bucket": {"bucket": 1},
    "negative offset": {"offset_bytes": -4},
    "huge offset": {"offset_bytes": HUGE},
    "a gap": {"offset_bytes": 4},
    "no element type": {"dtype": 0},
    "unknown element type": {"dtype": 99},
    "another element type": {"dtype": 2},
    "too long": {"data": bytes(1 << 20)},
    "too short": {"data": bytes(4)},
    "empty": {"data": b""},
}


@pytest.mark.parametrize("method", ["Step", "StepOnce"])
@pytest.mark.parametrize("replaced", CHUNKS.values(), ids=CHUNKS)
def test_chunks_that_do_not_fit_are_refused_and_nothing_of_them_stays(
    replaced: dict[str, Any], method: str, model: WireModel
) -> None:
    with pytest.raises(InvalidRequest, match=r"bucket|element type"):
        model.call(method, model.step_request(0, 9.0, chunks=[model.chunk(0, 9.0, **replaced)]))
    assert model.trainer.cluster.num_contexts(model.name) == [0, 0]


@pytest.mark.parametrize("method", ["Step", "StepOnce"])
def test_a_bucket_sent_again_in_one_push_counts_as_it_was_sent_last(
    method: str, trainer: WireTrainer, name: str
) -> None:
    model = trainer.model(name)
    model.step(1, 50.0, 1.0, method=method)
    assert model.values(0) == model.values(1) == everywhere(-1.0)


def test_initial_values_that_do_not_fit_are_refused(trainer: WireTrainer, name: str) -> None:
    """The model stays unready; the same trainer then sends them well."""
    reply = trainer.register(spec(name))
    assert reply.initialise
    model = WireModel(trainer, name, reply)
    for replaced in CHUNKS.values():
        first, second = model.initialise_requests(0)
        second.chunks[0].CopyFrom(model.chunk(0, 9.0, **replaced))
        with pytest.raises(InvalidRequest):
            model.call("Initialise", first, second)
    with pytest.raises(InvalidRequest, match="incomplete"):
        model.call("Initialise", model.initialise_requests(0)[0])
    with pytest.raises(InvalidRequest, match="not initialised"):
        model.call("Step", model.step_request(0, 1.0))
    for server in (0, 1):
        model.call("Initialise", *model.initialise_requests(server, 5.0), server=server)
    assert not trainer.register(spec(name), initialised=model.epoch).initialise
    trainer.attach(name, model.epoch)
    assert [model.values(0), model.values(1)] == [everywhere(5.0)] * 2


STATES: dict[str, dict[str, Any]] = {
    "another shard's bucket": {"bucket": 1},
    "no such tensor": {"tensor": 7},
    "a negative tensor": {"tensor": -1},
    "a part of another place": {"start": 5},
    "no start": {"start": None},
    "too short": {"shape": [3], "data": bytes(12)},
    "less data than its shape": {"data": bytes(8)},
    "more data than its shape": {"data": bytes(512)},
    "a gap": {"offset_bytes": 4},
    "a negative dimension": {"shape": [-32]},
    "an absurd shape": {"shape": [HUGE, HUGE]},
    "unknown element type": {"dtype": 99},
    "no tensor": {"plain": msgpack.packb("text"), "start": None, "shape": [], "data": b""},
    "no msgpack": {"plain": b"\xc1\xff", "start": None, "shape": [], "data": b""},
    "a complex value": {"dtype": 11, "data": bytes(256)},
}


@pytest.mark.parametrize("replaced", STATES.values(), ids=STATES)
def test_optimizer_state_that_does_not_fit_is_refused_and_good_state_taken_after_it(
    replaced: dict[str, Any], trainer: WireTrainer, name: str
) -> None:
    momentum = {"optimizer_groups": ({**ARGUMENTS, "momentum": 0.5},)}
    reply = trainer.register(spec(name, **momentum))
    model = WireModel(trainer, name, reply)
    good = {"bucket": 0, "tensor": 0, "key": "momentum_buffer", "start": 0, "shape": [32], "dtype": 1}
    good["data"] = torch.full((32,), 8.0).numpy().tobytes()
    bad = {key: value for key, value in {**good, **replaced}.items() if value is not None}
    first, values = model.initialise_requests(0)
    with pytest.raises(InvalidRequest):
        model.call("Initialise", first, shards_pb2.InitialiseRequest(state=[types_pb2.StateChunk(**bad)]), values)
    first, values = model.initialise_requests(0)
    model.call("Initialise", first, shards_pb2.InitialiseRequest(state=[types_pb2.StateChunk(**good)]), values)
    model.call("Initialise", *model.initialise_requests(1), server=1)
    trainer.register(spec(name, **momentum), initialised=model.epoch)
    trainer.attach(name, model.epoch)
    (state,) = model.call("PullState", model.pull_state_request())
    assert [(each.key, each.data) for each in state.state] == [("momentum_buffer", good["data"])]


def test_a_ready_model_takes_no_initial_values_of_another_trainer(model: WireModel, cluster: GrpcCluster) -> None:
    other = WireTrainer(cluster)
    with pytest.raises(InvalidRequest, match="not overwritten"):
        model.call("Initialise", *model.initialise_requests(0, 77.0, push_id=other.push_id()))
    other.leave()


@pytest.mark.parametrize("index", [-1, 1, (1 << 31) - 1])
def test_absent_tensors_that_do_not_exist_are_refused(index: int, model: WireModel, route: Route) -> None:
    with pytest.raises(InvalidRequest, match="absent"):
        model.push(model.step_request(0, 9.0, absent_tensors=[index]), route)


@pytest.mark.parametrize("method", ["Initialise", "Step"])
def test_a_stream_without_messages_is_refused(method: str, model: WireModel) -> None:
    with pytest.raises(InvalidRequest, match="first message"):
        model.call(method)


# Commits

COMMITS: dict[str, dict[str, Any]] = {
    "step 0": {"step": 0},
    "negative step": {"step": -3},
    "negative samples": {"samples": -1},
    "too many samples": {"samples": HUGE},
    "no options": {"options": b""},
    "options for too many groups": {"options": options_to_bytes([{"lr": 1.0}, {"lr": 1.0}])},
    "options that are no list": {"options": msgpack.packb(3)},
    "options that are no maps": {"options": msgpack.packb([3])},
    "options that are no msgpack": {"options": b"\xc1\xff\xff"},
    "an option that is no number": {"options": options_to_bytes([{"lr": "fast"}])},
    "an option that is a list": {"options": options_to_bytes([{"lr": [1.0, 2.0]}])},
    "an option that torch does not have": {"options": options_to_bytes([{"params": 3}])},
    "a negative norm": {"max_norm": -1.0},
    "a norm of zero": {"max_norm": 0.0},
    "a norm that is no number": {"max_norm": float("nan")},
    "an infinite limit": {"clip_value": float("inf")},
    "an unknown rule for infinities": {"nonfinite": "ignore"},
    "no rule for infinities": {"nonfinite": ""},
}


@pytest.mark.parametrize("replaced", COMMITS.values(), ids=COMMITS)
def test_commits_that_make_no_sense_are_refused_and_the_model_trains_on(
    replaced: dict[str, Any], route: Route, trainer: WireTrainer, name: str
) -> None:
    model = trainer.model(name)
    for server in (0, 1):
        commit = model.commit(**{"step": 1, **replaced})
        with pytest.raises(InvalidRequest):
            model.push(model.step_request(server, 9.0, commit=commit, wait_s=1.0), route, server=server)
    model.step(1, 2.0)
    assert [model.values(0), model.values(1)] == [everywhere(-2.0)] * 2


@pytest.mark.parametrize("method", ["Pull", "PullState"])
@pytest.mark.parametrize("wait_s", [0.0, 0.2])
def test_a_wait_is_no_longer_than_asked(wait_s: float, method: str, model: WireModel) -> None:
    (request,) = ADDRESSED[method](model, model.address())
    request.min_round, request.wait_s = 1000, wait_s
    with pytest.raises(DeadlineExceeded, match="round 1000"):
        model.call(method, request, timeout_s=4.0)


@pytest.mark.parametrize("method", ["Pull", "PullState", "Step", "StepOnce"])
@pytest.mark.parametrize("wait_s", [-1.0, float("nan"), float("inf"), 1e9])
def test_a_wait_that_makes_no_sense_is_refused(wait_s: float, method: str, model: WireModel) -> None:
    (request,) = ADDRESSED[method](model, model.address())
    request.wait_s = wait_s
    with pytest.raises(InvalidRequest, match="wait_s"):
        model.call(method, request, timeout_s=4.0)
    assert model.trainer.cluster.num_contexts(model.name) == [0, 0]


@pytest.mark.parametrize("base_round", [-5, HUGE])
def test_a_gradient_of_a_round_that_nobody_can_have_seen_does_no_harm(
    base_round: int, route: Route, trainer: WireTrainer, name: str
) -> None:
    """A negative one counts as the first round, one of the future as the present round."""
    model = trainer.model(name)
    commit = model.commit(1, base_round=base_round)
    with pytest.raises(DeadlineExceeded):
        model.push(model.step_request(0, 3.0, commit=commit, wait_s=0.0), route)
    (reply, *_) = model.push(model.step_request(1, 3.0, commit=commit), route, server=1)
    assert (reply.outcome.accepted, reply.outcome.round, reply.outcome.staleness) == (True, 1, 0)
    assert [model.values(0), model.values(1)] == [everywhere(-3.0)] * 2


def test_steps_do_not_go_back(trainer: WireTrainer, name: str, route: Route) -> None:
    model = trainer.model(name)
    model.step(5, 1.0)
    for step in (5, 4):
        with pytest.raises(InvalidRequest, match="has committed step 5"):
            model.push(model.step_request(0, 9.0, commit=model.commit(step)), route)
    model.step(6, 1.0)
    assert model.values(0) == everywhere(-2.0)


@pytest.mark.parametrize("method", ["Step", "StepOnce"])
def test_a_committed_context_takes_no_more_gradients_and_cannot_be_dropped(
    method: str, trainer: WireTrainer, name: str
) -> None:
    model = trainer.model(name)
    with pytest.raises(DeadlineExceeded):
        model.call(method, model.step_request(0, 2.0, context_id=3, commit=model.commit(1), wait_s=0.0))
    with pytest.raises(InvalidRequest, match="context 3"):
        model.call(method, model.step_request(0, 9.0, context_id=3))
    with pytest.raises(PserverError, match="context 3"):
        model.call("DropContext", model.drop_context_request(3))
    model.call(method, model.step_request(1, 2.0, context_id=3, commit=model.commit(1)), server=1)
    assert [model.values(0), model.values(1)] == [everywhere(-2.0)] * 2


# Registration


def tensor(**replaced: Any) -> TensorSpec:
    return TensorSpec(**{"name": "weight", "shape": (4,), "dtype": FLOAT, "group": 0, **replaced})


SPECS: dict[str, tuple[dict[str, Any], type[PserverError]]] = {
    "no tensors": ({"tensors": ()}, UnsupportedModel),
    "only empty tensors": ({"tensors": (tensor(shape=(0,)),)}, UnsupportedModel),
    "only frozen parameters": ({"tensors": (tensor(group=-1),)}, UnsupportedModel),
    "only buffers": ({"tensors": (tensor(group=-2),)}, UnsupportedModel),
    "a negative dimension": ({"tensors": (tensor(shape=(-4,)),)}, InvalidRequest),
    "two negative dimensions": ({"tensors": (tensor(shape=(-4, -4)),)}, InvalidRequest),
    "an absurd size": ({"tensors": (tensor(shape=(HUGE, HUGE, HUGE)),)}, InvalidRequest),
    "an absurd sum of sizes": (
        {"tensors": tuple(tensor(name=f"{n}", shape=(1 << 40,)) for n in range(3))},
        InvalidRequest,
    ),
    "one name twice": ({"tensors": (tensor(), tensor())}, InvalidRequest),
    "a group below -2": ({"tensors": (tensor(group=-3),)}, InvalidRequest),
    "a group that is not described": ({"tensors": (tensor(group=1),)}, InvalidRequest),
    "an absurd group": ({"tensors": (tensor(group=(1 << 31) - 1),)}, InvalidRequest),
    "a negative bucket size": ({"bucket_bytes": -64}, InvalidRequest),
    "an odd bucket size": ({"bucket_bytes": 65}, InvalidRequest),
    "no name": ({"name": ""}, InvalidRequest),
    "a long name": ({"name": 256 * "x"}, InvalidRequest),
    "no trainers": ({"world_size": 0}, InvalidRequest),
    "minus one trainers": ({"world_size": -1}, InvalidRequest),
    "a billion trainers": ({"world_size": 1 << 30}, InvalidRequest),
    "an unknown optimizer": ({"optimizer": "os.system"}, UnsupportedOptimizer),
    "no optimizer groups": ({"optimizer_groups": ()}, UnsupportedOptimizer),
    "an argument that torch does not have": ({"optimizer_groups": ({"speed": 1},)}, UnsupportedOptimizer),
    "an argument that is taken": ({"optimizer_groups": ({"params": 1},)}, UnsupportedOptimizer),
    "a learning rate that torch refuses": ({"optimizer_groups": ({"lr": -1.0},)}, UnsupportedOptimizer),
    "a learning rate that is no number": ({"optimizer_groups": ({"lr": "fast"},)}, UnsupportedOptimizer),
    "an option that is no string": ({"optimizer_groups": ({1: 2},)}, UnsupportedOptimizer),
    "an unknown policy": ({"sync_policy": "whatever"}, InvalidRequest),
    "an unknown argument of a policy": ({"sync_policy_arguments": {"speed": 1}}, InvalidRequest),
    "a lag that is no number": (
        {"sync_policy": "ssp", "sync_policy_arguments": {"max_lag": "long"}},
        InvalidRequest,
    ),
    "a deadline that is no number": ({"sync_policy_arguments": {"deadline": "soon"}}, InvalidRequest),
    "an unknown policy for buffers": ({"buffers": "highest"}, InvalidRequest),
}


@pytest.mark.parametrize(("replaced", "error"), SPECS.values(), ids=SPECS)
def test_models_that_make_no_sense_are_refused(
    replaced: dict[str, Any], error: type[PserverError], model: WireModel, name: str
) -> None:
    bad = spec(**{"name": f"{name}-bad", **replaced})
    with pytest.raises(error):
        model.trainer.register(bad, wait_s=0.5)
    assert bad.name not in {each.name for each in model.trainer.cluster.status().models}


def nested_tuples(depth: int) -> bytes:
    """A list with a tuple in a tuple in a tuple; the code of tuples is 2."""
    data = msgpack.packb([])
    for _ in range(depth):
        data = msgpack.packb([msgpack.ExtType(2, data)])
    return data


def tensor_extension(data: bytes) -> bytes:
    """Options with a tensor in them; the code of tensors is 1."""
    return msgpack.packb([{"lr": msgpack.ExtType(1, data)}])


NOT_VALUES = {
    "garbage": b"\xc1\xff\xff",
    "cut short": msgpack.packb([{"lr": 1.0}])[:-3],
    "nested lists": b"\x91" * 100_000,
    "nested tuples": nested_tuples(3000),
    "a tensor with a false size": tensor_extension(msgpack.packb([1, 1 << 40])),
    "a tensor with a negative size": tensor_extension(msgpack.packb([1, -1]) + bytes(4)),
    "a tensor without a header": tensor_extension(b""),
    "a complex number of three parts": msgpack.packb([{"lr": msgpack.ExtType(3, msgpack.packb([1, 2, 3]))}]),
    "an unknown extension": msgpack.packb([{"lr": msgpack.ExtType(77, b"x")}]),
    "a number where a list or map is due": msgpack.packb(3),
}


@pytest.mark.parametrize("data", NOT_VALUES.values(), ids=NOT_VALUES)
@pytest.mark.parametrize("field", ["optimizer_groups", "sync_policy_arguments"])
def test_values_that_cannot_be_decoded_are_refused(field: str, data: bytes, model: WireModel, name: str) -> None:
    message = spec_to_proto(spec(f"{name}-bad"))
    setattr(message, field, data)
    request = coordinator_pb2.RegisterModelRequest(push_id=model.trainer.push_id(), spec=message, wait_s=0.5)
    with pytest.raises(InvalidRequest):
        model.trainer.coordinator("RegisterModel", request)


@pytest.mark.parametrize("code", [0, 99, -1])
def test_element_types_that_do_not_exist_are_refused(code: int, model: WireModel, name: str) -> None:
    message = spec_to_proto(spec(f"{name}-bad"))
    message.tensors[0].dtype = code
    request = coordinator_pb2.RegisterModelRequest(push_id=model.trainer.push_id(), spec=message, wait_s=0.5)
    with pytest.raises(InvalidRequest, match=str(code)):
        model.trainer.coordinator("RegisterModel", request)


def test_an_unknown_model_cannot_be_attached_to(trainer: WireTrainer) -> None:
    with pytest.raises(UnknownModel, match="no such model"):
        trainer.attach("no such model")


@pytest.mark.parametrize(
    ("replaced", "error"),
    [
        ({"protocol": PROTOCOL_VERSION + 1}, ProtocolMismatch),
        ({"protocol": 0}, ProtocolMismatch),
        ({"nonce": ""}, InvalidRequest),
        ({"nonce": "another", "rank": -2}, InvalidRequest),
        ({"nonce": "another", "rank": (1 << 31) - 1}, InvalidRequest),
    ],
    ids=str,
)
def test_nobody_joins_with_nonsense(
    replaced: dict[str, Any], error: type[PserverError], trainer: WireTrainer, cluster: GrpcCluster
) -> None:
    with pytest.raises(error):
        trainer.join(**replaced)
    assert [each.trainer_id for each in cluster.status().trainers] == [trainer.trainer_id]


# The link of servers


def hello(**replaced: Any) -> coordinator_pb2.ServerMessage:
    fields = {
        "name": "stranger",
        "address": "127.0.0.1:1",
        "incarnation": 1,
        "protocol": PROTOCOL_VERSION,
        **replaced,
    }
    return coordinator_pb2.ServerMessage(hello=coordinator_pb2.Hello(**fields))


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([], InvalidRequest),
        ([coordinator_pb2.ServerMessage()], InvalidRequest),
        ([coordinator_pb2.ServerMessage(heartbeat=coordinator_pb2.Heartbeat())], InvalidRequest),
        ([hello(protocol=PROTOCOL_VERSION + 1)], ProtocolMismatch),
        ([hello(name="s1", incarnation=12345)], pserver.errors.ConfigError),
    ],
    ids=["nothing", "an empty message", "a heartbeat", "another protocol", "a name that is taken"],
)
def test_a_link_that_begins_with_nonsense_is_refused(
    messages: list[Any], error: type[PserverError], model: WireModel
) -> None:
    with pytest.raises(error):
        model.trainer.cluster.call(COORDINATOR["Link"], *messages)
    assert [each.name for each in model.trainer.cluster.status().servers] == ["s0", "s1"]


def test_a_link_that_goes_on_with_nonsense_is_ended_with_an_error() -> None:
    """A server that is silently not heard any more would lose its lease instead, and its models."""
    with GrpcCluster(1) as own:
        with pytest.raises(InvalidRequest):
            own.call(COORDINATOR["Link"], hello(), coordinator_pb2.ServerMessage(), timeout_s=1.0)
        assert ("s0", True) in {(each.name, each.alive) for each in own.status().servers}


# Models that differ between trainers


def module(*names: str) -> torch.nn.Module:
    made = torch.nn.Module()
    for each in names:
        made.register_parameter(each, torch.nn.Parameter(torch.zeros(6)))
    return made


def register(session: Cluster, replica: torch.nn.Module, name: str, **more: Any) -> Any:
    arguments = {"optimizer_class": torch.optim.SGD, "lr": 0.1, **more}
    return pserver.optim.RemoteOptimizer(params=replica, name=name, cluster=session, **arguments)


@pytest.mark.parametrize(
    ("other", "more", "difference"),
    [
        (module("second", "first"), {}, r"tensor 0: expected 'first' \[6\] float32 group 0, got 'second'"),
        (module("first", "second", "third"), {}, r"tensor 2: expected none, got 'third'"),
        (module("first"), {}, r"tensor 1: expected 'second' .*, got none"),
        (module("first", "second").double(), {}, r"tensor 0: expected .* float32 .*, got 'first' \[6\] float64"),
        (module("first", "second"), {"lr": 0.2}, r"optimizer_groups: expected .*0\.1.*, got .*0\.2"),
        (module("first", "second"), {"optimizer_class": torch.optim.Adam}, "optimizer: expected SGD, got Adam"),
        (module("first", "second"), {"bucket_bytes": 128}, "bucket_bytes: expected 0, got 128"),
    ],
    ids=["order", "one more", "one less", "element type", "learning rate", "optimizer", "bucket size"],
)
def test_a_model_that_differs_is_refused_at_once_with_the_first_difference(
    other: torch.nn.Module, more: dict[str, Any], difference: str, cluster: GrpcCluster, name: str
) -> None:
    with cluster.connect(0, 2) as first, cluster.connect(1, 2, timeout_s=60.0) as second:
        register(first, module("first", "second"), name)
        with pytest.raises(LayoutMismatch, match=difference):
            register(second, other, name, **more)


def test_a_leave_without_an_id_ends_nobody(model: WireModel) -> None:
    model.trainer.coordinator("Leave", coordinator_pb2.LeaveRequest())
    model.trainer.coordinator("Leave", coordinator_pb2.LeaveRequest(push_id=types_pb2.PushId()))
    model.trainer.renew()


def test_a_large_push_that_is_refused_at_once_keeps_the_class_of_its_error() -> None:
    """gRPC hides the status of a call that ends while its client still writes."""
    with GrpcCluster(2) as own, own.connect() as cluster:
        parameter = torch.nn.Parameter(torch.zeros(4 << 20))
        optimizer = pserver.optim.RemoteOptimizer(torch.optim.SGD, [("w", parameter)], lr=0.1, cluster=cluster)
        parameter.grad = torch.ones_like(parameter)
        cluster.drop_model("model")
        with pytest.raises(pserver.errors.PserverError) as raised:
            optimizer.step()
        found = getattr(raised.value, "exceptions", (raised.value,))
        assert {type(each) for each in found} <= {pserver.errors.UnknownModel, pserver.errors.ModelFailed}
