import io
import math

import pytest
import torch
from codec_buckets import bucket, received, sent
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors

from pserver.errors import InvalidRequest
from pserver.wire.compress import BFloat16, ErrorFeedback, Float16, Int8, NoCompression, PowerSGD, TopK

LOSSY = (BFloat16(), Int8(block=16), TopK(ratio=0.1), PowerSGD(rank=1, start_iteration=0))
each_lossy = pytest.mark.parametrize("inner", LOSSY, ids=str)


def gradient(seed, *, dtype=torch.float32, index=0):
    """Changes from step to step around something that stays."""
    values = [
        torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / 2 + torch.linspace(-1, 1, 30)
        for shape in ((40, 30), (3, 30))
    ]
    return bucket(*(each.to(dtype) for each in values), index=index)


@each_lossy
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_sum_of_what_arrives_and_the_residual_is_the_sum_of_gradients(inner, dtype):
    codec = ErrorFeedback(inner)
    state = codec.make_state()
    gradients = [gradient(seed, dtype=dtype) for seed in range(20)]
    arrived = sum(received(codec, each, state).double() for each in gradients)
    total = sum(each.buffer.double() for each in gradients)
    torch.testing.assert_close(arrived + state.residuals[0], total, rtol=1e-4, atol=1e-4)


@each_lossy
def test_the_mean_of_what_arrives_approaches_the_mean_gradient(inner):
    def error_of_mean(codec, num_steps):
        state = codec.make_state()
        arrived = sum(received(codec, gradient(seed), state).double() for seed in range(num_steps)) / num_steps
        wanted = sum(gradient(seed).buffer.double() for seed in range(num_steps)) / num_steps
        return float((arrived - wanted).norm() / wanted.norm())

    assert error_of_mean(ErrorFeedback(inner), 100) < 0.35 * error_of_mean(ErrorFeedback(inner), 10) < 0.35


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_residual_is_wider_than_the_bucket(dtype):
    codec = ErrorFeedback(NoCompression())
    state = codec.make_state()
    state.residuals[0] = torch.full((1,), 2.0**-12)
    assert received(codec, bucket(torch.ones(1, dtype=dtype)), state).item() == 1
    assert state.residuals[0].item() == 2.0**-12
    assert state.residuals[0].dtype == torch.float32


@each_lossy
def test_a_refused_push_returns(inner):
    codec = ErrorFeedback(inner)
    state, other = codec.make_state(), codec.make_state()
    first, second, third = (gradient(seed) for seed in range(3))
    sent(codec, first, state)
    before = state.residuals[0].clone()
    sent(codec, second, state)
    codec.give_back(state, 0)
    torch.testing.assert_close(state.residuals[0], before + second.buffer, rtol=1e-5, atol=1e-5)
    arrived = received(codec, third, state)
    total = before + second.buffer + third.buffer
    torch.testing.assert_close(arrived + state.residuals[0], total, rtol=1e-5, atol=1e-5)
    assert not other.residuals


def test_a_push_returns_once_and_only_if_there_was_one():
    codec = ErrorFeedback(TopK(ratio=0.1))
    state = codec.make_state()
    codec.give_back(state, 0)
    assert not state.residuals
    sent(codec, gradient(0), state)
    codec.give_back(state, 0)
    codec.give_back(state, 0)
    codec.give_back(state, 1)
    torch.testing.assert_close(state.residuals[0], gradient(0).buffer)


def test_buckets_return_apart():
    codec = ErrorFeedback(TopK(ratio=0.1))
    state = codec.make_state()
    for index in (0, 1):
        sent(codec, gradient(index, index=index), state)
    lost = state.residuals[0].clone()
    codec.give_back(state, 1)
    assert torch.equal(state.residuals[0], lost)
    torch.testing.assert_close(state.residuals[1], gradient(1).buffer)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("inner", [*LOSSY, Float16()], ids=str)
def test_what_is_no_number_is_sent_but_not_carried_on(inner, value):
    codec = ErrorFeedback(inner)
    state = codec.make_state()
    sent(codec, gradient(0), state)
    before = state.residuals[0].clone()
    spoilt = gradient(1)
    spoilt.buffer[7] = value
    arrived = received(codec, spoilt, state)
    assert not arrived[7].isfinite()
    assert torch.equal(state.residuals[0][~arrived.isfinite()], before[~arrived.isfinite()])
    codec.give_back(state, 0)
    assert state.residuals[0].isfinite().all()
    assert received(codec, gradient(2), state).isfinite().all()


def test_overflow_of_16_bits_is_not_carried_on():
    codec = ErrorFeedback(Float16())
    state = codec.make_state()
    assert received(codec, bucket(torch.tensor([1e6, 1.0])), state).tolist() == [math.inf, 1]
    assert state.residuals[0].tolist() == [0, 0]


