"""Compressed gradients and rounded parameters: the same bits for everybody, the promised bytes, retries."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import pserver
from pserver.client.cluster import Cluster
from pserver.compress import (
    BFloat16,
    Codec,
    ErrorFeedback,
    Float16,
    Int8,
    NoCompression,
    PowerSGD,
    TopK,
    register_codec,
)
from pserver.testing.local_cluster import LocalCluster
from pserver.transport.faults import Fault, FaultKind
from pserver.wire.compress import CODECS, BucketShape
from tests.numerics.compressing import (
    ENCODED,
    FED_BACK,
    HALVES,
    LOSSY,
    STEPS,
    Signs,
    as_it_is,
    sent_bytes,
    to_bfloat16,
    train_compressed,
    train_rounded,
)
from tests.numerics.training import (
    BUCKET_BYTES,
    RECIPES,
    WAYS,
    assert_same_bits,
    fill_,
    make_batches,
    make_module,
    of_rank,
    remote_optimizer,
    step_on,
)
from tests.routes import ROUTES, Route


@pytest.fixture
def cluster(cluster_of: Callable[[int], LocalCluster]) -> LocalCluster:
    """Two servers."""
    return cluster_of(2)


class Scaled(Float16):
    """Keeps what would be lost below the range of float16."""

    name = "scaled"

    def compress(self, buffer: torch.Tensor) -> torch.Tensor:
        return super().compress(buffer * 1024)

    def expand(self, data: torch.Tensor, shape: BucketShape) -> torch.Tensor:
        return super().expand(data, shape) / 1024


def test_a_class_derived_from_one_that_only_casts_does_what_it_does(cluster: LocalCluster, name: str) -> None:
    def program(session: Cluster) -> float:
        weight = torch.nn.Parameter(torch.zeros(64))
        optimizer = pserver.optim.RemoteOptimizer(
            torch.optim.SGD, [("weight", weight)], lr=1.0, name=name, cluster=session, compress=Scaled()
        )
        weight.grad = torch.full_like(weight, 2.0**-26)  # zero in float16
        optimizer.step()
        return weight[0].item()

    register_codec(Scaled)
    try:
        assert cluster.train(1, program) == [-(2.0**-26)]
    finally:
        CODECS.pop(Scaled.name)


# Bits


@pytest.mark.parametrize("pull_dtype", [None, *HALVES], ids=str)
@pytest.mark.parametrize("codec", [NoCompression(), *LOSSY, *FED_BACK], ids=str)
def test_trainers_agree_and_every_route_gives_the_same_bits(
    codec: Codec, pull_dtype: torch.dtype | None, cluster: LocalCluster, name: str
) -> None:
    runs: list[Any] = []
    for label, route in ROUTES.items():
        with route.taken():
            runs += train_compressed(
                cluster, f"{name} {label}", transport=route.transport, compress=codec, pull_dtype=pull_dtype
            )
    for found in runs:
        assert_same_bits(found, runs[0])


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("transport", ["shm", "grpc"])
@pytest.mark.parametrize("codec", [NoCompression(), BFloat16()], ids=str)
@pytest.mark.parametrize("pull_dtype", [None, torch.float16], ids=str)
@pytest.mark.parametrize("late", [False, True])
def test_tensors_that_are_not_contiguous_travel_in_any_dtype(
    servers: int,
    transport: str,
    codec: Codec,
    pull_dtype: torch.dtype | None,
    late: bool,
    cluster_of: Callable[[int], LocalCluster],
    name: str,
) -> None:
    """Rounding leaves these values as they are, and puts buckets of an odd number of 64 bytes elsewhere."""

    def program(session: Cluster) -> None:
        layers = torch.nn.Sequential(*(torch.nn.Conv2d(8, 8, 3) for _ in range(4))).to(
            memory_format=torch.channels_last
        )
        layers[1].weight.requires_grad_(False)
        before = {}
        for index, (key, parameter) in enumerate(layers.named_parameters()):
            with torch.no_grad():
                parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) % 200 + index)
            before[key] = parameter.detach().clone()
        options = {"bucket_bytes": 64 * 3, "compress": codec, "pull_dtype": pull_dtype, "late_pull": late}
        optimizer = pserver.optim.RemoteOptimizer(
            torch.optim.SGD, layers, lr=1.0, name=name, cluster=session, **options
        )
        for parameter in layers.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.ones_like(parameter)
        for _ in range(2):
            optimizer.step()
        for key, parameter in layers.named_parameters():
            assert torch.equal(parameter, before[key] - 2 * parameter.requires_grad), key

    cluster_of(servers).train(1, program, transport=transport)


@pytest.mark.parametrize("way", WAYS)
def test_no_compression_is_what_happens_without_a_word(way: str, cluster: LocalCluster, name: str) -> None:
    plain = train_compressed(cluster, name, way=way)
    none = train_compressed(cluster, f"{name}-none", way=way, compress=NoCompression())
    for found, expected in zip(none, plain, strict=True):
        assert_same_bits(found, expected)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("trainers", [1, 2])
@pytest.mark.parametrize("recipe", ["sgd-momentum", "adamw-groups"])
def test_bfloat16_has_the_bits_of_torch_with_rounded_gradients(
    recipe: str, trainers: int, way: str, cluster: LocalCluster, name: str
) -> None:
    batches = make_batches([8] * trainers, steps=STEPS)
    expected = train_rounded(make_module(), RECIPES[recipe], batches, gradients=to_bfloat16)
    assert not torch.equal(expected[0][0], train_rounded(make_module(), RECIPES[recipe], batches)[0][0])

    for found in train_compressed(cluster, name, way=way, recipe=recipe, trainers=trainers, compress=BFloat16()):
        assert_same_bits(found, expected)


@pytest.mark.parametrize("transport", ["shm", "grpc"])
@pytest.mark.parametrize("codec", [NoCompression(), BFloat16()], ids=str)
@pytest.mark.parametrize("pull_dtype", [torch.float16, torch.bfloat16])
def test_parameters_are_rounded_on_their_way_and_stay_exact_on_servers(
    pull_dtype: torch.dtype, codec: Codec, transport: str, cluster: LocalCluster, name: str
) -> None:
    """Had servers stepped what they send, the second step would show it."""
    expected = train_rounded(
        make_module(),
        RECIPES["adam"],
        make_batches([8, 8], steps=STEPS),
        gradients=as_it_is if isinstance(codec, NoCompression) else to_bfloat16,
        pulled=HALVES[pull_dtype],
    )
    shared = {"compress": codec, "pull_dtype": pull_dtype}
    for found in train_compressed(cluster, name, recipe="adam", transport=transport, **shared):
        assert_same_bits(found, expected)


def test_rounded_updates_that_are_small_add_up_on_servers(cluster: LocalCluster, name: str) -> None:
    steps, lr = 64, 2.0**-14

    def program(session: Cluster) -> float:
        weight = torch.nn.Parameter(torch.ones(5))
        optimizer = pserver.optim.RemoteOptimizer(
            torch.optim.SGD, [weight], lr=lr, name=name, cluster=session, pull_dtype=torch.bfloat16
        )
        for _ in range(steps):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        return weight[0].item()

    assert cluster.train(1, program) == [1.0 - steps * lr]


@pytest.mark.parametrize("codec", [Float16(), BFloat16(), Int8(), *FED_BACK], ids=str)
def test_models_learn_with_every_codec(codec: Codec, cluster: LocalCluster, name: str) -> None:
    inputs = torch.cat([drawn for drawn, _ in make_batches([32, 32], steps=1)[0]])
    batches = [(part, part[:, :4].sum(dim=1, keepdim=True)) for part in inputs.split(32)]

    def program(session: Cluster) -> tuple[float, float]:
        module = make_module()
        optimizer = remote_optimizer(session, module, RECIPES["sgd"], name, compress=codec)
        losses = [step_on(module, optimizer, batches[session.rank]).item() for _ in range(20)]
        return losses[0], losses[-1]

    for first, last in cluster.train(2, program):
        assert last < 0.6 * first


# Bytes


class Normed(torch.nn.Module):
    """Batch normalisation, whose buffers travel, between a layer that is trained and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = torch.nn.Linear(13, 300), torch.nn.BatchNorm1d(300), torch.nn.Linear(300, 1)
        self.last.requires_grad_(False)
        fill_(self, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(inputs)))


