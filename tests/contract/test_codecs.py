"""What every codec keeps, whatever it does to a gradient; each with the error that its docstring states."""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from random import Random

import pytest
import torch

from pserver.errors import InvalidRequest
from pserver.wire.compress import (
    CODECS,
    BFloat16,
    BucketShape,
    Codec,
    ErrorFeedback,
    Float16,
    GradBucket,
    Int8,
    NoCompression,
    PowerSGD,
    TensorSegment,
    TopK,
    codec_arguments,
    codec_for,
    make_codec,
)
from pserver.wire.layout import TensorSpec, build_layout
from pserver.wire.values import pack_value, unpack_value

LOSSY = (
    Float16(),
    BFloat16(),
    Int8(),
    Int8(block=7),
    TopK(ratio=0.01),
    TopK(ratio=0.3),
    TopK(ratio=1),
    PowerSGD(rank=2, start_iteration=0),
    PowerSGD(rank=1, start_iteration=1, warm_start=False, min_compression_rate=1, seed=3),
)
FED_BACK = (Float16(), BFloat16(), Int8(), TopK(ratio=0.3), PowerSGD(rank=2, start_iteration=0))
ALL: tuple[Codec, ...] = (NoCompression(), *LOSSY, *map(ErrorFeedback, FED_BACK))
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
#: Padded to 64 bytes each, so that there is padding for every dtype; no matrix of 1 x n is worth two factors.
SHAPES = ((40, 30), (7,), (), (8, 3, 9), (1, 9), (61, 1), (3,))
#: What rounding float64 to float32 on the way may add.
HAIR = 1 + 2**-12
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


every_codec = pytest.mark.parametrize("codec", ALL, ids=str)
every_float = pytest.mark.parametrize("dtype", FLOATS, ids=str)
every_device = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """On a busy machine threads wait for each other longer than these small buckets take."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def model_shape(dtype: torch.dtype) -> BucketShape:
    """One bucket with tensors of many shapes, as a layout has them."""
    specs = [TensorSpec(name=str(i), shape=shape, dtype=dtype, group=0) for i, shape in enumerate(SHAPES)]
    layout = build_layout(specs, 1 << 16, whole_tensors=True)
    (bucket,) = layout.buckets
    segments = zip(layout.segments[0], layout.shapes(0), strict=True)
    return BucketShape(
        index=3,
        dtype=dtype,
        num_elements=bucket.num_elements,
        segments=tuple(
            TensorSegment(tensor=each.tensor, start=each.start, stop=each.stop, shape=shape) for each, shape in segments
        ),
    )


def plain_shape(num_elements: int, dtype: torch.dtype, *, whole: bool = True) -> BucketShape:
    """One vector, whole or a piece."""
    segment = TensorSegment(tensor=0, start=0, stop=num_elements, shape=(num_elements,) if whole else None)
    return BucketShape(index=0, dtype=dtype, num_elements=num_elements, segments=(segment,) if num_elements else ())


def shapes_for(codec: Codec, dtype: torch.dtype) -> Iterator[BucketShape]:
    yield model_shape(dtype)
    for size in (0, 1, 2, 6, 7, 8, 255, 256, 257, 1000):
        yield plain_shape(size, dtype, whole=codec.whole_tensors)


def bucket_of(shape: BucketShape, values: torch.Tensor) -> GradBucket:
    """Values in segments, zeros in the padding."""
    buffer = torch.zeros(shape.num_elements, dtype=shape.dtype, device=values.device)
    for each in shape.segments:
        buffer[each.start : each.stop] = values[each.start : each.stop].to(shape.dtype)
    return GradBucket(index=shape.index, buffer=buffer, segments=shape.segments)


def normal(shape: BucketShape, seed: int = 0, scale: float = 1.0, device: str = "cpu") -> GradBucket:
    values = torch.randn(shape.num_elements, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return bucket_of(shape, values.to(device) * scale)


def skewed(shape: BucketShape, seed: int = 0) -> GradBucket:
    """A few elements are far larger than the others, and half are zero."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-20, 5, (shape.num_elements,), generator=generator)
    values = torch.randn(shape.num_elements, generator=generator, dtype=torch.float64) * 2.0**exponents
    return bucket_of(shape, values * torch.randint(0, 2, (shape.num_elements,), generator=generator))


