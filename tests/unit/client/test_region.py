"""Tensors of a model <-> buckets in memory, on the CPU; tests/gpu has the rest."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from pserver.client.region import Region
from pserver.wire.layout import STORED, Layout, TensorSpec, build_layout
from pserver.wire.shared_buckets import BucketOffsets

CPU = torch.device("cpu")


def layout_of(tensors: Sequence[torch.Tensor], bucket_bytes: int = 0) -> Layout:
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
    return build_layout(specs, bucket_bytes)


def region_of(layout: Layout) -> Region:
    """Every bucket of a model, in memory of its own."""
    return Region(layout, BucketOffsets(layout.buckets), CPU)


def region_for(tensors: Sequence[torch.Tensor]) -> Region:
    return region_of(layout_of(tensors))


def numbered(*tensors: torch.Tensor | None) -> dict[int, torch.Tensor | None]:
    """Tensors by index, as regions take them."""
    return dict(enumerate(tensors))


def sent(region: Region, layout: Layout) -> list[bytes]:
    """What would be sent, bucket by bucket."""
    return [bytes(region.bucket_bytes(bucket)) for bucket in layout.buckets]


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert torch.equal(found, expected)


WEIGHT = torch.arange(24.0).reshape(4, 6)
IMAGE = torch.arange(2.0 * 3 * 4 * 5).reshape(2, 3, 4, 5)

STRIDES = {
    "contiguous": WEIGHT,
    "transposed": WEIGHT.t(),
    "sliced": WEIGHT[1:3, ::2],
    "column": WEIGHT[:, 3],
    "no-dimension": torch.tensor(7.0),
    "expanded": torch.tensor([2.5]).expand(3, 4),
    "channels-last": IMAGE.to(memory_format=torch.channels_last),
    "channels-last-3d": IMAGE.unsqueeze(2).to(memory_format=torch.channels_last_3d),
    "conjugate": torch.randn(3, 5, dtype=torch.complex64).conj(),
    "imaginary": torch.randn(3, 5, dtype=torch.complex64).imag,
}


@pytest.mark.parametrize("tensor", STRIDES.values(), ids=STRIDES)
def test_values_survive_whatever_the_strides_are(tensor: torch.Tensor) -> None:
    others = [torch.randn(3), torch.randn(2, 2)]
    region = region_for([others[0], tensor, others[1]])
    region.gather(numbered(others[0], tensor, others[1]))
    back = [torch.zeros_like(each) for each in (others[0], tensor.contiguous(), others[1])]
    region.scatter_(numbered(*back))
    for found, expected in zip(back, (others[0], tensor, others[1]), strict=True):
        assert_same(found, expected)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_scatter_writes_in_place_and_keeps_strides(memory_format: torch.memory_format) -> None:
    region = region_for([IMAGE])
    region.gather(numbered(IMAGE))
    target = torch.nn.Parameter(torch.zeros_like(IMAGE).to(memory_format=memory_format))
    address, strides = target.data_ptr(), target.stride()
    region.scatter_(numbered(target))
    assert_same(target.detach(), IMAGE)
    assert (target.data_ptr(), target.stride()) == (address, strides)
    assert target.grad_fn is None


EVERY_DTYPE = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
]


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
def test_every_dtype_survives_next_to_others(dtype: torch.dtype) -> None:
    tensors = [torch.randn(5), torch.tensor([[3, 0, 1], [0, 2, 1]]).to(dtype), torch.randn(7)]
    region = region_for(tensors)
    region.gather(numbered(*tensors))
    back = [torch.zeros_like(each) for each in tensors]
    region.scatter_(numbered(*back))
    for found, expected in zip(back, tensors, strict=True):
        assert_same(found, expected)


def test_bits_of_values_that_are_not_numbers_survive() -> None:
    bits = torch.tensor([0x7FC0_0001, 0x7F80_0000, 0x0000_0001, -0x8000_0000], dtype=torch.int32)
    tensor = bits.view(torch.float32)  # a NaN with a payload, infinity, the smallest number, minus zero
    region = region_for([tensor])
    region.gather(numbered(tensor))
    back = torch.zeros(4)
    region.scatter_(numbered(back))
    assert torch.equal(back.view(torch.int32), bits)


def test_tensors_without_elements_take_no_place() -> None:
    tensors = [torch.zeros(0, 3), torch.ones(2), torch.zeros(4, 0)]
    region = region_for(tensors)
    region.gather(numbered(*tensors))
    back = torch.zeros(2)
    region.scatter_(numbered(torch.zeros(0, 3), back, torch.zeros(4, 0)))
    assert_same(back, torch.ones(2))


def test_absent_tensors_are_sent_as_zeros() -> None:
    tensors = [torch.ones(3), torch.ones(2, 2), torch.ones(5)]
    region = region_for(tensors)
    region.gather(numbered(*tensors))
    region.gather(numbered(None, torch.full((2, 2), 2.0), None))
    back = [torch.full_like(each, -1.0) for each in tensors]
    region.scatter_(numbered(*back))
    for found, value in zip(back, (0.0, 2.0, 0.0), strict=True):
        assert_same(found, torch.full_like(found, value))


def test_all_tensors_may_be_absent() -> None:
    layout = layout_of([torch.ones(3)])
    region = region_of(layout)
    region.gather(numbered(torch.ones(3)))
    region.gather(numbered(None))
    assert not any(b"".join(sent(region, layout)))


def test_scatter_writes_only_the_tensors_it_is_given() -> None:
    tensors = [torch.ones(3), torch.ones(4)]
    region = region_for(tensors)
    region.gather(numbered(*tensors))
    back = torch.zeros(4)
    region.scatter_({1: back})
    assert_same(back, torch.ones(4))
    region.scatter_({})


def test_tensors_that_are_not_gathered_again_stay_as_they_were() -> None:
    tensors = [torch.ones(3), torch.ones(4)]
    region = region_for(tensors)
    region.gather(numbered(*tensors))
    region.gather({1: torch.full((4,), 2.0)})
    back = [torch.zeros(3), torch.zeros(4)]
    region.scatter_(numbered(*back))
    assert_same(back[0], torch.ones(3))
    assert_same(back[1], torch.full((4,), 2.0))


def test_a_region_knows_whether_a_tensor_still_has_the_values_it_holds() -> None:
    tensors = [torch.ones(3), torch.tensor([1.0, 2.0, 3.0])]
    region = region_for(tensors)
    region.gather(numbered(*tensors))
    assert region.holds(0, torch.ones(3))
    assert region.holds(1, torch.tensor([1.0, 2.0, 3.0]))
    assert not region.holds(1, torch.tensor([1.0, 2.0, 3.0000002]))


def test_buckets_of_a_smaller_dtype_hold_rounded_values() -> None:
    exact, rounded, after = torch.tensor([1.0, -2.0, 0.5]), torch.tensor([1.0 + 2**-20, 3.0]), torch.zeros(3)
    layout = layout_of([exact, rounded])
    halves = [replace(bucket, dtype=torch.bfloat16) for bucket in layout.buckets]
    region = Region(layout, BucketOffsets(halves), CPU)
    region.gather({0: exact, 1: rounded})
    assert [len(region.bucket_bytes(bucket)) for bucket in halves] == [2 * bucket.num_elements for bucket in halves]
    assert region.has_gathered(0, exact)
    assert region.holds(0, exact)
    assert region.has_gathered(1, rounded)
    assert not region.holds(1, rounded)
    assert not region.has_gathered(1, rounded * 2)
    region.scatter_({0: after, 1: rounded})
    assert_same(after, exact)
    assert_same(rounded, torch.tensor([1.0, 3.0]))
    assert region.holds(1, rounded)


def test_buckets_of_a_smaller_dtype_cut_no_tensor_that_the_others_do_not() -> None:
    """Half of 64 bytes, or of an odd multiple, is none: neighbours lie end to end all the same."""
    weight, after = torch.arange(96.0).reshape(8, 12), torch.zeros(12, 8).t()
    layout = layout_of([weight], bucket_bytes=64)
    assert len(layout.buckets) == 6
    region = Region(layout, BucketOffsets([replace(each, dtype=torch.bfloat16) for each in layout.buckets]), CPU)
    assert not region.cuts(0)
    region.gather({0: weight})
    region.scatter_({0: after})
    assert_same(after, weight)


def test_gathering_copies() -> None:
    tensor = torch.ones(3)
    region = region_for([tensor])
    region.gather(numbered(tensor))
    tensor.fill_(5.0)
    back = torch.zeros(3)
    region.scatter_(numbered(back))
    assert_same(back, torch.ones(3))


def test_buckets_are_the_memory_that_tensors_are_gathered_into() -> None:
    tensors = [torch.randn(5000), torch.arange(700)]
    layout = layout_of(tensors)
    region = region_of(layout)
    region.gather(numbered(*tensors))
    assert len(layout.buckets) > 2
    messages = sent(region, layout)
    assert [len(each) for each in messages] == [bucket.num_bytes for bucket in layout.buckets]

    other = region_of(layout)
    for bucket, data in zip(layout.buckets, messages, strict=True):
        other.bucket_bytes(bucket)[:] = data
    back = [torch.zeros_like(each) for each in tensors]
    other.scatter_(numbered(*back))
    for found, expected in zip(back, tensors, strict=True):
        assert_same(found, expected)


def test_a_region_uses_the_memory_it_is_given_and_nothing_beyond_its_buckets() -> None:
    layout = layout_of([torch.ones(40)], bucket_bytes=64)
    offsets = BucketOffsets(layout.buckets)
    memory = bytearray(b"\xaa" * (offsets.num_bytes + 64))
    Region(layout, offsets, CPU, memoryview(memory)).gather(numbered(torch.ones(40)))
    assert memory[offsets.first_byte :][: 40 * 4] == bytes(torch.ones(40).numpy())
    assert set(memory[: offsets.first_byte]) | set(memory[offsets.first_byte + 160 :]) == {0xAA}


def test_host_memory_of_a_cpu_model_is_free_at_once() -> None:
    region = region_for([torch.ones(2)])
    region.scatter_(numbered(torch.zeros(2)))
    region.wait_until_free()


# Several servers: a region has a part of the model


def regions_of(layout: Layout, *runs: Sequence[range]) -> list[Region]:
    """A region for each server, which owns the buckets in these runs."""
    return [Region(layout, BucketOffsets(layout.part(each)), CPU) for each in runs]


#: Cut into buckets of 64 bytes: 3, 1, 3 and 3 of them.
CUT = (torch.randn(3, 11), torch.randn(7), torch.randn(2, 23).t(), torch.arange(20, dtype=torch.float64))


def cut_layout() -> Layout:
    layout = layout_of(CUT, bucket_bytes=64)
    assert [bucket.flat for bucket in layout.buckets] == [0] * 7 + [1] * 3
    return layout


@pytest.mark.parametrize(
    "runs",
    [
        [[range(1)], [range(1, 10)]],
        [[range(5)], [range(5, 10)]],
        [[range(2), range(4, 8)], [range(2, 4), range(8, 10)]],
        [[range(number, number + 1)] for number in range(10)],
        [[range(0, 10, 1)], []],
    ],
    ids=["after the first", "in the middle", "alternately", "one each", "one has nothing"],
)
def test_tensors_that_several_regions_share_are_put_together_again(runs: list[list[range]]) -> None:
    regions = regions_of(cut_layout(), *runs)
    back = [torch.full(each.shape, -1.0, dtype=each.dtype) for each in CUT]
    for region in regions:
        region.gather(numbered(*CUT))
    for region in regions:
        region.scatter_(numbered(*back))
    for found, expected in zip(back, CUT, strict=True):
        assert_same(found, expected)


def test_a_region_says_which_tensors_it_cuts() -> None:
    first, second = regions_of(cut_layout(), [range(5)], [range(5, 10)])
    assert [first.cuts(index) for index in range(4)] == [False, False, True, False]
    assert [second.cuts(index) for index in range(4)] == [False, False, True, False]


def test_a_tensor_that_ends_where_a_region_begins_is_not_cut_by_it() -> None:
    layout = layout_of([torch.ones(16), torch.ones(16)], bucket_bytes=64)
    for region in regions_of(layout, [range(1)], [range(1, 2)]):
        assert not region.cuts(0)
        assert not region.cuts(1)


def test_a_region_writes_and_compares_its_own_part_of_a_tensor_only() -> None:
    first, _ = regions_of(cut_layout(), [range(5)], [range(5, 10)])
    first.gather(numbered(*CUT))
    back = torch.zeros(23, 2)
    first.scatter_({2: back, 3: torch.zeros(20, dtype=torch.float64)})
    inside = 5 * 16 - 48 - 16  # elements of tensor 2 in five buckets, behind the three and the one of the others
    assert torch.equal(back.view(-1)[:inside], CUT[2].reshape(-1)[:inside])
    assert not back.view(-1)[inside:].any()
    assert first.holds(2, back)
    assert not first.holds(2, torch.zeros(23, 2))
    assert first.holds(3, torch.zeros(20, dtype=torch.float64)), "nothing of it lies here"


def test_a_part_of_a_tensor_that_is_absent_is_zeros_and_others_stay() -> None:
    layout = cut_layout()
    first, _ = regions_of(layout, [range(5)], [range(5, 10)])
    first.gather(numbered(*CUT))
    first.gather({2: None})
    back = [torch.ones(each.shape, dtype=each.dtype) for each in CUT]
    first.scatter_(numbered(*back[:3]))
    assert torch.equal(back[0], CUT[0])
    assert back[2].view(-1).unique(return_counts=True)[1].tolist() == [16, 30]
