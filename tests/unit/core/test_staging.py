from itertools import pairwise

import pytest
import torch
from core_builders import model_spec, tensor_spec
from hypothesis import given
from hypothesis import strategies as st

from pserver.core.staging import Staging
from pserver.errors import InvalidRequest
from pserver.wire.layout import BUFFERS, build_layout
from pserver.wire.tensors import element_type, to_bytes

FLOAT32 = element_type(torch.float32).code
FLOAT16 = element_type(torch.float16).code


@pytest.fixture
def buckets():
    """Of 64, 64 and 64 bytes: two of float32 and one of float16."""
    return build_layout([tensor_spec("w", 20), tensor_spec("h", 32, dtype=torch.float16)], 64).buckets


@pytest.fixture
def staging(buckets):
    return Staging(buckets)


@given(st.lists(st.integers(1, 63), max_size=5), st.randoms())
def test_buckets_arrive_in_chunks_of_any_size_and_interleaved(cuts, random):
    buckets = build_layout([tensor_spec("w", 20), tensor_spec("h", 32, dtype=torch.float16)], 64).buckets
    values = {each.index: torch.randn(each.num_elements, dtype=each.dtype) for each in buckets}
    borders = [0, *sorted(set(cuts)), 64]
    waiting = {
        each.index: [(start, to_bytes(values[each.index])[start:stop]) for start, stop in pairwise(borders)]
        for each in buckets
    }
    staging = Staging(buckets)
    while waiting:
        index = random.choice(list(waiting))
        offset, data = waiting[index].pop(0)
        staging.add_chunk(index, offset, element_type(buckets[index].dtype).code, data)
        if not waiting[index]:
            del waiting[index]
    staged = staging.complete()
    assert staged.keys() == values.keys()
    assert all(torch.equal(staged[index], values[index]) for index in values)


def test_an_fp16_buffer_that_is_read_as_fp32_is_refused(staging):
    with pytest.raises(InvalidRequest, match=r"bucket 2 comes as torch\.float16, but the chunk holds torch\.float32"):
        staging.add_chunk(2, 0, FLOAT32, bytes(64))
    with pytest.raises(InvalidRequest, match=r"bucket 0 comes as torch\.float32, but the chunk holds torch\.float16"):
        staging.add_chunk(0, 0, FLOAT16, bytes(64))


def test_a_code_that_the_protocol_does_not_have_is_refused(staging):
    with pytest.raises(InvalidRequest, match="code 0 is unknown"):
        staging.add_chunk(0, 0, 0, bytes(64))


@pytest.mark.parametrize(
    ("offset", "num_bytes"),
    [(8, 8), (20, 8), (-16, 8), (16, 0), (16, 49)],
    ids=["overlap", "gap", "negative", "empty", "beyond the end"],
)
def test_chunks_that_do_not_continue_their_bucket_are_refused(staging, offset, num_bytes):
    staging.add_chunk(0, 0, FLOAT32, bytes(16))
    with pytest.raises(InvalidRequest, match=f"from byte 16 on, got {num_bytes} bytes from byte {offset} on"):
        staging.add_chunk(0, offset, FLOAT32, bytes(num_bytes))


@pytest.mark.parametrize("received", [16, 64], ids=["part of it", "all of it"])
def test_a_chunk_from_the_first_byte_on_begins_its_bucket_anew(staging, received):
    staging.add_chunk(1, 0, FLOAT32, bytes(64))
    staging.add_chunk(2, 0, FLOAT16, bytes(64))
    staging.add_chunk(0, 0, FLOAT32, b"\1" * received)
    staging.add_chunk(0, 0, FLOAT32, b"\2" * 24)
    staging.add_chunk(0, 24, FLOAT32, b"\3" * 40)
    staged = staging.complete()
    assert to_bytes(staged[0]) == b"\2" * 24 + b"\3" * 40
    assert not staged[1].any()


@pytest.mark.parametrize("received", [16, 64], ids=["part of it", "all of it"])
def test_a_bucket_that_began_anew_must_come_whole_once_more(staging, received):
    staging.add_chunk(1, 0, FLOAT32, bytes(64))
    staging.add_chunk(2, 0, FLOAT16, bytes(64))
    staging.add_chunk(0, 0, FLOAT32, b"\1" * received)
    staging.add_chunk(0, 0, FLOAT32, b"\2" * 8)
    with pytest.raises(InvalidRequest, match="bucket 0 is incomplete: 8 of 64 bytes"):
        staging.complete()
    with pytest.raises(InvalidRequest, match="from byte 8 on, got 48 bytes from byte 16 on"):
        staging.add_chunk(0, 16, FLOAT32, b"\2" * 48)


@pytest.mark.parametrize(("num_bytes", "code"), [(0, FLOAT32), (65, FLOAT32), (64, FLOAT16)])
def test_a_refused_beginning_leaves_what_came_before_it(staging, num_bytes, code):
    for bucket in (0, 1):
        staging.add_chunk(bucket, 0, FLOAT32, b"\1" * 64)
    staging.add_chunk(2, 0, FLOAT16, bytes(64))
    with pytest.raises(InvalidRequest):
        staging.add_chunk(0, 0, code, b"\2" * num_bytes)
    assert to_bytes(staging.complete()[0]) == b"\1" * 64