def encoded(codec: Codec, bucket: GradBucket, num_steps: int = 2) -> torch.Tensor:
    """What goes out in the last of some steps with the same gradient."""
    state = codec.make_state()
    for _ in range(num_steps - 1):
        codec.encode(state, bucket).wait()
    return codec.encode(state, bucket).wait()


def some_bytes(random: Random, count: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(random.randbytes(count)) or bytearray(1), dtype=torch.uint8)[:count]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


# What the docstrings promise of one gradient that no feedback has changed.


def check_error(codec: Codec, sent: GradBucket, decoded: torch.Tensor) -> None:
    before, after = sent.buffer.double(), decoded.double()
    error = (before - after).abs()
    match codec:
        case NoCompression():
            assert torch.equal(before, after)
        case Float16() | BFloat16() if sent.buffer.dtype.itemsize == 2:
            assert torch.equal(before, after)
        case Float16():
            fits = before.abs() < 65520
            assert after[~fits].isinf().all()
            assert (error <= (before.abs() * 2**-11).clamp(min=2**-25) * HAIR)[fits].all()
        case BFloat16():
            fits = before.abs() < 3.39e38
            assert (error <= (before.abs() * 2**-8).clamp(min=2.0**-134) * HAIR)[fits].all()
        case Int8():
            check_blocks(codec.block, sent.buffer, before, after)
        case TopK():
            exact = torch.nonzero(error == 0).numel()
            assert exact >= math.ceil(codec.ratio * len(before)) or len(before) == 0
            smallest_sent = before.abs()[after != 0].min() if after.any() else 0
            assert (error <= smallest_sent).all()
        case PowerSGD():
            check_projections(sent, before, after)
        case _:
            raise AssertionError(f"no error is known of {codec}")


