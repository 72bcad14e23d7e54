"""Tensors of a model <-> flats, on the CPU; tests/gpu has the rest."""

from collections.abc import Sequence

import pytest
import torch

from pserver.client.flattening import FlatBuffers, model_device
from pserver.errors import InvalidRequest
from pserver.wire.layout import STORED, Layout, TensorSpec, build_layout

CPU = torch.device("cpu")


def layout_of(tensors: Sequence[torch.Tensor]) -> Layout:
    """Named t0, t1, ...; floating point and complex ones in group 0, the others stored."""
    specs = [
        TensorSpec(
            name=f"t{index}",
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            group=0 if tensor.is_floating_point() or tensor.is_complex() else STORED,
        )
        for index, tensor in enumerate(tensors)
    ]
    return build_layout(specs)


def buffers_for(tensors: Sequence[torch.Tensor]) -> FlatBuffers:
    return FlatBuffers(layout_of(tensors), CPU)


def numbered(*tensors: torch.Tensor | None) -> dict[int, torch.Tensor | None]:
    """Tensors by index, as the buffers take them."""
    return dict(enumerate(tensors))


def sent(buffers: FlatBuffers, tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """What would be sent, bucket by bucket."""
    return [bytes(buffers.bucket_bytes(bucket)) for bucket in layout_of(tensors).buckets]


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert torch.equal(found, expected)


WEIGHT = torch.arange(24.0).reshape(4, 6)
IMAGE = torch.arange(2.0 * 3 * 4 * 5).reshape(2, 3, 4, 5)


@pytest.mark.parametrize(
    "tensor",
    [
        WEIGHT,
        WEIGHT.t(),
        WEIGHT[1:3, ::2],
        WEIGHT[:, 3],
        torch.tensor(7.0),
        torch.tensor([2.5]).expand(3, 4),
        IMAGE.to(memory_format=torch.channels_last),
        IMAGE.unsqueeze(2).to(memory_format=torch.channels_last_3d),
        torch.randn(3, 5, dtype=torch.complex64).conj(),
        torch.randn(3, 5, dtype=torch.complex64).imag,
    ],
    ids=[
        "contiguous",
        "transposed",
        "sliced",
        "column",
        "no-dimension",
        "expanded",
        "channels-last",
        "channels-last-3d",
        "conjugate",
        "imaginary",
    ],
)
def test_values_survive_whatever_the_strides_are(tensor: torch.Tensor) -> None:
    others = [torch.randn(3), torch.randn(2, 2)]
    buffers = buffers_for([others[0], tensor, others[1]])
    assert buffers.gather(numbered(others[0], tensor, others[1])) == frozenset()
    back = [torch.zeros_like(each) for each in (others[0], tensor.contiguous(), others[1])]
    buffers.scatter_(numbered(*back))
    for found, expected in zip(back, (others[0], tensor, others[1]), strict=True):
        assert_same(found, expected)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_scatter_writes_in_place_and_keeps_strides(memory_format: torch.memory_format) -> None:
    buffers = buffers_for([IMAGE])
    buffers.gather(numbered(IMAGE))
    target = torch.nn.Parameter(torch.zeros_like(IMAGE).to(memory_format=memory_format))
    address, strides = target.data_ptr(), target.stride()
    buffers.scatter_(numbered(target))
    assert_same(target.detach(), IMAGE)
    assert (target.data_ptr(), target.stride()) == (address, strides)
    assert target.grad_fn is None


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex128, torch.int64, torch.uint8, torch.bool]
)
def test_every_dtype_survives_next_to_others(dtype: torch.dtype) -> None:
    tensors = [torch.randn(5), torch.tensor([[3, 0, 1], [0, 2, 1]]).to(dtype), torch.randn(7)]
    buffers = buffers_for(tensors)
    buffers.gather(numbered(*tensors))
    back = [torch.zeros_like(each) for each in tensors]
    buffers.scatter_(numbered(*back))
    for found, expected in zip(back, tensors, strict=True):
        assert_same(found, expected)


def test_bits_of_values_that_are_not_numbers_survive() -> None:
    bits = torch.tensor([0x7FC0_0001, 0x7F80_0000, 0x0000_0001, -0x8000_0000], dtype=torch.int32)
    tensor = bits.view(torch.float32)  # a NaN with a payload, infinity, the smallest number, minus zero
    buffers = buffers_for([tensor])
    buffers.gather(numbered(tensor))
    back = torch.zeros(4)
    buffers.scatter_(numbered(back))
    assert torch.equal(back.view(torch.int32), bits)


def test_tensors_without_elements_take_no_place() -> None:
    tensors = [torch.zeros(0, 3), torch.ones(2), torch.zeros(4, 0)]
    buffers = buffers_for(tensors)
    assert buffers.gather(numbered(*tensors)) == frozenset()
    back = torch.zeros(2)
    buffers.scatter_(numbered(torch.zeros(0, 3), back, torch.zeros(4, 0)))
    assert_same(back, torch.ones(2))