def test_beginning_anew_takes_no_more_memory(staging):
    for _ in range(3):
        staging.add_chunk(0, 0, FLOAT32, b"\1" * 16)
        staging.add_chunk(0, 0, FLOAT32, b"\2" * 64)
    assert sum(tensor.nbytes for tensor in staging._tensors.values()) == 64


def test_a_bucket_that_comes_in_one_piece_stays_in_its_message(staging):
    message = b"head" + b"\1" * 64
    staging.add_chunk(0, 0, FLOAT32, memoryview(message)[4:])
    assert staging._tensors[0].data_ptr() == torch.frombuffer(message, dtype=torch.uint8).data_ptr() + 4


def test_a_large_message_is_not_kept_for_a_small_bucket(staging):
    message = b"\1" * 64 + bytes(64)
    staging.add_chunk(0, 0, FLOAT32, memoryview(message)[:64])
    assert staging._tensors[0].data_ptr() != torch.frombuffer(message, dtype=torch.uint8).data_ptr()
    assert to_bytes(staging._tensors[0]) == b"\1" * 64


def test_a_refused_chunk_leaves_what_came_before_it(staging, buckets):
    staging.add_chunk(0, 0, FLOAT32, b"\1" * 16)
    with pytest.raises(InvalidRequest):
        staging.add_chunk(0, 4, FLOAT32, b"\2" * 16)
    staging.add_chunk(0, 16, FLOAT32, b"\1" * 48)
    staging.add_chunk(1, 0, FLOAT32, bytes(64))
    staging.add_chunk(2, 0, FLOAT16, bytes(64))
    assert to_bytes(staging.complete()[0]) == b"\1" * 64


@pytest.mark.parametrize("bucket", [-1, 3, 1 << 31])
def test_a_bucket_of_somebody_else_is_refused(staging, bucket):
    with pytest.raises(InvalidRequest, match=f"bucket {bucket} is not expected here"):
        staging.add_chunk(bucket, 0, FLOAT32, bytes(64))


def test_a_stream_that_ends_early_is_refused_and_says_what_is_missing(staging):
    staging.add_chunk(0, 0, FLOAT32, bytes(64))
    staging.add_chunk(1, 0, FLOAT32, bytes(48))
    with pytest.raises(InvalidRequest, match="bucket 1 is incomplete: 48 of 64 bytes"):
        staging.complete()


def test_whether_anything_has_come_is_known(staging):
    assert staging.empty
    staging.add_chunk(0, 0, FLOAT32, bytes(4))
    assert not staging.empty


def test_a_stream_for_no_buckets_is_complete_at_once():
    assert Staging([]).complete() == {}


# Encoded buckets

UINT8 = element_type(torch.uint8).code
#: Codec, arguments, and the sizes that an encoded bucket of 32 x 32 float32 elements may have.
ENCODED = {
    "int8": ({"block": 256}, {1024 + 16}),
    "topk": ({"ratio": 0.125}, {1024}),
    "powersgd": ({"rank": 2}, {512, 4096}),
}


def encoded(codec, *, shape=(32, 32)):
    """A stream of one bucket that comes encoded, and of a buffer that never does."""
    spec = model_spec(
        tensors=(tensor_spec("w", *shape), tensor_spec("b", 16, group=BUFFERS)),
        bucket_bytes=4096,
        codec=codec,
        codec_arguments=ENCODED[codec][0] if codec in ENCODED else {},
    )
    layout = spec.layout()
    return Staging(layout.buckets, spec.coding(layout))


@pytest.mark.parametrize("codec", ENCODED)
def test_what_is_encoded_comes_in_the_codecs_sizes_and_is_decoded(codec):
    for size in ENCODED[codec][1]:
        staging = encoded(codec)
        data = bytearray(size)
        if codec == "topk":
            data[:512] = to_bytes(torch.arange(128, dtype=torch.int32))
        staging.add_chunk(0, 0, UINT8, bytes(data[:300]))
        staging.add_chunk(1, 0, FLOAT32, bytes(64))
        staging.add_chunk(0, 300, UINT8, bytes(data[300:]))
        staged = staging.complete()
        assert torch.equal(staged[0], torch.zeros(1024))
        assert torch.equal(staged[1], torch.zeros(16))


@pytest.mark.parametrize("codec", ENCODED)
@pytest.mark.parametrize("received", [100, None], ids=["part of it", "all of it"])
def test_an_encoded_bucket_begins_anew_and_may_have_another_of_its_sizes(codec, received):
    """A longer one of before leaves no bytes."""
    for first in ENCODED[codec][1]:
        for size in ENCODED[codec][1]:
            staging = encoded(codec)
            data = bytearray(size)
            if codec == "topk":
                data[:512] = to_bytes(torch.arange(128, dtype=torch.int32))
            staging.add_chunk(1, 0, FLOAT32, bytes(64))
            staging.add_chunk(0, 0, UINT8, b"\1" * (received or first))
            staging.add_chunk(0, 0, UINT8, bytes(data[:300]))
            with pytest.raises(InvalidRequest, match="bucket 0 is incomplete: 300 of"):
                staging.complete()
            staging.add_chunk(0, 300, UINT8, bytes(data[300:]))
            assert torch.equal(staging.complete()[0], torch.zeros(1024))


