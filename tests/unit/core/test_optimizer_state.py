"""State that is taken out of one set of steppers and put into another, against torch's own optimizer going on."""

import copy
import dataclasses

import pytest
import torch
from test_stepping import cases, pair

from pserver.core.optimizer_state import StatePiece
from pserver.core.optimizers import OPTIMIZERS, OptimizerEntry
from pserver.core.stepping import BucketStepper
from pserver.errors import InvalidRequest, UnsupportedOptimizer
from pserver.wire.layout import Segment
from pserver.wire.values import pack_value, unpack_value

each_case = pytest.mark.parametrize(("configuration", "implementation"), list(cases()))
sizes_of_buckets = pytest.mark.parametrize("bucket_bytes", [0, 64], ids=["whole", "cut"])


@pytest.fixture(autouse=True)
def one_thread(same_threads):
    torch.set_num_threads(1)


def moved(pieces):
    """The pieces as they come out of a file or off the wire."""
    return [dataclasses.replace(piece, value=unpack_value(pack_value(piece.value))) for piece in pieces]


def reload(both):
    """New steppers with the state of the old ones."""
    taken = [moved(stepper.state_pieces()) for stepper in both.steppers]
    both.steppers = both.new_steppers()
    for stepper, pieces in zip(both.steppers, taken, strict=True):
        stepper.load_state_(reversed(pieces))


def by_tensor(both):
    """For each tensor its state, put together from the pieces of all buckets as a state_dict would have it."""
    found = [{} for _ in both.shapes]
    for stepper in both.steppers:
        for piece in stepper.state_pieces():
            state = found[piece.tensor]
            if piece.start is None:
                assert_same(state.setdefault(piece.key, piece.value), piece.value)
                continue
            so_far = state.setdefault(piece.key, torch.zeros(0, dtype=piece.value.dtype))
            assert piece.start == len(so_far)
            state[piece.key] = torch.cat([so_far, piece.value])
    return found


def assert_same(value, expected):
    if isinstance(expected, torch.Tensor):
        assert value.dtype == expected.dtype
        assert torch.equal(value.reshape(expected.shape), expected)
    else:
        assert (type(value), value) == (type(expected), expected)


@each_case
@sizes_of_buckets
def test_pieces_together_are_the_state_that_torch_keeps(configuration, implementation, bucket_bytes):
    both = pair(configuration, implementation, bucket_bytes=bucket_bytes)
    for absent in ({3, 5}, set(), {1}):
        both.step(absent)
    for found, tensor, optimizer in zip(by_tensor(both), both.expected, both.local, strict=True):
        expected = optimizer.state.get(tensor, {})
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_same(found[key], value)


@each_case
@sizes_of_buckets
def test_steps_after_a_reload_equal_those_of_torch_going_on(configuration, implementation, bucket_bytes):
    both = pair(configuration, implementation, bucket_bytes=bucket_bytes)
    for step, absent in enumerate(({0, 3, 5}, {3, 5}, {3, 1}, {5}, set())):
        if step in (2, 4):
            reload(both)
        both.step(absent)
        assert both.different() == []


@each_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_steps_after_a_reload_equal_those_of_torch_with_the_same_state_dict(configuration, implementation, dtype):
    """In double precision torch converts NAdam's and ASGD's single numbers on loading; those go on unconverted here."""
    if dtype == torch.float64 and configuration in ("NAdam", "ASGD"):
        pytest.skip("torch itself does not go on with the same bits")
    both = pair(configuration, implementation, dtype=dtype)
    for absent in (set(), {0, 5}):
        both.step(absent)
    reload(both)
    for optimizer in both.local:
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer.state.clear()
        optimizer.load_state_dict(saved)
    for absent in (set(), {1, 5}):
        both.step(absent)
        assert both.different() == []


def test_tensors_with_equal_step_counts_are_stepped_as_one_again_after_a_reload():
    both = pair("Adam", "fused", shapes=((16,), (16,), (16,), (16,)))
    both.step({0, 1})
    both.step()
    reload(both)
    (stepper,) = both.steppers
    assert [len(unit) for unit in stepper._units] == [2, 2]


def test_a_load_that_says_nothing_of_a_tensor_makes_it_fresh():
    both = pair("Adagrad", "fused", shapes=((16,), (16,)))
    both.step()
    (stepper,) = both.steppers
    stepper.load_state_([piece for piece in moved(stepper.state_pieces()) if piece.tensor == 0])
    values = {(piece.tensor, piece.key): piece.value for piece in stepper.state_pieces()}
    assert (values[0, "step"], values[1, "step"]) == (1, 0)
    assert not (values[0, "sum"] == 0.3).any()
    assert (values[1, "sum"] == 0.3).all()


def test_pieces_without_any_make_all_tensors_fresh():
    both = pair("Adam", "fused")
    both.step()
    for stepper in both.steppers:
        stepper.load_state_([])
        assert stepper.state_pieces() == []


def test_loaded_values_are_copies():
    both = pair("SGD-momentum", "fused", shapes=((16,),))
    both.step()
    (stepper,) = both.steppers
    pieces = moved(stepper.state_pieces())
    stepper.load_state_(pieces)
    before = pieces[0].value.clone()
    both.step()
    assert torch.equal(pieces[0].value, before)


