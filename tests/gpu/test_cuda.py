"""Training a model that is on a CUDA device; the servers, in this process, step on the CPU."""

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

from pserver.client.cluster import Cluster
from pserver.client.region import Region
from pserver.errors import InvalidRequest
from pserver.optim import RemoteOptimizer
from pserver.testing.local_cluster import LocalCluster
from pserver.wire.layout import TensorSpec, build_layout
from pserver.wire.shared_buckets import BucketOffsets, tensor_over
from pserver.wire.shm import Segment

MakeRegion = Callable[[int], tuple[Region, list[memoryview]]]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

DEVICE = torch.device("cuda", 0)
#: Products of 4096 x 4096 matrices, 137 GFLOP each: the device is busy for half a second at least.
NUM_PRODUCTS = 300


@pytest.fixture
def local() -> Iterator[LocalCluster]:
    """Two servers, so that a model is cut."""
    with LocalCluster(2) as local:
        yield local


@pytest.fixture
def cluster(local: LocalCluster) -> Iterator[Cluster]:
    with local.connect() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def matrix() -> torch.Tensor:
    """Its powers stay as they are; warmed up, so that a product does not wait for a library to load."""
    matrix = torch.eye(4096, device=DEVICE)
    torch.mm(matrix, matrix)
    torch.cuda.synchronize(DEVICE)
    return matrix


def keep_busy(matrix: torch.Tensor) -> torch.cuda.Event:
    """Queues work on the current stream; the event says when it is done."""
    product = matrix
    for _ in range(NUM_PRODUCTS):
        product = product @ matrix
    done = torch.cuda.Event()
    done.record()
    return done


def make_model(seed: int = 0) -> torch.nn.Sequential:
    """Convolution weights are channels-last, so their gradients are not contiguous; one layer has buffers."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, kernel_size=3),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(8 * 6 * 6, 5),
    )
    return model.to(DEVICE, memory_format=torch.channels_last)


def batch(step: int, rank: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(16, 3, 8, 8, generator=generator), torch.randn(16, 5, generator=generator)


def backward(model: torch.nn.Module, step: int, rank: int = 0) -> None:
    inputs, targets = (each.to(DEVICE) for each in batch(step, rank))
    mse_loss(model(inputs), targets).backward()


def on_cpu(tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """Contiguous copies, as a trainer sends them."""
    return [each.detach().cpu().contiguous().clone() for each in tensors if each is not None]


class Reference:
    """Torch's own fused optimizer on the CPU, fed with gradients of the device."""

    def __init__(self, optimizer: type[torch.optim.Optimizer], values: Sequence[torch.Tensor], **options: Any) -> None:
        self.values = [torch.nn.Parameter(each) for each in on_cpu(values)]
        self._optimizer = optimizer(self.values, fused=True, **options)

    def step(self, gradients: Sequence[torch.Tensor]) -> None:
        for value, gradient in zip(self.values, gradients, strict=True):
            value.grad = gradient
        self._optimizer.step()