def test_absent_tensors_are_reported_and_sent_as_zeros() -> None:
    tensors = [torch.ones(3), torch.ones(2, 2), torch.ones(5)]
    buffers = buffers_for(tensors)
    buffers.gather(numbered(*tensors))
    assert buffers.gather(numbered(None, torch.full((2, 2), 2.0), None)) == {0, 2}
    back = [torch.full_like(each, -1.0) for each in tensors]
    buffers.scatter_(numbered(*back))
    for found, value in zip(back, (0.0, 2.0, 0.0), strict=True):
        assert_same(found, torch.full_like(found, value))


def test_all_tensors_may_be_absent() -> None:
    tensors = [torch.ones(3)]
    buffers = buffers_for(tensors)
    buffers.gather(numbered(*tensors))
    assert buffers.gather(numbered(None)) == {0}
    assert not any(b"".join(sent(buffers, tensors)))


def test_scatter_writes_only_the_tensors_it_is_given() -> None:
    tensors = [torch.ones(3), torch.ones(4)]
    buffers = buffers_for(tensors)
    buffers.gather(numbered(*tensors))
    back = torch.zeros(4)
    buffers.scatter_({1: back})
    assert_same(back, torch.ones(4))
    buffers.scatter_({})


def test_tensors_that_are_not_gathered_again_stay_as_they_were() -> None:
    tensors = [torch.ones(3), torch.ones(4)]
    buffers = buffers_for(tensors)
    buffers.gather(numbered(*tensors))
    assert buffers.gather({1: torch.full((4,), 2.0)}) == frozenset()
    back = [torch.zeros(3), torch.zeros(4)]
    buffers.scatter_(numbered(*back))
    assert_same(back[0], torch.ones(3))
    assert_same(back[1], torch.full((4,), 2.0))


def test_buffers_know_whether_a_tensor_still_has_the_values_they_hold() -> None:
    tensors = [torch.ones(3), torch.tensor([1.0, float("nan")])]
    buffers = buffers_for(tensors)
    buffers.gather(numbered(*tensors))
    assert buffers.holds(0, torch.ones(3))
    assert not buffers.holds(0, torch.tensor([1.0, 1.0, 1.0000001]))


def test_gathering_copies() -> None:
    tensor = torch.ones(3)
    buffers = buffers_for([tensor])
    buffers.gather(numbered(tensor))
    tensor.fill_(5.0)
    back = torch.zeros(3)
    buffers.scatter_(numbered(back))
    assert_same(back, torch.ones(3))


def test_buckets_are_the_memory_of_the_flats() -> None:
    tensors = [torch.randn(5000), torch.arange(700)]
    buffers = buffers_for(tensors)
    buffers.gather(numbered(*tensors))
    buckets = layout_of(tensors).buckets
    assert len(buckets) > 2
    messages = sent(buffers, tensors)
    assert [len(each) for each in messages] == [bucket.num_bytes for bucket in buckets]

    other = buffers_for(tensors)
    for bucket, data in zip(buckets, messages, strict=True):
        other.bucket_bytes(bucket)[:] = data
    back = [torch.zeros_like(each) for each in tensors]
    other.scatter_(numbered(*back))
    for found, expected in zip(back, tensors, strict=True):
        assert_same(found, expected)


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        (torch.ones(4), r"\[4\] torch.float32 on cpu"),
        (torch.ones(3, 1), r"\[3, 1\] torch.float32 on cpu"),
        (torch.ones(3, dtype=torch.float64), r"\[3\] torch.float64 on cpu"),
        (torch.ones(3, device="meta"), r"\[3\] torch.float32 on meta"),
    ],
    ids=["shape", "dimensions", "dtype", "device"],
)
def test_a_tensor_that_has_changed_is_refused_by_name(changed: torch.Tensor, found: str) -> None:
    tensors = [torch.ones(2), torch.ones(3)]
    buffers = buffers_for(tensors)
    buffers.gather(numbered(*tensors))
    before = sent(buffers, tensors)
    with pytest.raises(InvalidRequest, match=rf"'t1' was registered as \[3\] torch.float32 on cpu, .* {found}"):
        buffers.gather(numbered(torch.zeros(2), changed))
    assert sent(buffers, tensors) == before


def test_a_sparse_gradient_is_refused_by_name() -> None:
    embedding = torch.nn.Embedding(4, 3, sparse=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    buffers = buffers_for([embedding.weight])
    with pytest.raises(InvalidRequest, match=r"gradient of 't0' is torch.sparse_coo; .*sparse=False"):
        buffers.gather(numbered(embedding.weight.grad))


def test_an_index_that_the_layout_lacks_is_an_error() -> None:
    buffers = buffers_for([torch.ones(2)])
    with pytest.raises(IndexError):
        buffers.gather({1: torch.ones(2)})
    with pytest.raises(IndexError):
        buffers.scatter_({1: torch.ones(2)})


def test_host_buffers_of_a_cpu_model_are_free_at_once() -> None:
    buffers = buffers_for([torch.ones(2)])
    buffers.scatter_(numbered(torch.zeros(2)))
    buffers.wait_until_free()


def test_a_model_is_on_one_device_that_is_known() -> None:
    assert model_device([torch.ones(2), torch.ones(3)]) == CPU
    with pytest.raises(InvalidRequest, match=r"must be on one device, .*\['cpu', 'meta'\]"):
        model_device([torch.ones(2), torch.ones(3, device="meta")])
    with pytest.raises(InvalidRequest, match="CPU or CUDA device, but is on meta"):
        model_device([torch.ones(3, device="meta")])
