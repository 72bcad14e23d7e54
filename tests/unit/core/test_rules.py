import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pserver.core.messages import Decision
from pserver.core.reduce import sum_of_squares
from pserver.core.rules import NO_RULES, NONFINITE_POLICIES, GradientRules, NonFinite, Treatment, treat
from pserver.errors import InvalidRequest

NAMES = ("w", "b", "v")
CLIP = GradientRules(max_norm=1.0)

gradients = st.lists(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=6), min_size=1, max_size=5)
squares = st.lists(st.floats(0, 1e300), max_size=12)


def nonfinite(trainer, tensor, count=1):
    return NonFinite(trainer_id=trainer, tensor=tensor, count=count)


# Rules


@pytest.mark.parametrize("name", ["max_norm", "clip_value"])
@pytest.mark.parametrize("limit", [0, 0.0, -1.0, math.inf, math.nan, "1", (1.0,)], ids=repr)
def test_limits_that_are_no_positive_number_are_refused_by_name(name, limit):
    with pytest.raises(InvalidRequest, match=f"{name} must be a positive, finite number"):
        GradientRules(**{name: limit})


def test_an_unknown_policy_for_nan_is_refused_and_the_known_ones_are_named():
    with pytest.raises(InvalidRequest, match=r"nonfinite must be one of \['pass', 'skip', 'raise'\], but is ''"):
        GradientRules(nonfinite="")


@pytest.mark.parametrize(
    ("rules", "look", "count"),
    [
        (NO_RULES, False, False),
        (GradientRules(clip_value=1), False, False),
        (GradientRules(max_norm=1), True, False),
        (GradientRules(nonfinite="skip"), True, True),
        (GradientRules(nonfinite="raise"), True, True),
        (GradientRules(nonfinite="pass", max_norm=1.0, clip_value=2.0), True, False),
    ],
    ids=repr,
)
def test_shards_look_at_a_gradient_only_if_a_rule_needs_it(rules, look, count):
    assert (rules.need_look, rules.look_for_nonfinite) == (look, count)


def test_what_rules_make_of_a_gradient_fits_a_decision():
    decided = {field: getattr(Treatment(), field) for field in Treatment.__dataclass_fields__}
    assert decided.keys() <= Decision.__dataclass_fields__.keys()
    decision = Decision(round=1, contributions=(), divisor=0, options=())
    assert decided == {field: getattr(decision, field) for field in decided}


# The norm


@given(gradients, st.floats(1e-3, 1e4))
def test_clipping_is_torch_s(values, max_norm):
    """The same norm and the same gradients as torch.nn.utils.clip_grad_norm_, whatever is clipped."""
    parameters = [torch.nn.Parameter(torch.zeros(len(each), dtype=torch.float64)) for each in values]
    for parameter, each in zip(parameters, values, strict=True):
        parameter.grad = torch.tensor(each, dtype=torch.float64)
    ours = [parameter.grad.clone() for parameter in parameters]
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    treatment = treat(GradientRules(max_norm=max_norm), [sum_of_squares(each) for each in ours], (), NAMES)
    assert treatment.grad_norm == pytest.approx(norm.item(), rel=1e-12)
    for mine, parameter in zip(ours, parameters, strict=True):
        torch.testing.assert_close(mine * treatment.clip_coefficient, parameter.grad, rtol=1e-12, atol=0)


def test_a_gradient_within_the_limit_is_not_touched():
    assert treat(CLIP, [0.25, 0.25], (), NAMES) == Treatment(grad_norm=math.sqrt(0.5))
    assert treat(CLIP, [], (), NAMES) == Treatment(grad_norm=0.0)


def test_the_limit_itself_is_clipped_as_torch_does_it():
    treatment = treat(CLIP, [1.0], (), NAMES)
    assert (treatment.grad_norm, treatment.clip_coefficient) == (1.0, 1.0 / (1.0 + 1e-6))