def check_blocks(block: int, buffer: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> None:
    for start in range(0, len(before), block):
        these, those = before[start : start + block], after[start : start + block]
        largest = these.abs().max()
        if largest > 4e40:
            assert not those.isfinite().any()
            continue
        rounding = those.abs().clamp(min=torch.finfo(buffer.dtype).smallest_normal) * torch.finfo(buffer.dtype).eps
        bound = (largest / 253).clamp(min=2.0**-127) + rounding
        assert ((these - those).abs() <= bound).all()


def check_projections(sent: GradBucket, before: torch.Tensor, after: torch.Tensor) -> None:
    for each in sent.segments:
        these, those = before[each.start : each.stop], after[each.start : each.stop]
        if len(each.shape) < 2:
            assert torch.equal(these, those)
            continue
        info = torch.finfo(sent.buffer.dtype)
        bound = these.norm() * (1 + 8 * info.eps) + 64 * info.smallest_normal * info.eps
        assert not those.isfinite().all() or (these - those).norm() <= bound


def test_every_codec_of_the_registry_is_tested():
    assert {type(each) for each in ALL} == set(CODECS.values())


@every_codec
def test_a_codec_is_made_again_from_what_travels(codec):
    name, arguments = unpack_value(pack_value([codec.name, codec_arguments(codec)]))
    made = make_codec(name, arguments)
    assert made == codec
    assert codec_arguments(made) == arguments
    assert made.whole_tensors == codec.whole_tensors


@every_device
@every_float
@every_codec
def test_what_is_encoded_has_a_promised_size_and_decodes_to_the_bucket(codec, dtype, device):
    for shape in shapes_for(codec, dtype):
        state = codec.make_state()
        for step in range(3):
            bucket = normal(shape, step, device=device)
            before = bucket.buffer.clone()
            data = codec.encode(state, bucket).wait()
            assert (data.dtype, data.dim(), data.is_contiguous()) == (torch.uint8, 1, True)
            assert data.numel() in codec.sizes(shape)
            assert data.numel() <= shape.num_bytes
            kept = data.clone()
            decoded = make_codec(codec.name, codec_arguments(codec)).decode(data, shape)
            assert (decoded.dtype, decoded.shape) == (dtype, (shape.num_elements,))
            assert decoded.device == data.device
            assert decoded.isfinite().all()
            decoded.fill_(7)
            assert torch.equal(data, kept)
            assert same_bits(bucket.buffer, before)


@every_float
@pytest.mark.parametrize("codec", [NoCompression(), *LOSSY], ids=str)
def test_the_error_is_within_what_the_codec_states(codec, dtype):
    info = torch.finfo(dtype)
    # As large as factors may be; beyond, see below.
    scales = [1.0, 1e-3, info.smallest_normal, info.smallest_normal / 16, min(info.max, 1e300) / 1e3]
    for shape in shapes_for(codec, dtype):
        buckets = [normal(shape, seed, scale) for seed, scale in enumerate(scales)]
        for bucket in [*buckets, skewed(shape), bucket_of(shape, torch.zeros(shape.num_elements))]:
            check_error(codec, bucket, codec.decode(encoded(codec, bucket), shape))


@every_float
@pytest.mark.parametrize("codec", [NoCompression(), *LOSSY], ids=str)
def test_the_largest_finite_values_stay_within_the_error_or_become_visible(codec, dtype):
    for shape in shapes_for(codec, dtype):
        signs = torch.ones(shape.num_elements, dtype=dtype)
        signs[::3] = -1
        bucket = bucket_of(shape, signs * torch.finfo(dtype).max)
        check_error(codec, bucket, codec.decode(encoded(codec, bucket), shape))


@every_device
@every_float
@every_codec
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_element_that_is_no_number_is_seen_in_its_tensor(codec, dtype, value, device):
    shape = model_shape(dtype)
    for segment in shape.segments:
        for place in {segment.start, segment.stop - 1}:
            bucket = normal(shape, device=device)
            bucket.buffer[place] = value
            state = codec.make_state()
            for _ in range(2):
                assert not codec.decode(codec.encode(state, bucket).wait(), shape)[place].isfinite()


@every_codec
def test_an_element_that_is_no_number_does_not_outlast_its_gradient(codec):
    shape = model_shape(torch.float32)
    for value in (math.nan, math.inf):
        state = codec.make_state()
        bucket = normal(shape)
        bucket.buffer[:: shape.num_elements // 3] = value
        for spoilt in (bucket, normal(shape), bucket):
            codec.encode(state, spoilt).wait()
        assert codec.decode(codec.encode(state, normal(shape)).wait(), shape).isfinite().all()


@every_float
@every_codec
def test_padding_stays_zero(codec, dtype):
    shape = model_shape(dtype)
    padding = torch.ones(shape.num_elements, dtype=torch.bool)
    for each in shape.segments:
        padding[each.start : each.stop] = False
    assert padding.any()
    for seed in range(3):
        assert not codec.decode(encoded(codec, normal(shape, seed), 3), shape)[padding].any()


@every_float
@every_codec
def test_the_same_gradients_give_the_same_bytes(codec, dtype):
    shape = model_shape(dtype)
    states = [codec.make_state() for _ in range(2)]
    for step in range(4):
        one, other = (codec.encode(state, normal(shape, step)).wait() for state in states)
        assert torch.equal(one, other)


@every_codec
def test_the_order_of_buckets_makes_no_difference(codec):
    shapes = [replace(model_shape(torch.float32), index=index) for index in range(3)]
    states = [codec.make_state() for _ in range(2)]
    for step in range(3):
        forth = {each.index: codec.encode(states[0], normal(each, step)).wait() for each in shapes}
        back = {each.index: codec.encode(states[1], normal(each, step)).wait() for each in reversed(shapes)}
        assert all(torch.equal(forth[index], back[index]) for index in forth)


@every_codec
def test_a_buffer_with_autograd_history_leaves_none(codec):
    shape = model_shape(torch.float32)
    bucket = normal(shape)
    tracked = replace(bucket, buffer=bucket.buffer.requires_grad_().mul(1.0))
    data = encoded(codec, tracked)
    assert not data.requires_grad
    assert not codec.decode(data, shape).requires_grad


@every_float
@every_codec
def test_where_the_bytes_lie_in_memory_makes_no_difference(codec, dtype):
    shape = model_shape(dtype)
    data = encoded(codec, normal(shape))
    expected = codec.decode(data, shape)
    for offset in (1, 2, 4, 8):
        around = torch.full((data.numel() + 16,), 0xAA, dtype=torch.uint8)
        inside = around[offset : offset + data.numel()]
        inside.copy_(data)
        shared = torch.frombuffer(bytearray(around.numpy()), dtype=torch.uint8, offset=offset, count=data.numel())
        assert same_bits(codec.decode(inside, shape), expected)
        assert same_bits(codec.decode(shared, shape), expected)
        assert (around[:offset] == 0xAA).all()
        assert (around[offset + data.numel() :] == 0xAA).all()


@every_float
@every_codec
def test_another_size_is_refused(codec, dtype):
    random = Random(0)
    for shape in shapes_for(codec, dtype):
        sizes = codec.sizes(shape)
        others = {
            0,
            1,
            4,
            5,
            shape.num_bytes + 1,
            2 * shape.num_bytes,
            *(size + n for size in sizes for n in (-1, 1, 4)),
        }
        for size in others - sizes - {-1}:
            with pytest.raises(InvalidRequest, match=f"bucket {shape.index}: .* but {size} came"):
                codec.decode(some_bytes(random, size), shape)


@every_codec
@pytest.mark.parametrize("spoil", [lambda x: x.view(torch.int8), lambda x: x[None], lambda x: torch.cat([x, x])[::2]])
def test_what_are_no_flat_bytes_is_refused(codec, spoil):
    shape = model_shape(torch.float32)
    with pytest.raises(InvalidRequest, match="expected bytes as a contiguous 1-D uint8 tensor"):
        codec.decode(spoil(encoded(codec, normal(shape))), shape)


@every_float
@every_codec
def test_random_and_mutated_bytes_are_refused_or_give_a_bucket(codec, dtype):
    random = Random(1)
    for shape in shapes_for(codec, dtype):
        valid = encoded(codec, normal(shape))
        candidates = [some_bytes(random, size) for size in codec.sizes(shape) for _ in range(5)]
        candidates += [torch.full((size,), byte, dtype=torch.uint8) for size in codec.sizes(shape) for byte in (0, 255)]
        for _ in range(10 if valid.numel() else 0):
            mutated = valid.clone()
            mutated[random.randrange(mutated.numel())] ^= 1 << random.randrange(8)
            candidates.append(mutated)
        for data in candidates:
            kept = data.clone()
            with suppress(InvalidRequest):
                decoded = codec.decode(data, shape)
                assert (decoded.dtype, decoded.shape) == (dtype, (shape.num_elements,))
            assert torch.equal(data, kept)


@every_codec
@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.uint8, torch.bool, torch.complex64], ids=str)
def test_only_floating_point_is_compressed(codec, dtype):
    chosen = codec_for(codec, dtype)
    shape = plain_shape(100, dtype)
    bucket = bucket_of(shape, torch.randn(100, dtype=torch.float32) * 9)
    data = chosen.encode(codec.make_state(), bucket).wait()
    assert chosen.sizes(shape) == {data.numel()} == {100 * dtype.itemsize}
    assert same_bits(chosen.decode(data, shape), bucket.buffer)


@every_codec
@every_float
def test_floating_point_goes_through_the_codec(codec, dtype):
    assert codec_for(codec, dtype) is codec


@pytest.mark.gpu
@every_codec
def test_encoding_never_waits_for_the_device(codec):
    buckets = [normal(model_shape(torch.float32), step, device="cuda") for step in range(4)]
    state = codec.make_state()
    codec.encode(state, buckets[0]).wait()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for bucket in buckets[1:]:
            codec.encode(state, bucket).wait()
    finally:
        torch.cuda.set_sync_debug_mode("default")
