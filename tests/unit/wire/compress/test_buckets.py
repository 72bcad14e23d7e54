import pytest
import torch

from pserver.errors import InvalidRequest
from pserver.wire.compress import BucketShape, GradBucket, TensorSegment

PIECE = TensorSegment(tensor=0, start=2, stop=8, shape=(2, 3))


@pytest.mark.parametrize(
    ("start", "stop", "shape"), [(-1, 5, (6,)), (5, 4, None), (0, 6, (2, 2)), (0, 6, ()), (3, 4, (2,))]
)
def test_a_segment_holds_its_tensor(start, stop, shape):
    with pytest.raises(InvalidRequest, match=f"tensor 9: elements {start} to {stop} of a bucket cannot hold shape"):
        TensorSegment(tensor=9, start=start, stop=stop, shape=shape)


def test_segments_lie_in_their_bucket():
    with pytest.raises(InvalidRequest, match="bucket 1 has 7 elements, but its segments go to 8"):
        BucketShape(index=1, dtype=torch.float32, num_elements=7, segments=(PIECE,))
    with pytest.raises(InvalidRequest, match="bucket 1 has 7 elements, but its segments go to 8"):
        GradBucket(index=1, buffer=torch.zeros(7), segments=(PIECE,))


@pytest.mark.parametrize("buffer", [torch.zeros(2, 8), torch.zeros(32)[::2], torch.tensor(1.0)])
def test_a_buffer_is_flat(buffer):
    with pytest.raises(InvalidRequest, match="expected a contiguous 1-D buffer"):
        GradBucket(index=1, buffer=buffer, segments=())


def test_a_shape_is_the_bucket_without_values():
    shape = GradBucket(index=1, buffer=torch.zeros(10, dtype=torch.float16), segments=(PIECE,)).shape
    assert shape == BucketShape(index=1, dtype=torch.float16, num_elements=10, segments=(PIECE,))
    assert shape.num_bytes == 20