def assert_same_bits(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(ours.detach().cpu(), theirs.detach().cpu()), f"parameter {number} differs"


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.Adam, {"lr": 0.01}),
        (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    ],
    ids=["sgd", "adam", "adamw"],
)
def test_same_bits_as_torch_on_the_cpu_with_the_same_gradients(
    cluster: Cluster, optimizer: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    model = make_model()
    parameters = list(model.parameters())
    remote = RemoteOptimizer(optimizer, model, cluster=cluster, **options)
    reference = Reference(optimizer, parameters, **options)
    for step in range(10):
        remote.zero_grad()
        backward(model, step)
        gradients = on_cpu([each.grad for each in parameters])
        remote.step()
        reference.step(gradients)
        assert_same_bits(parameters, reference.values)
    assert all(each.device == DEVICE for each in parameters)


def test_half_precision_parameters_follow_their_masters(cluster: Cluster) -> None:
    model = torch.nn.Linear(64, 32).to(DEVICE, torch.bfloat16)
    parameters = list(model.parameters())
    remote = RemoteOptimizer(torch.optim.SGD, model, lr=0.1, cluster=cluster)
    masters = Reference(torch.optim.SGD, [each.float() for each in parameters], lr=0.1)
    for step in range(5):
        remote.zero_grad()
        torch.manual_seed(step)
        model(torch.randn(8, 64).to(DEVICE, torch.bfloat16)).square().mean().backward()
        gradients = [each.float() for each in on_cpu([each.grad for each in parameters])]
        remote.step()
        masters.step(gradients)
        assert_same_bits(parameters, [each.to(torch.bfloat16) for each in masters.values])


def test_gradients_that_are_still_being_computed_are_waited_for(cluster: Cluster, matrix: torch.Tensor) -> None:
    parameter = torch.nn.Parameter(torch.zeros(5000, device=DEVICE))
    remote = RemoteOptimizer(torch.optim.SGD, [parameter], lr=0.5, cluster=cluster)
    for step in range(1, 4):
        parameter.grad = torch.zeros_like(parameter)
        torch.cuda.current_stream(DEVICE).synchronize()
        busy = keep_busy(matrix)
        parameter.grad.fill_(float(step))
        assert not busy.query(), "the device was not busy; NUM_PRODUCTS is too small for it"
        remote.step()
        assert torch.equal(parameter.detach().cpu(), torch.full((5000,), -0.5 * sum(range(1, step + 1))))


def test_new_values_are_there_for_whatever_is_queued_after_the_step(cluster: Cluster, matrix: torch.Tensor) -> None:
    """Other work keeps the device busy all the while, and everything of ours is on a stream that is not the default."""
    parameter = torch.nn.Parameter(torch.zeros(5000, device=DEVICE))
    remote = RemoteOptimizer(torch.optim.SGD, [parameter], lr=1.0, cluster=cluster)
    parameter.grad = torch.ones_like(parameter)
    torch.cuda.current_stream(DEVICE).synchronize()
    elsewhere, ours = torch.cuda.Stream(DEVICE), torch.cuda.Stream(DEVICE)
    seen = []
    with torch.cuda.stream(elsewhere):
        busy = keep_busy(matrix)
    with torch.cuda.stream(ours):
        for _ in range(3):
            remote.step()
            seen.append(parameter.detach().clone())
    assert not busy.query(), "the device was not busy; NUM_PRODUCTS is too small for it"
    ours.synchronize()
    for step, values in enumerate(seen, start=1):
        assert torch.equal(values.cpu(), torch.full((5000,), -float(step)))


@pytest.fixture(params=["own", "shared"])
def make_region(request: pytest.FixtureRequest) -> Iterator[MakeRegion]:
    """Makes regions for one float32 tensor, in memory of their own or in segments, and gives their host memory too."""
    segments: list[Segment] = []

    def make(num_elements: int) -> tuple[Region, list[memoryview]]:
        layout = build_layout([TensorSpec(name="t", shape=(num_elements,), dtype=torch.float32, group=0)])
        offsets = BucketOffsets(layout.buckets)
        memory = None
        if request.param == "shared":
            segments.append(Segment(offsets.num_bytes))
            memory = segments[-1].memory
        region = Region(layout, offsets, DEVICE, memory)
        return region, [region.bucket_bytes(bucket) for bucket in layout.buckets]

    yield make
    for segment in segments:
        segment.close()


def test_host_memory_is_free_only_once_the_device_has_read_it(make_region: MakeRegion, matrix: torch.Tensor) -> None:
    region, memory = make_region(5000)
    region.gather({0: torch.ones(5000, device=DEVICE)})
    target = torch.zeros(5000, device=DEVICE)
    busy = keep_busy(matrix)
    region.scatter_({0: target})
    assert not busy.query(), "scatter_ has waited for the device"
    region.wait_until_free()
    for part in memory:
        part[:] = bytes(len(part))
    assert torch.equal(target.cpu(), torch.ones(5000))


def test_gradients_that_are_being_computed_are_waited_for(make_region: MakeRegion, matrix: torch.Tensor) -> None:
    region, memory = make_region(5000)
    product = matrix
    for _ in range(NUM_PRODUCTS):
        product = product @ matrix
    region.gather({0: product.reshape(-1)[:5000].contiguous()})
    assert b"".join(memory)[: 4 * 5000] == bytes(memoryview(torch.eye(4096).reshape(-1)[:5000].numpy()))


def test_host_memory_is_page_locked(make_region: MakeRegion) -> None:
    _, memory = make_region(5000)
    for part in memory:
        assert tensor_over(part, torch.float32).is_pinned()


def test_copies_are_about_as_fast_as_those_of_plain_pinned_memory(
    make_region: MakeRegion, capsys: pytest.CaptureFixture[str]
) -> None:
    """Time decides nothing here; the figures are for whoever reads them."""
    num_elements = 64 << 20
    region, _ = make_region(num_elements)
    tensor = torch.ones(num_elements, device=DEVICE)
    pinned = torch.empty(num_elements, pin_memory=True)

    def seconds(copy: Callable[[], object]) -> float:
        times = []
        for _ in range(7):
            torch.cuda.synchronize(DEVICE)
            started = time.perf_counter()
            copy()
            torch.cuda.synchronize(DEVICE)
            times.append(time.perf_counter() - started)
        return statistics.median(times)

    to_host = seconds(lambda: pinned.copy_(tensor, non_blocking=True)), seconds(lambda: region.gather({0: tensor}))
    target = torch.zeros_like(tensor)
    to_device = seconds(lambda: target.copy_(pinned, non_blocking=True)), seconds(lambda: region.scatter_({0: target}))
    with capsys.disabled():
        for way, (plain, ours) in (("to the host", to_host), ("to the device", to_device)):
            print(f"\n{num_elements * 4 / 1e9 / ours:.1f} GB/s {way}, {plain / ours:.2f} of a plain pinned copy")
    assert torch.equal(target, tensor)


@pytest.mark.parametrize("transport", ["grpc", "shm"])
def test_overlapping_steps_have_the_bits_of_plain_ones(local: LocalCluster, transport: str) -> None:
    found = []
    for overlap in (False, True):
        with local.connect(transport=transport) as session:
            model = make_model()
            remote = RemoteOptimizer(
                *(torch.optim.SGD, model),
                lr=0.1,
                momentum=0.9,
                early_push=overlap,
                late_pull=overlap,
                name=f"{transport}-{overlap}",
                cluster=session,
            )
            for step in range(4):
                remote.zero_grad()
                backward(model, step)
                remote.step()
            remote.wait()
            found.append(on_cpu(list(model.parameters())))
    assert_same_bits(found[1], found[0])


def test_a_step_synchronises_neither_the_device_nor_a_stream(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for events of its own. The sync debug mode finds the copies that wait in secret."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a step has synchronised the whole device")

    model = make_model()
    remote = RemoteOptimizer(torch.optim.SGD, model, lr=0.1, cluster=cluster)
    backward(model, 0)
    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            remote.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_two_trainers_agree_and_step_with_the_mean_of_their_gradients(local: LocalCluster) -> None:
    num_steps = 5
    models = [make_model(seed=rank) for rank in range(2)]  # not in the threads, which share torch's random numbers
    initial = on_cpu(list(models[0].parameters()))
    first_made = threading.Event()

    def train(cluster: Cluster) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
        """The gradients of every step, and the parameters after the last one."""
        model = models[cluster.rank]
        if cluster.rank == 1:
            assert first_made.wait(20.0)
        remote = RemoteOptimizer(torch.optim.SGD, model, lr=0.1, momentum=0.9, cluster=cluster)
        first_made.set()
        gradients = []
        for step in range(num_steps):
            remote.zero_grad()
            backward(model, step, cluster.rank)
            gradients.append(on_cpu([each.grad for each in model.parameters()]))
            remote.step()
        return gradients, on_cpu(list(model.parameters()))

    (gradients_0, values_0), (gradients_1, values_1) = local.train(2, train)
    assert_same_bits(values_0, values_1)
    reference = Reference(torch.optim.SGD, initial, lr=0.1, momentum=0.9)
    for ours, theirs in zip(gradients_0, gradients_1, strict=True):
        reference.step([(a + b) / 2 for a, b in zip(ours, theirs, strict=True)])
    assert_same_bits(values_0, reference.values)


def test_a_model_on_several_devices_is_refused_by_their_names(cluster: Cluster) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4).to(DEVICE), torch.nn.Linear(4, 1))
    with pytest.raises(InvalidRequest, match=r"must be on one device, .*'cpu', 'cuda:0'"):
        RemoteOptimizer(torch.optim.SGD, model, lr=0.1, cluster=cluster)


def test_a_model_that_has_moved_is_refused_by_the_name_of_its_parameter(cluster: Cluster) -> None:
    model = torch.nn.Linear(4, 1).to(DEVICE)
    remote = RemoteOptimizer(torch.optim.SGD, model, lr=0.1, cluster=cluster)
    model.cpu()
    model(torch.ones(4)).sum().backward()
    with pytest.raises(InvalidRequest, match=r"'weight' was registered as .* on cuda:0, but is now .* on cpu"):
        remote.step()
