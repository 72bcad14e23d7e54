import math
from fractions import Fraction
from math import gcd

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pserver.core.reduce import count_nonfinite, sum_of_squares, weighted_mean, weights_and_divisor


@given(st.lists(st.integers(0, 1 << 40), min_size=1, max_size=8))
def test_weights_are_the_samples_without_their_common_divisor(samples):
    weights, divisor = weights_and_divisor(samples)
    assert divisor == sum(weights)
    if any(samples):
        assert gcd(*weights) == 1
        assert [Fraction(weight, divisor) for weight in weights] == [Fraction(each, sum(samples)) for each in samples]


def test_equal_batches_have_weight_one_each():
    assert weights_and_divisor([32, 32, 32]) == ([1, 1, 1], 3)
    assert weights_and_divisor([17]) == ([1], 1)


@pytest.mark.parametrize("samples", [[], [0], [0, 0]])
def test_without_samples_the_divisor_is_zero(samples):
    assert weights_and_divisor(samples) == ([0] * len(samples), 0)


def test_a_trainer_without_samples_has_no_weight():
    assert weights_and_divisor([6, 0, 4]) == ([3, 0, 2], 5)


def test_one_gradient_passes_through_unchanged():
    gradient = torch.tensor([1e-45, -0.0, torch.inf, 3e38])
    before = gradient.clone()
    mean = weighted_mean([gradient], [1], 1)
    assert torch.equal(mean, before)
    assert torch.equal(mean.signbit(), before.signbit())


def test_equal_weights_are_a_plain_sum_in_the_order_given():
    """In single precision the order shows: 1 is lost beside 2**24 unless the two 1s meet first."""
    large, one = torch.tensor([2.0**24]), torch.tensor([1.0])
    assert weighted_mean([large.clone(), one.clone(), one.clone()], [1, 1, 1], 1).item() == 2.0**24
    assert weighted_mean([one.clone(), one.clone(), large.clone()], [1, 1, 1], 1).item() == 2.0**24 + 2


@given(st.lists(st.tuples(st.integers(-99, 99), st.integers(1, 9)), min_size=1, max_size=5))
def test_the_mean_is_the_weighted_sum_over_the_divisor(parts):
    weights = [weight for _, weight in parts]
    gradients = [torch.full((3,), float(value), dtype=torch.float64) for value, _ in parts]
    mean = weighted_mean(gradients, weights, sum(weights))
    assert mean.tolist() == [sum(value * weight for value, weight in parts) / sum(weights)] * 3


@pytest.mark.parametrize("weights", [[1], [3], [1, 1], [2, 1], [1, 2], [1, 1, 1]], ids=str)
def test_the_gradients_stay_as_they_are(weights):
    """They may be memory of the trainers."""
    gradients = [torch.full((2,), 5.0) for _ in weights]
    weighted_mean(gradients, weights, sum(weights))
    assert all(each.tolist() == [5.0, 5.0] for each in gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.complex128], ids=str)
def test_squares_are_summed_in_double_precision(dtype):
    """In single precision the small ones would be lost beside the large one."""
    values = torch.ones(1 << 12, dtype=dtype)
    values[0] = 2.0**13
    assert sum_of_squares(values) == pytest.approx(2.0**26 + (1 << 12) - 1, rel=1e-15)


def test_squares_beyond_single_precision_do_not_overflow():
    assert sum_of_squares(torch.tensor([1e30, 1e30])) == pytest.approx(2e60, rel=1e-6)


def test_the_square_of_a_complex_number_is_that_of_its_absolute_value():
    assert sum_of_squares(torch.tensor([3 + 4j, 1j])) == pytest.approx(26.0)


def test_nothing_has_no_squares():
    assert sum_of_squares(torch.empty(0)) == 0.0


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_nan_and_infinite_elements_are_counted_and_show_in_the_squares(odd):
    values = torch.tensor([1.0, odd, 0.0, odd])
    assert count_nonfinite(values) == 2
    assert not math.isfinite(sum_of_squares(values))
    assert count_nonfinite(values.to(torch.complex64)) == 2


def test_finite_elements_are_not_counted():
    assert count_nonfinite(torch.tensor([0.0, -3e38, 1e-45])) == count_nonfinite(torch.empty(0)) == 0