@pytest.mark.parametrize("store", ["torch", "safetensors"])
@each_lossy
def test_a_saved_state_continues_with_the_same_bits(inner, store):
    codec = ErrorFeedback(inner)
    state, other = codec.make_state(), codec.make_state()
    for seed in range(3):
        sent(codec, gradient(seed), state)
    saved = state.state_dict()
    if store == "torch":
        stored = io.BytesIO()
        torch.save(saved, stored)
        stored.seek(0)
        loaded = torch.load(stored, weights_only=True)
    else:
        loaded = load_safetensors(save_safetensors({key: value.contiguous() for key, value in saved.items()}))
    copies = {key: value.clone() for key, value in saved.items()}
    other.load_state_dict(loaded)
    for seed in range(3, 6):
        assert torch.equal(sent(codec, gradient(seed), state), sent(codec, gradient(seed), other))
    assert all(torch.equal(saved[key], copies[key]) for key in saved)


def test_a_loaded_state_has_nothing_to_give_back():
    codec = ErrorFeedback(TopK(ratio=0.1))
    state = codec.make_state()
    sent(codec, gradient(0), state)
    saved = state.state_dict()
    state.load_state_dict(saved)
    codec.give_back(state, 0)
    assert torch.equal(state.residuals[0], saved["residual.0"])


@pytest.mark.parametrize("key", ["residual", "residual.x", "residual.1.2", "codec.factor.0.0", "weight"])
def test_what_is_no_saved_state_is_refused_and_changes_nothing(key):
    codec = ErrorFeedback(TopK(ratio=0.1))
    state = codec.make_state()
    sent(codec, gradient(0), state)
    before = state.state_dict()
    with pytest.raises(InvalidRequest, match="a state of ErrorFeedback holds no"):
        state.load_state_dict({"residual.5": torch.zeros(3), key: torch.zeros(3)})
    assert state.state_dict().keys() == before.keys()


def test_a_saved_state_that_the_codec_inside_refuses_changes_nothing():
    state = ErrorFeedback(PowerSGD()).make_state()
    with pytest.raises(InvalidRequest, match="a state of PowerSGD holds no 'weight'"):
        state.load_state_dict({"residual.5": torch.zeros(3), "codec.weight": torch.zeros(3)})
    assert not state.state_dict()


@pytest.mark.parametrize("changed", [bucket(torch.zeros(5)), gradient(0, dtype=torch.float64)], ids=["size", "dtype"])
def test_a_state_of_another_model_is_refused(changed):
    codec = ErrorFeedback(TopK(ratio=0.1))
    state = codec.make_state()
    sent(codec, gradient(0), state)
    with pytest.raises(InvalidRequest, match="a model that has changed needs a new state"):
        sent(codec, changed, state)


@pytest.mark.parametrize("inner", [ErrorFeedback(TopK(ratio=0.1)), TopK, "topk", None, 3])
def test_it_goes_around_a_codec_but_not_around_itself(inner):
    with pytest.raises(InvalidRequest, match=r"expected a codec such as pserver.compress.TopK\(ratio=0.01\), got "):
        ErrorFeedback(inner)


def test_it_asks_for_whole_tensors_if_the_codec_inside_does():
    assert [ErrorFeedback(each).whole_tensors for each in (TopK(ratio=0.1), PowerSGD())] == [False, True]


def least_squares_gap(codec, num_steps=400):
    """How far the loss of trainers with different data stays above the best one, relative to where it began."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4, 60, 40, generator=generator)
    targets = inputs @ torch.randn(40, 1, generator=generator) + 3 * torch.randn(4, 60, 1, generator=generator)
    best = torch.linalg.lstsq(inputs.view(240, 40), targets.view(240, 1)).solution

    def loss(weights):
        return float((inputs @ weights - targets).square().mean())

    weights = torch.zeros(40, 1)
    first = loss(weights)
    states = [codec.make_state() for _ in range(4)]
    for _ in range(num_steps):
        gradients = [(x.T @ (x @ weights - y)) / 60 for x, y in zip(inputs, targets, strict=True)]
        arrived = [received(codec, bucket(each), state) for each, state in zip(gradients, states, strict=True)]
        weights = weights - 0.05 * torch.stack(arrived).mean(dim=0).view(40, 1)
    return (loss(weights) - loss(best)) / (first - loss(best))


def test_least_squares_with_a_tenth_of_each_gradient_converges_with_feedback_only():
    assert least_squares_gap(NoCompression()) < 1e-4
    assert least_squares_gap(TopK(ratio=0.1)) > 0.01
    assert least_squares_gap(ErrorFeedback(TopK(ratio=0.1))) < 0.001
