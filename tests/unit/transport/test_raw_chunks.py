"""Messages with chunks have the bytes that protobuf gives and takes."""

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from pserver.transport.gen import shards_pb2 as pb
from pserver.transport.gen.types_pb2 import Chunk
from pserver.transport.raw_chunks import Lent, RawChunk, Received, beginning, chunks_field, decode, encode, pieces

TYPES = (pb.InitialiseRequest, pb.StepRequest, pb.PullReply, pb.StepReply)

raw_chunks = st.builds(
    RawChunk,
    st.integers(0, (1 << 31) - 1),
    st.integers(0, (1 << 63) - 1),
    st.integers(0, 12),
    st.binary(max_size=300),
)
heads = st.one_of(
    st.builds(pb.StepRequest, context_id=st.integers(-(1 << 63), (1 << 63) - 1), wait_s=st.floats(0, 9)),
    st.builds(pb.StepReply, round=st.integers(-5, 5), outcome=st.builds(pb.Outcome, reason=st.text(max_size=9))),
    st.builds(pb.PullReply, round=st.integers(0, 1 << 40)),
    st.builds(pb.InitialiseRequest, shard=st.builds(pb.ShardAddress, model=st.text(max_size=5))),
)


def whole(message: Received):
    chunks = [
        Chunk(bucket=c.bucket, offset_bytes=c.offset_bytes, dtype=c.dtype, data=bytes(c.data)) for c in message.chunks
    ]
    found = type(message.head)()
    found.CopyFrom(message.head)
    found.chunks.extend(chunks)
    return found


@given(heads, st.lists(raw_chunks, max_size=4))
def test_protobuf_reads_what_was_encoded(head, chunks):
    read = type(head).FromString(encode(head, chunks))
    assert [(each.bucket, each.offset_bytes, each.dtype, each.data) for each in read.chunks] == chunks
    del read.chunks[:]
    assert read == head


@given(heads, st.lists(raw_chunks, max_size=4))
def test_what_protobuf_encoded_is_decoded(head, chunks):
    head.chunks.extend(Chunk(**each._asdict()) for each in chunks)
    received = decode(type(head), head.SerializeToString())
    assert [each._replace(data=bytes(each.data)) for each in received.chunks] == chunks
    assert whole(received) == head


@given(heads, st.lists(raw_chunks, min_size=1, max_size=3), st.data())
def test_mutated_bytes_mean_what_protobuf_makes_of_them_or_are_refused(head, chunks, data):
    encoded = bytearray(encode(head, chunks))
    for _ in range(data.draw(st.integers(1, 3))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    encoded = encoded[: data.draw(st.integers(0, len(encoded)))]
    try:
        received = decode(type(head), bytes(encoded))
    except DecodeError:
        return
    try:
        expected = type(head).FromString(bytes(encoded))
    except DecodeError:
        pytest.fail("protobuf refuses what was taken")
    found = [(c.bucket, c.offset_bytes, c.data) for c in expected.chunks]
    assert [(c.bucket, c.offset_bytes, bytes(c.data)) for c in received.chunks] == found


def test_chunks_are_memory_of_the_message_and_not_copies():
    data = encode(pb.PullReply(round=3), [RawChunk(1, 0, 1, b"abcd")])
    (chunk,) = decode(pb.PullReply, data).chunks
    assert chunk.data.obj is data


def test_messages_put_end_to_end_are_one():
    parts = [encode(pb.StepReply(round=3), [RawChunk(number, 0, 1, b"ab")]) for number in (1, 2)]
    received = decode(pb.StepReply, b"".join(parts))
    assert ([each.bucket for each in received.chunks], received.round) == ([1, 2], 3)


@pytest.mark.parametrize("message_type", TYPES)
def test_every_type_that_carries_tensors_is_known(message_type):
    assert chunks_field(message_type)
    assert isinstance(decode(message_type, b""), Received)


def test_a_message_without_chunks_is_plain():
    assert decode(pb.PullRequest, pb.PullRequest(min_round=4).SerializeToString()) == pb.PullRequest(min_round=4)


@given(heads, raw_chunks.filter(lambda chunk: len(chunk.data) > 0), st.integers(0, 400))
def test_the_beginning_of_a_message_says_where_the_data_of_its_chunk_begins(head, chunk, cut):
    message = encode(head, [chunk])
    found = beginning(type(head), memoryview(message)[:cut], len(message))
    assert (found is not None) == (cut >= len(message) - len(chunk.data))
    if found is not None:
        assert message[found.start :] == chunk.data
        assert whole(found.with_data(memoryview(chunk.data))) == whole(decode(type(head), message))


@given(heads, st.lists(raw_chunks.filter(lambda chunk: len(chunk.data) > 0), min_size=2, max_size=3))
def test_a_message_of_several_chunks_has_no_such_beginning(head, chunks):
    message = encode(head, chunks)
    assert beginning(type(head), memoryview(message), len(message)) is None


@given(heads, raw_chunks, st.data())
def test_a_spoilt_beginning_is_none_or_one_of_the_message(head, chunk, data):
    message = bytearray(encode(head, [chunk]))
    for _ in range(data.draw(st.integers(1, 3))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    found = beginning(type(head), memoryview(message), len(message))
    if found is not None:
        decoded = decode(type(head), bytes(message))
        assert whole(found.with_data(memoryview(message)[found.start :])) == whole(decoded)


def test_memory_that_is_lent_is_sent_as_it_was_when_it_is_taken_back():
    memory = bytearray(b"before")
    message = pieces(pb.PullReply(round=3), [RawChunk(1, 0, 1, memoryview(memory)), RawChunk(2, 0, 1, b"own")], Lent)
    lent = [each for each in message if isinstance(each, Lent)]
    assert len(lent) == 1
    assert lent[0].memory.obj is memory
    lent[0].take_back()
    memory[:] = b"after!"
    assert [bytes(each.data) for each in decode(pb.PullReply, message.join()).chunks] == [b"before", b"own"]