@pytest.mark.parametrize("codec", ENCODED)
@pytest.mark.parametrize("code", [FLOAT32, FLOAT16, element_type(torch.int8).code])
def test_an_encoded_bucket_comes_as_bytes_only(codec, code):
    with pytest.raises(InvalidRequest, match=r"bucket 0 comes as torch\.uint8, but the chunk holds"):
        encoded(codec).add_chunk(0, 0, code, bytes(8))


def test_a_buffer_never_comes_encoded():
    with pytest.raises(InvalidRequest, match=r"bucket 1 comes as torch\.float32, but the chunk holds torch\.uint8"):
        encoded("float16").add_chunk(1, 0, UINT8, bytes(32))


@pytest.mark.parametrize("codec", ENCODED)
@pytest.mark.parametrize("first", [0, 100])
def test_more_bytes_than_the_codec_gives_are_refused_and_take_no_memory(codec, first):
    staging, most = encoded(codec), max(ENCODED[codec][1])
    if first:
        staging.add_chunk(0, 0, UINT8, bytes(first))
    with pytest.raises(InvalidRequest, match=f"bucket 0 of at most {most} bytes: .*got {most + 1 - first} bytes"):
        staging.add_chunk(0, first, UINT8, bytes(most + 1 - first))
    assert staging.empty == (not first)
    assert sum(each.nbytes for each in staging._tensors.values()) == (most if first else 0)


@pytest.mark.parametrize("codec", ENCODED)
@pytest.mark.parametrize("missing", [1, 4, 500])
def test_fewer_bytes_than_the_codec_gives_are_refused(codec, missing):
    for size in ENCODED[codec][1]:
        staging = encoded(codec)
        staging.add_chunk(0, 0, UINT8, bytes(size - missing))
        staging.add_chunk(1, 0, FLOAT32, bytes(64))
        with pytest.raises(InvalidRequest, match=f"bucket 0 is incomplete: {size - missing} of .*{size}.* bytes came"):
            staging.complete()


def test_a_stream_without_the_encoded_bucket_is_refused():
    staging = encoded("topk")
    staging.add_chunk(1, 0, FLOAT32, bytes(64))
    with pytest.raises(InvalidRequest, match="bucket 0 is incomplete: 0 of 1024 bytes"):
        staging.complete()


@pytest.mark.parametrize("garbage", [b"\xff" * 1024, b"\0" * 1024, bytes(range(256)) * 4], ids=["ff", "00", "ramp"])
def test_garbage_that_the_codec_refuses_is_refused(garbage):
    staging = encoded("topk")
    staging.add_chunk(0, 0, UINT8, garbage)
    staging.add_chunk(1, 0, FLOAT32, bytes(64))
    with pytest.raises(InvalidRequest, match="bucket 0: expected 128 different ascending indices below 1024"):
        staging.complete()


@given(data=st.data())
@pytest.mark.parametrize("codec", ENCODED)
def test_any_bytes_are_decoded_to_the_buckets_size_or_refused(codec, data):
    staging = encoded(codec)
    size = data.draw(st.sampled_from(sorted(ENCODED[codec][1])))
    staging.add_chunk(0, 0, UINT8, data.draw(st.randoms(use_true_random=False)).randbytes(size))
    staging.add_chunk(1, 0, FLOAT32, bytes(64))
    try:
        staged = staging.complete()
    except InvalidRequest:
        return
    assert (staged[0].shape, staged[0].dtype) == ((1024,), torch.float32)


def test_what_a_codec_only_casts_comes_as_elements_and_stays_as_it_came():
    staging = encoded("float16")
    data = to_bytes(torch.arange(1024, dtype=torch.float16))
    staging.add_chunk(0, 0, FLOAT16, data[:300])
    staging.add_chunk(0, 300, FLOAT16, data[300:])
    staging.add_chunk(1, 0, FLOAT32, bytes(64))
    staged = staging.complete()
    assert torch.equal(staged[0], torch.arange(1024, dtype=torch.float16))
    assert staged[1].dtype == torch.float32
    for code in (UINT8, FLOAT32):
        with pytest.raises(InvalidRequest, match=r"bucket 0 comes as torch\.float16, but the chunk holds"):
            encoded("float16").add_chunk(0, 0, code, bytes(8))


def test_the_memory_of_an_encoded_bucket_follows_from_its_size_and_no_argument():
    """A trainer chooses the arguments; what a server takes for them is bounded by the model all the same."""
    for codec, arguments in (("powersgd", {"rank": 1 << 62}), ("int8", {"block": 1}), ("topk", {"ratio": 1.0})):
        spec = model_spec(
            tensors=(tensor_spec("w", 32, 32),), bucket_bytes=4096, codec=codec, codec_arguments=arguments
        )
        coding = spec.coding(spec.layout()).of_gradients(spec.layout().buckets[0])
        assert max(coding.sizes) == 4096
