import io
import itertools
import math

import pytest
import torch
from codec_buckets import bucket, received, sent

from pserver.errors import InvalidRequest
from pserver.wire.compress import BucketShape, GradBucket, PowerSGD, TensorSegment

AT_ONCE = PowerSGD(rank=2, start_iteration=0)


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def low_rank(rows, columns, rank, dtype=torch.float32):
    return (random(rows, rank, dtype=torch.float64) @ random(rank, columns, seed=1, dtype=torch.float64)).to(dtype)


def decayed(rows=60, columns=40):
    """A matrix whose singular values fall by a half each."""
    left = torch.linalg.qr(random(rows, columns)).Q
    right = torch.linalg.qr(random(columns, columns, seed=1)).Q
    return left * 0.5 ** torch.arange(columns) @ right


def best_error(matrix, rank):
    return float(torch.linalg.svdvals(matrix)[rank:].norm())


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-13), (torch.bfloat16, 0.05)]
)
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_matrix_of_that_rank_arrives_whole_in_one_step(dtype, tolerance, rank):
    matrix = low_rank(50, 30, rank, dtype)
    decoded = received(PowerSGD(rank=rank, start_iteration=0), bucket(matrix)).view(50, 30)
    assert float((decoded - matrix).double().norm()) <= tolerance * float(matrix.double().norm())


def test_more_dimensions_are_columns():
    tensor = low_rank(20, 90, 2)
    decoded = received(AT_ONCE, bucket(tensor.view(20, 3, 6, 5)))
    torch.testing.assert_close(decoded, tensor.reshape(-1), rtol=1e-4, atol=1e-4)


def test_with_a_warm_start_the_product_approaches_the_best_of_its_rank():
    matrix = decayed()
    state = AT_ONCE.make_state()
    errors = [float((received(AT_ONCE, bucket(matrix), state).view(60, 40) - matrix).norm()) for _ in range(12)]
    assert errors[0] > 1.05 * best_error(matrix, 2)
    assert errors[-1] <= 1.001 * best_error(matrix, 2)
    assert all(after <= before * 1.0001 for before, after in itertools.pairwise(errors))


def test_without_a_warm_start_every_step_begins_with_other_numbers():
    cold = PowerSGD(rank=2, start_iteration=0, warm_start=False)
    state = cold.make_state()
    pushes = [sent(cold, bucket(decayed()), state) for _ in range(2)]
    assert not torch.equal(*pushes)
    assert not state.factors


def test_the_first_factor_is_orthonormal():
    factors = sent(AT_ONCE, bucket(decayed())).view(torch.float32).view(2, 100)
    torch.testing.assert_close(factors[:, :60] @ factors[:, :60].T, torch.eye(2), rtol=0, atol=1e-6)


