"""What a step costs in calls and messages: it depends on the bytes and the servers, not on tensors and buckets."""

from collections import Counter

import pytest
import torch

import pserver
from pserver.client import replica
from pserver.client.cluster import Cluster, channels_for
from pserver.transport.chunks import MESSAGE_BYTES
from pserver.wire.compress import Int8
from tests.routes import MEMORY, ONE_MESSAGE, SOCKETS, STREAM, Route
from tests.service.counted_calls import Calls
from tests.service.grpc_cluster import GrpcCluster

NUM_SERVERS = 2
NUM_STEPS = 3
#: Of all parameters together: small enough to go in one message, and in shared memory as well.
NUM_ELEMENTS = 32_000
#: Large enough for several messages to each server.
MANY_ELEMENTS = 2_000_000


class Model:
    """Equal parameters, trained by SGD with learning rate 1."""

    def __init__(self, session: Cluster, name: str, *, tensors: int, elements: int, **options: object) -> None:
        self.parameters = [torch.nn.Parameter(torch.zeros(elements // tensors)) for _ in range(tensors)]
        named = [(f"p{number}", parameter) for number, parameter in enumerate(self.parameters)]
        self.optimizer = pserver.optim.RemoteOptimizer(
            torch.optim.SGD, named, lr=1.0, name=name, cluster=session, **options
        )

    def step(self) -> None:
        for parameter in self.parameters:
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()

    @property
    def num_buckets(self) -> int:
        assert self.optimizer._model is not None
        return len(self.optimizer._model._replica.layout.buckets)


def of_steps(cluster: GrpcCluster, route: Route, name: str, **model: int | object) -> tuple[Calls, int]:
    """What `NUM_STEPS` steps of a model made, lease renewals apart; and its number of buckets."""
    calls = Calls(channels_for(route.transport))
    with (
        route.taken(),
        pytest.MonkeyPatch.context() as patch,
        cluster.connect(transport=route.transport, connect_channel=calls) as session,
    ):
        patch.setattr(replica, "PART_BYTES", 1 << 30)  # in one piece, so that messages are full
        trained = Model(session, name, **model)  # type: ignore[arg-type]
        for counter in (calls.made, calls.sent, calls.received):
            counter.clear()
        for _ in range(NUM_STEPS):
            trained.step()
        for counter in (calls.made, calls.sent, calls.received):
            counter.pop("Renew", None)
        found = Calls(calls.connect, *map(Counter, (calls.made, calls.sent, calls.received)))
        for parameter in trained.parameters:
            torch.testing.assert_close(parameter.detach(), torch.full_like(parameter, -NUM_STEPS))
        num_buckets = trained.num_buckets
        session.drop_model(name)
    return found, num_buckets


def test_a_step_is_one_call_a_server_whatever_the_number_of_tensors(
    cluster: GrpcCluster, route: Route, name: str
) -> None:
    few, _ = of_steps(cluster, route, f"{name}-few", tensors=10, elements=NUM_ELEMENTS)
    many, _ = of_steps(cluster, route, f"{name}-many", tensors=2000, elements=NUM_ELEMENTS)
    assert few.counts == many.counts
    assert few.made == {route.method: NUM_SERVERS * NUM_STEPS}


@pytest.mark.parametrize("codec", [None, Int8()], ids=["plain", "encoded"])
def test_a_step_is_one_call_a_server_whatever_the_number_of_buckets(
    cluster: GrpcCluster, route: Route, name: str, codec: object
) -> None:
    """So nothing waits for one bucket before it does the next."""
    sizes = {"tensors": 10, "elements": NUM_ELEMENTS, "compress": codec}
    few, num_few = of_steps(cluster, route, f"{name}-few", bucket_bytes=1 << 16, **sizes)
    many, num_many = of_steps(cluster, route, f"{name}-many", bucket_bytes=256, **sizes)
    assert num_many > 100 * num_few
    assert few.counts == many.counts
    assert sum(few.made.values()) == NUM_SERVERS * NUM_STEPS


@pytest.mark.parametrize("route", [STREAM, SOCKETS], ids=["stream", "sockets"])
@pytest.mark.parametrize("tensors", [10, 2000])
def test_a_stream_has_as_many_messages_as_its_bytes_need(
    cluster: GrpcCluster, route: Route, name: str, tensors: int
) -> None:
    found, _ = of_steps(cluster, route, name, tensors=tensors, elements=MANY_ELEMENTS, bucket_bytes=64 << 10)
    messages = -(-MANY_ELEMENTS * 4 // MESSAGE_BYTES)
    for counted in (found.sent, found.received):
        assert NUM_STEPS * messages <= counted["Step"] <= NUM_STEPS * (messages + NUM_SERVERS)


@pytest.mark.parametrize("route", [ONE_MESSAGE, MEMORY], ids=["one message", "memory"])
def test_other_routes_have_one_message_each_way(cluster: GrpcCluster, route: Route, name: str) -> None:
    found, _ = of_steps(cluster, route, name, tensors=2000, elements=NUM_ELEMENTS)
    assert found.sent == found.received == found.made == {"StepOnce": NUM_SERVERS * NUM_STEPS}