@pytest.mark.parametrize(("bucket_bytes", "transport"), [(1024, "shm"), (1024, "grpc"), (1 << 20, "grpc")])
@pytest.mark.parametrize("codec", [NoCompression(), *LOSSY, *FED_BACK], ids=str)
def test_a_step_sends_what_the_codec_promises_and_raw_buffers(
    codec: Codec, bucket_bytes: int, transport: str, cluster: LocalCluster, name: str
) -> None:
    def program(session: Cluster) -> Any:
        module = Normed()
        optimizer = remote_optimizer(session, module, RECIPES["sgd"], name, bucket_bytes=bucket_bytes, compress=codec)
        counted = []
        for batch in of_rank(make_batches([8, 8]), session.rank):
            before = session.statistics().sent_bytes
            step_on(module, optimizer, batch)
            counted.append(session.statistics().sent_bytes - before)
        replica = optimizer._model._replica
        return counted, sent_bytes(replica.layout, replica.coding)

    for (first, *later), promised in cluster.train(2, program, transport=transport):
        assert first == max(promised)
        assert set(later) == {min(promised)}


@pytest.mark.parametrize(
    ("codec", "expected"),
    [
        (BFloat16(), 2 * 1024),
        (Int8(block=256), 1024 + 4 * 4),
        (TopK(ratio=0.125), 128 * 8),
        (ErrorFeedback(TopK(ratio=0.125)), 128 * 8),
        (PowerSGD(rank=2, start_iteration=0), 2 * (32 + 32) * 4),
    ],
    ids=str,
)
def test_a_matrix_of_1024_elements_has_so_many_bytes(
    codec: Codec, expected: int, cluster: LocalCluster, name: str
) -> None:
    def program(session: Cluster) -> int:
        weight = torch.nn.Parameter(torch.zeros(32, 32))
        optimizer = pserver.optim.RemoteOptimizer(
            torch.optim.SGD, [weight], lr=1.0, name=name, cluster=session, compress=codec
        )
        before = session.statistics().sent_bytes
        weight.grad = torch.randn(32, 32, generator=torch.Generator().manual_seed(session.rank))
        optimizer.step()
        return session.statistics().sent_bytes - before

    assert cluster.train(2, program) == [expected] * 2