def test_the_seed_says_where_a_tensor_begins():
    one, same, other = (PowerSGD(rank=2, start_iteration=0, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(sent(one, bucket(decayed())), sent(same, bucket(decayed())))
    assert not torch.equal(sent(one, bucket(decayed())), sent(other, bucket(decayed())))


def test_zeros_give_zeros_and_the_next_gradient_arrives():
    state = AT_ONCE.make_state()
    matrix = low_rank(50, 30, 2)
    assert not received(AT_ONCE, bucket(torch.zeros(50, 30)), state).any()
    torch.testing.assert_close(received(AT_ONCE, bucket(matrix), state).view(50, 30), matrix, rtol=1e-4, atol=1e-4)


def test_a_gradient_in_other_rows_and_columns_than_the_last_one_arrives():
    state = AT_ONCE.make_state()
    matrix = torch.zeros(50, 30)
    matrix[30:, 20:] = low_rank(20, 10, 2)
    for gradient in (torch.zeros(50, 30), matrix.flip(0, 1), torch.zeros(50, 30)):
        received(AT_ONCE, bucket(gradient), state)
    errors = [float((received(AT_ONCE, bucket(matrix), state).view(50, 30) - matrix).norm()) for _ in range(3)]
    assert errors[-1] <= 1e-5 * float(matrix.norm())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_no_number_does_not_spoil_the_next(value):
    state = AT_ONCE.make_state()
    matrix = low_rank(50, 30, 2)
    spoilt = matrix.clone()
    spoilt[3, 4] = value
    assert not received(AT_ONCE, bucket(spoilt), state).view(50, 30)[3, 4].isfinite()
    torch.testing.assert_close(received(AT_ONCE, bucket(matrix), state).view(50, 30), matrix, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scale", [1e-42, 1e-30, 1e30, 1e36])
def test_tiny_and_huge_gradients_keep_their_directions(scale):
    matrix = low_rank(50, 30, 2) * scale
    state = AT_ONCE.make_state()
    for _ in range(3):
        decoded = received(AT_ONCE, bucket(matrix), state).view(50, 30)
        error = (decoded.double() - matrix.double()).norm()
        assert float(error) <= max(1e-5 * float(matrix.double().norm()), 1e-42)


def test_each_bucket_goes_uncompressed_until_its_iteration():
    codec = PowerSGD(rank=1, start_iteration=2)
    state = codec.make_state()
    first, second = (bucket(random(40, 40), index=index) for index in (0, 1))
    sizes = [sent(codec, each, state).numel() for each in (first, first, second, first, second, second)]
    assert sizes == [6400, 6400, 6400, 320, 6400, 320]
    assert codec.sizes(first.shape) == {6400, 320}


def test_what_would_not_shrink_goes_as_it_is():
    tensors = random(30), random(1, 30, seed=1), random(30, 1, seed=2), random(4, 4, seed=3), random(20, 20, seed=4)
    codec = PowerSGD(rank=2, start_iteration=0)
    gradient = bucket(*tensors)
    decoded = received(codec, gradient)
    assert torch.equal(decoded[:106], gradient.buffer[:106])
    assert not torch.equal(decoded[106:], gradient.buffer[106:])
    assert codec.sizes(gradient.shape) == {4 * (106 + 400), 4 * (106 + 80)}


def test_a_bucket_without_a_matrix_has_one_size():
    gradient = bucket(random(30), random(3, 3))
    assert AT_ONCE.sizes(gradient.shape) == {156}
    assert torch.equal(received(AT_ONCE, gradient), gradient.buffer)


@pytest.mark.parametrize(("rate", "factored"), [(1, True), (2, True), (9.9, True), (10, False), (1e9, False)])
def test_the_rate_says_what_is_worth_two_factors(rate, factored):
    codec = PowerSGD(rank=1, start_iteration=0, min_compression_rate=rate)
    assert (len(codec.sizes(bucket(random(20, 20)).shape)) == 2) is factored


def test_the_rank_is_at_most_that_of_the_matrix():
    codec = PowerSGD(rank=1 << 40, start_iteration=0, min_compression_rate=1)
    gradient = bucket(random(30, 2), random(50, 60))
    assert codec.sizes(gradient.shape) == {4 * (60 + 3000)}
    assert torch.equal(received(codec, gradient), gradient.buffer)


def test_a_bucket_that_cuts_a_tensor_is_refused():
    piece = TensorSegment(tensor=4, start=0, stop=100, shape=None)
    gradient = GradBucket(index=7, buffer=torch.zeros(100), segments=(piece,))
    shape = BucketShape(index=7, dtype=torch.float32, num_elements=100, segments=(piece,))
    for attempt in (
        lambda: AT_ONCE.encode(AT_ONCE.make_state(), gradient),
        lambda: AT_ONCE.sizes(shape),
        lambda: AT_ONCE.decode(torch.zeros(400, dtype=torch.uint8), shape),
    ):
        with pytest.raises(InvalidRequest, match=r"bucket 7 cuts tensor 4.*whole_tensors=True"):
            attempt()


def test_products_of_several_trainers_add_up():
    gradients = [low_rank(50, 30, 2), random(50, 1, seed=5) @ random(1, 30, seed=6)]
    total = sum(received(AT_ONCE, bucket(each)) for each in gradients).view(50, 30)
    torch.testing.assert_close(total, sum(gradients), rtol=1e-4, atol=1e-4)


def test_a_state_of_another_model_is_refused():
    state = AT_ONCE.make_state()
    sent(AT_ONCE, bucket(random(50, 30)), state)
    with pytest.raises(
        InvalidRequest, match=r"expected a state with 2 x 50 elements for tensor 0, but it has \(2, 30\)"
    ):
        sent(AT_ONCE, bucket(random(30, 50)), state)


def test_a_saved_state_continues_with_the_same_bits():
    codec = PowerSGD(rank=2, start_iteration=1)
    gradients = [bucket(random(50, 30, seed=seed), random(20, 20, seed=-seed - 1)) for seed in range(6)]
    state = codec.make_state()
    for each in gradients[:3]:
        sent(codec, each, state)
    stored = io.BytesIO()
    torch.save(state.state_dict(), stored)
    expected = [sent(codec, each, state) for each in gradients[3:]]
    stored.seek(0)
    other = codec.make_state()
    other.load_state_dict(torch.load(stored, weights_only=True))
    for each, data in zip(gradients[3:], expected, strict=True):
        assert torch.equal(sent(codec, each, other), data)


def test_later_steps_do_not_change_a_saved_state():
    state = AT_ONCE.make_state()
    sent(AT_ONCE, bucket(random(50, 30)), state)
    saved = state.state_dict()
    copies = {key: value.clone() for key, value in saved.items()}
    other = AT_ONCE.make_state()
    other.load_state_dict(saved)
    for each in (state, other):
        sent(AT_ONCE, bucket(random(50, 30, seed=1)), each)
    assert saved.keys() == copies.keys() == {"factor.0.0", "iteration.0"}
    assert all(torch.equal(saved[key], copies[key]) for key in saved)


@pytest.mark.parametrize("key", ["factor.0", "factor.0.x", "factor.0.1.2", "factor.0.0", "iteration", "weight", ""])
def test_what_is_no_saved_state_is_refused_and_changes_nothing(key):
    state = AT_ONCE.make_state()
    sent(AT_ONCE, bucket(random(50, 30)), state)
    before = state.state_dict()
    with pytest.raises(InvalidRequest, match="a state of PowerSGD holds no"):
        state.load_state_dict({"iteration.5": torch.tensor(9), key: torch.zeros(3)})
    assert state.state_dict().keys() == before.keys()


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("rank", 0),
        ("rank", 1.0),
        ("rank", True),
        ("warm_start", 1),
        ("warm_start", None),
        ("start_iteration", -1),
        ("start_iteration", "10"),
        ("min_compression_rate", 0.99),
        ("min_compression_rate", math.nan),
        ("min_compression_rate", math.inf),
        ("min_compression_rate", "2"),
        ("seed", -1),
        ("seed", 1 << 63),
    ],
)
def test_arguments_are_checked(argument, value):
    with pytest.raises(InvalidRequest, match=f"PowerSGD: {argument} must be"):
        PowerSGD(**{argument: value})