def test_the_options_of_the_last_step_stay_when_state_is_loaded():
    both = pair("SGD-momentum", "fused", shapes=((16,),))
    both.step(lr=0.25)
    reload(both)
    (stepper,) = both.steppers
    stepper.step_(torch.ones(16), frozenset(), {"lr": 0.125})
    stepper.load_state_(stepper.state_pieces())
    before = both.values.clone()
    stepper.step_(torch.zeros(16), frozenset(), {"momentum": 0.0})
    assert torch.equal(both.values, before)
    assert stepper._optimizer.param_groups[0]["lr"] == 0.125


# Values of other precision or of older torch

ADAM = {"lr": 0.1, "betas": (0.9, 0.99)}


def stepper_of(name, group, size=16, *, dtype=torch.float32, offset=0, shape=None):
    segment = Segment(tensor=7, start=0, stop=size, offset=offset)
    return BucketStepper(name, group, torch.zeros(size, dtype=dtype), [segment], None if shape is None else [shape])


def adam_pieces(**changed):
    """The state of tensor 7 from element 32 on, whose bucket has 16 of its elements."""
    values = {"step": torch.tensor(3.0), "exp_avg": torch.ones(16), "exp_avg_sq": torch.ones(16)} | changed
    return [
        StatePiece(tensor=7, key=key, start=None if key == "step" else 32, value=value) for key, value in values.items()
    ]


def adam(**fields):
    return stepper_of("Adam", ADAM | fields, offset=32)


def loaded(stepper, pieces):
    stepper.load_state_(pieces)
    return {piece.key: piece.value for piece in stepper.state_pieces()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_values_of_the_parameter_s_size_get_the_master_dtype(dtype):
    found = loaded(adam(), adam_pieces(exp_avg=torch.full((16,), 1.5, dtype=dtype)))
    assert_same(found["exp_avg"], torch.full((16,), 1.5))


def test_single_numbers_keep_their_dtype():
    stepper = stepper_of("NAdam", {"foreach": False}, dtype=torch.float64)
    stepper.step_(torch.ones(16, dtype=torch.float64), frozenset(), {})
    found = loaded(stepper, stepper.state_pieces())
    assert (found["mu_product"].dtype, found["exp_avg"].dtype) == (torch.float32, torch.float64)


@pytest.mark.parametrize("step", [3, 3.0, torch.tensor(3), torch.tensor(3.0, dtype=torch.float64)], ids=repr)
def test_step_counts_of_any_kind_work_with_fused_kernels(step):
    stepper = adam()
    assert_same(loaded(stepper, adam_pieces(step=step))["step"], torch.tensor(3.0))
    stepper.step_(torch.ones(16), frozenset(), {})


def test_a_momentum_of_none_is_none_yet():
    stepper = stepper_of("SGD", {"momentum": 0.9})
    stepper.load_state_([StatePiece(tensor=7, key="momentum_buffer", start=None, value=None)])
    assert stepper.state_pieces() == []


def test_values_of_any_strides_are_taken():
    found = loaded(adam(), adam_pieces(exp_avg=torch.arange(32.0)[::2]))
    assert_same(found["exp_avg"], torch.arange(0.0, 32.0, 2))


# Refusals


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([*adam_pieces(), StatePiece(tensor=8, key="step", start=None, value=1)], r"tensor 8, 'step'.*tensors \[7\]"),
        ([*adam_pieces(), adam_pieces()[1]], "tensor 7, 'exp_avg', came twice"),
        (adam_pieces()[:2], "tensor 7 lacks 'exp_avg_sq'"),
        (adam_pieces()[1:], "tensor 7 lacks 'step'"),
        (adam_pieces(exp_avg=torch.ones(15)), r"'exp_avg', has the shape \[15\].*16 elements that starts at 32"),
        (adam_pieces(exp_avg=torch.ones(4, 4)), r"'exp_avg', has the shape \[4, 4\]"),
        (adam_pieces(exp_avg=torch.ones(())), r"'exp_avg', has the shape \[\]"),
        (adam_pieces(exp_avg=0.5), "'exp_avg', is 0.5; expected a tensor of 16"),
        (adam_pieces(exp_avg=None), "'exp_avg', is None; expected a tensor of 16"),
        (adam_pieces(exp_avg=torch.ones(16, dtype=torch.complex64)), "'exp_avg', is of torch.complex64"),
        (adam_pieces(exp_avg=torch.ones(16, dtype=torch.int64)), "'exp_avg', is of torch.int64"),
        (adam_pieces(exp_avg=torch.ones(16).to_sparse()), "'exp_avg', is a torch.sparse_coo tensor"),
        (adam_pieces(step="three"), "'step', is 'three'; expected a tensor"),
        (adam_pieces(step=[3]), "'step', is a list; expected a tensor or a plain value"),
        (adam_pieces(step=torch.ones(16)), r"'step', has the shape \[16\] and no start"),
    ],
)
def test_pieces_that_do_not_fit_are_refused_by_tensor_and_key_and_change_nothing(pieces, message):
    stepper = adam()
    stepper.step_(torch.ones(16), frozenset(), {})
    before = moved(stepper.state_pieces())
    with pytest.raises(InvalidRequest, match=message):
        stepper.load_state_(pieces)
    for old, new in zip(before, stepper.state_pieces(), strict=True):
        assert (old.tensor, old.key, old.start) == (new.tensor, new.key, new.start)
        assert_same(new.value, old.value)