@pytest.mark.parametrize("codec", [NoCompression(), Int8()], ids=str)
@pytest.mark.parametrize("pull_dtype", [torch.float16, torch.bfloat16])
def test_rounded_parameters_are_half_the_bytes(
    pull_dtype: torch.dtype, codec: Codec, cluster: LocalCluster, name: str
) -> None:
    batches = make_batches([8, 8])

    def received(dtype: torch.dtype | None, model: str) -> list[int]:
        def program(session: Cluster) -> int:
            module = make_module()
            optimizer = remote_optimizer(session, module, RECIPES["sgd"], model, compress=codec, pull_dtype=dtype)
            before = session.statistics().received_bytes
            step_on(module, optimizer, of_rank(batches, session.rank)[0])
            return session.statistics().received_bytes - before

        return cluster.train(2, program, transport="grpc")

    whole, half = received(None, f"{name}-whole"), received(pull_dtype, name)
    assert len({*whole, *(2 * each for each in half)}) == 1


# A codec of the user's own


@pytest.fixture
def own_codec(name: str) -> Iterator[Signs]:
    """A registered codec that counts what it encodes; forgotten afterwards."""
    register_codec(Signs)
    yield Signs(label=name)
    del CODECS[Signs.name]
    ENCODED.pop(name, None)