@given(squares, st.randoms(use_true_random=False))
def test_the_norm_does_not_depend_on_the_order_of_shards_and_buckets(found, order: random.Random):
    shuffled = list(found)
    order.shuffle(shuffled)
    assert treat(CLIP, found, (), NAMES) == treat(CLIP, shuffled, (), NAMES)


@given(squares, st.integers(1, 4))
def test_the_norm_does_not_depend_on_how_buckets_are_spread_over_servers(found, num_servers):
    shards = [found[server::num_servers] for server in range(num_servers)]
    assert treat(CLIP, found, (), NAMES) == treat(CLIP, [each for shard in shards for each in shard], (), NAMES)


def test_small_squares_are_not_lost_beside_a_large_one():
    """2**53 + 1 is no float64: added one by one in this order, the ones would vanish."""
    found = [2.0**53, *[1.0] * 1024]
    assert treat(CLIP, found, (), NAMES).grad_norm == math.sqrt(2.0**53 + 1024)


@pytest.mark.parametrize(
    ("found", "norm"),
    [
        ([1.0, math.inf], math.inf),
        ([math.inf, math.inf], math.inf),
        ([1e308, 1e308], math.inf),
        ([math.inf, math.nan], math.nan),
        ([math.nan, 1.0], math.nan),
    ],
    ids=repr,
)
def test_a_norm_that_is_no_number_makes_gradients_that_are_none_as_torch_does(found, norm):
    treatment = treat(CLIP, found, (), NAMES)
    assert treatment.grad_norm == norm or (math.isnan(norm) and math.isnan(treatment.grad_norm))
    expected = torch.tensor(1.0) / (torch.tensor(norm) + 1e-6)
    coefficient = torch.clamp(expected, max=1.0).item()
    assert treatment.clip_coefficient == coefficient or (
        math.isnan(coefficient) and math.isnan(treatment.clip_coefficient)
    )
    assert treatment.skip == ""


@pytest.mark.parametrize("rules", [NO_RULES, GradientRules(clip_value=0.5), GradientRules(nonfinite="skip")], ids=repr)
def test_without_a_limit_for_the_norm_nobody_is_told_one(rules):
    treatment = treat(rules, [9.0], (), NAMES)
    assert (treatment.grad_norm, treatment.clip_coefficient) == (None, 1.0)


def test_the_limit_for_single_elements_travels_with_the_decision():
    assert treat(GradientRules(max_norm=1.0, clip_value=0.5), [4.0], (), NAMES).clip_value == 0.5
    assert treat(CLIP, [4.0], (), NAMES).clip_value is None


# NaN and infinite elements


@pytest.mark.parametrize(("policy", "error"), [("skip", ""), ("raise", "NonFiniteGradient")])
def test_nan_steps_nothing_and_says_how_many_there_are_and_where_the_first_is(policy, error):
    found = [nonfinite(9, 0, 4), nonfinite(3, 2), nonfinite(3, 1, 2)]
    treatment = treat(GradientRules(nonfinite=policy), [], found, NAMES)
    assert treatment.skip == (
        "the gradients of this round have 7 NaN or infinite elements, the first in 'b' of trainer 3; "
        "nothing was stepped"
    )
    assert (treatment.error, treatment.num_nonfinite) == (error, 7)


@given(st.permutations([nonfinite(9, 0, 4), nonfinite(3, 2), nonfinite(3, 1, 2)]))
def test_what_is_said_does_not_depend_on_the_order_of_shards(found):
    rules = GradientRules(nonfinite="skip")
    assert treat(rules, [], found, NAMES) == treat(rules, [], sorted(found, key=str), NAMES)


@pytest.mark.parametrize("policy", NONFINITE_POLICIES)
def test_finite_gradients_are_stepped_with_under_every_policy(policy):
    assert treat(GradientRules(nonfinite=policy), [1.0], (), NAMES) == Treatment()


def test_the_norm_is_told_also_of_a_round_that_steps_nothing():
    treatment = treat(GradientRules(max_norm=1.0, nonfinite="skip"), [math.nan, 4.0], [nonfinite(1, 0)], NAMES)
    assert math.isnan(treatment.grad_norm)
    assert treatment.skip