@pytest.mark.parametrize(
    ("start", "key", "value", "message"),
    [
        (0, "exp_avg", torch.ones(16), "starts at 0; expected a part of 16 elements that starts at 32"),
        (None, "exp_avg", torch.ones(16), r"has the shape \[16\] and no start"),
        (None, "exp_avg", torch.ones(()), r"has the shape \[\] and no start"),
        (32, "step", torch.ones(16), "'step', is a part of 16 elements; expected a single number"),
    ],
)
def test_parts_that_start_elsewhere_than_their_segment_are_refused(start, key, value, message):
    piece = StatePiece(tensor=7, key=key, start=start, value=value)
    with pytest.raises(InvalidRequest, match=message):
        adam().load_state_([*(each for each in adam_pieces() if each.key != key), piece])


@pytest.mark.parametrize(
    ("key", "start", "value", "message"),
    [
        ("row_var", None, torch.ones(4), r"'row_var', has the shape \[4\]; expected \[4, 1\]"),
        ("row_var", 0, torch.ones(4, 1), "'row_var', starts at 0; Adafactor keeps whole tensors"),
        ("row_var", None, 1.0, "'row_var', is 1.0; expected a tensor"),
        ("step", None, torch.ones(2), r"'step', has the shape \[2\]; expected \[\]"),
        ("other", None, torch.ones(2), "lacks 'row_var'"),
    ],
)
def test_whole_values_of_another_shape_are_refused(key, start, value, message):
    stepper = stepper_of("Adafactor", {}, 12, shape=(4, 3))
    stepper.step_(torch.ones(12), frozenset(), {})
    kept = {piece.key: piece for piece in moved(stepper.state_pieces())}
    kept.pop(key if key in kept else "row_var")
    with pytest.raises(InvalidRequest, match=message):
        stepper.load_state_([*kept.values(), StatePiece(tensor=7, key=key, start=start, value=value)])


# Classes of a user


class Counting(torch.optim.Optimizer):
    """Keeps a plain number, a string and a list of values."""

    def __init__(self, params, lr=0.1, odd=False):
        super().__init__(params, {"lr": lr, "odd": odd})

    @torch.no_grad()
    def step(self, closure=None):
        (group,) = self.param_groups
        for param in group["params"]:
            if param.grad is not None:
                state = self.state[param]
                state["count"] = state.get("count", 0) + 1
                state["phase"] = "warm"
                if group["odd"]:
                    state["odd"] = [1]
                param.sub_(param.grad, alpha=group["lr"] / state["count"])


@pytest.mark.parametrize("elementwise", [False, True], ids=["whole tensors", "element-wise"])
class TestRegisteredClasses:
    @pytest.fixture(autouse=True)
    def registered(self, monkeypatch, elementwise):
        entry = OptimizerEntry(cls=Counting, fused_on_cpu=False, elementwise=elementwise)
        monkeypatch.setitem(OPTIMIZERS, "state.Counting", entry)
        self.shapes = None if elementwise else [(3,), (16,)]

    def stepper(self, **group):
        segments = [Segment(tensor=0, start=0, stop=3, offset=0), Segment(tensor=1, start=3, stop=19, offset=0)]
        return BucketStepper("state.Counting", group, torch.zeros(19), segments, self.shapes)

    def test_plain_values_survive_a_reload(self):
        first = self.stepper()
        for absent in ({0}, set(), set()):
            first.step_(torch.ones(19), frozenset(absent), {})
        second = self.stepper()
        second.load_state_(moved(first.state_pieces()))
        assert [(piece.tensor, piece.key, piece.start, piece.value) for piece in second.state_pieces()] == [
            (0, "count", None, 2),
            (0, "phase", None, "warm"),
            (1, "count", None, 3),
            (1, "phase", None, "warm"),
        ]
        for stepper in (first, second):
            stepper._values.zero_()
            stepper.step_(torch.ones(19), frozenset(), {})
        assert torch.equal(first._values, second._values)

    def test_state_that_cannot_travel_is_refused_by_name(self):
        stepper = self.stepper(odd=True)
        stepper.step_(torch.ones(19), frozenset(), {})
        with pytest.raises(UnsupportedOptimizer, match="'odd' of type list"):
            stepper.state_pieces()


def test_a_tensor_in_several_buckets_has_parts_that_say_where_they_start():
    both = pair("Adam", "fused", shapes=((40,),), bucket_bytes=64)
    both.step()
    starts = [piece.start for stepper in both.steppers for piece in stepper.state_pieces() if piece.key == "exp_avg"]
    assert starts == [0, 16, 32]