@pytest.mark.parametrize("whole_tensors", [False, True])
def test_a_codec_gets_whole_tensors_if_it_wants_them(
    whole_tensors: bool, own_codec: Signs, cluster: LocalCluster, name: str
) -> None:
    """The first weight of the module is larger than a bucket."""
    assert make_module()[0].weight.nbytes > BUCKET_BYTES
    codec = Signs(label=own_codec.label, whole_tensors=whole_tensors)
    train_compressed(cluster, name, trainers=1, compress=codec)
    assert {whole for _, whole in ENCODED[own_codec.label]} == {whole_tensors}


@pytest.mark.parametrize("way", WAYS)
def test_a_codec_that_was_registered_works_end_to_end(
    way: str, own_codec: Signs, cluster: LocalCluster, name: str
) -> None:
    expected = train_rounded(make_module(), RECIPES["adam"], make_batches([8, 8], steps=STEPS), gradients=torch.sign)
    for found in train_compressed(cluster, name, way=way, recipe="adam", compress=own_codec):
        assert_same_bits(found, expected)


# Retries


@pytest.mark.parametrize("kind", FaultKind)
def test_a_retry_sends_the_bytes_of_the_first_attempt(
    kind: FaultKind, route: Route, own_codec: Signs, cluster: LocalCluster, name: str
) -> None:
    size, steps = 4000, 3

    def program(session: Cluster) -> Any:
        weight = torch.nn.Parameter(torch.zeros(size))
        optimizer = pserver.optim.RemoteOptimizer(
            torch.optim.SGD, [weight], lr=1.0, name=name, cluster=session, compress=own_codec
        )
        cluster.faults.faults += [Fault(kind=kind, method=route.method, times=2)]
        generator = torch.Generator().manual_seed(1)
        expected = torch.zeros(size)
        for _ in range(steps):
            weight.grad = torch.randn(size, generator=generator)
            expected -= weight.grad.sign()
            optimizer.step()
        num_buckets = len(optimizer._model._replica.layout.buckets)
        return torch.equal(weight, expected), session.statistics().num_retries, num_buckets

    struck = cluster.faults.struck
    ((equal, num_retries, num_buckets),) = cluster.train(1, program, transport=route.transport)
    assert equal
    assert num_retries == cluster.faults.struck - struck == 2
    assert sorted(index for index, _ in ENCODED[name]) == sorted([*range(num_buckets)] * steps)


@pytest.mark.parametrize("codec", [*LOSSY, *FED_BACK], ids=str)
def test_lost_replies_change_no_bit(codec: Codec, cluster: LocalCluster, name: str) -> None:
    calm = train_compressed(cluster, f"{name}-calm", compress=codec, pull_dtype=torch.bfloat16)
    struck = cluster.faults.struck
    cluster.faults.faults += [Fault(kind=FaultKind.LOSE_REPLY, method="StepOnce", times=4)]
    disturbed = train_compressed(cluster, name, compress=codec, pull_dtype=torch.bfloat16)
    assert cluster.faults.struck - struck == 4
    for found, expected in zip(disturbed, calm, strict=True):
        assert_same_bits(found, expected)


def test_an_encoded_bucket_that_needs_several_messages_arrives_whole(cluster: LocalCluster, name: str) -> None:
    gradient = torch.randn(1_200_000, generator=torch.Generator().manual_seed(4)).bfloat16().float()

    def program(session: Cluster) -> bool:
        weight = torch.nn.Parameter(torch.zeros(len(gradient)))
        optimizer = pserver.optim.RemoteOptimizer(
            torch.optim.SGD,
            [weight],
            lr=1.0,
            name=name,
            cluster=session,
            bucket_bytes=4 << 20,
            compress=BFloat16(),
            pull_dtype=torch.bfloat16,
        )
        weight.grad = gradient.clone()
        optimizer.step()
        return torch.equal(weight, -gradient)

    assert cluster.train(1, program) == [True]
