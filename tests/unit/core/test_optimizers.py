import numpy
import pytest
import torch
from core_builders import tensor_spec as spec

from pserver.core import optimizers
from pserver.core.optimizers import (
    OPTIMIZERS,
    REFUSED,
    OptimizerEntry,
    check_groups,
    check_options,
    constructor_arguments,
    make_optimizer,
    numeric_options,
    optimizer_entry,
    optimizer_name,
    register_optimizer,
)
from pserver.errors import ConfigError, InvalidRequest, UnsupportedOptimizer
from pserver.wire.layout import BUFFERS, STORED
from pserver.wire.values import pack_value, unpack_value

OPTIONAL = pytest.mark.skipif("Muon" not in OPTIMIZERS, reason="this torch has no Muon")


def matrix():
    """Something that every optimizer takes."""
    return torch.ones(4, 10)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_equal_optimizer_is_made_from_the_options_that_travel(name):
    local = OPTIMIZERS[name].cls([matrix()], lr=0.25)
    arguments = constructor_arguments(name, local.param_groups[0])
    remote = make_optimizer(name, unpack_value(pack_value(arguments)), [matrix()])
    ours, theirs = (dict(each.param_groups[0], params=None, fused=None) for each in (local, remote))
    assert ours == theirs


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_options_that_an_optimizer_has_are_accepted_in_a_step(name):
    group = OPTIMIZERS[name].cls([matrix()]).param_groups[0]
    check_options(name, unpack_value(pack_value(numeric_options(name, group))), constructor_arguments(name, group))


def test_every_optimizer_of_torch_is_known_or_refused_with_a_reason():
    classes = {name for name, each in vars(torch.optim).items() if isinstance(each, type)}
    optimizers = {name for name in classes if issubclass(getattr(torch.optim, name), torch.optim.Optimizer)}
    of_torch = {name for name, entry in OPTIMIZERS.items() if entry.cls.__module__.startswith("torch.optim")}
    assert optimizers - {"Optimizer"} == of_torch | REFUSED.keys()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_name_of_a_class_is_found_again(name):
    assert optimizer_name(optimizer_entry(name).cls) == name


def test_a_subclass_is_another_optimizer():
    class MySGD(torch.optim.SGD):
        pass

    with pytest.raises(UnsupportedOptimizer, match=r"MySGD.*a subclass of these too.*register_optimizer"):
        optimizer_name(MySGD)


@pytest.mark.parametrize("name", ["sgd", ""])
def test_an_unknown_optimizer_is_refused_and_the_known_ones_are_named(name):
    with pytest.raises(UnsupportedOptimizer, match=r"expected one of \['ASGD', 'Adadelta'.*register_optimizer"):
        optimizer_entry(name)


@pytest.mark.parametrize(("name", "reason"), [("LBFGS", "evaluates the closure"), ("SparseAdam", "sparse gradients")])
def test_an_optimizer_that_servers_cannot_run_is_refused_with_the_reason_and_a_remedy(name, reason):
    cls = getattr(torch.optim, name)
    for refused in (lambda: optimizer_entry(name), lambda: optimizer_name(cls)):
        with pytest.raises(UnsupportedOptimizer, match=rf"{name}.*{reason}.*Adam"):
            refused()
    with pytest.raises(ConfigError, match=reason):
        register_optimizer(type("Mine", (cls,), {}))


class Plain(torch.optim.Optimizer):
    """What a user may register: options of every kind, and no implementation to choose."""

    def __init__(self, parameters, lr, mode="fast", clip=None, **more):
        super().__init__(parameters, {"lr": lr, "mode": mode, "clip": clip})


@pytest.fixture
def registry(monkeypatch):
    """A copy, so that no test registers for others."""
    monkeypatch.setattr(optimizers, "OPTIMIZERS", dict(OPTIMIZERS))
    yield
    optimizers._defaults.cache_clear()


@pytest.mark.usefixtures("registry")
def test_a_registered_class_is_found_by_its_name_and_runs():
    assert register_optimizer(Plain, name="mine.Plain", elementwise=True) is Plain
    assert optimizer_name(Plain) == "mine.Plain"
    assert optimizer_entry("mine.Plain") == OptimizerEntry(cls=Plain, fused_on_cpu=False, elementwise=True)
    group = Plain([torch.zeros(1)], lr=0.1).param_groups[0]
    assert numeric_options("mine.Plain", group) == {"lr": 0.1, "mode": "fast", "clip": None}
    assert isinstance(make_optimizer("mine.Plain", {"lr": 0.1}, [torch.zeros(1)]), Plain)


@pytest.mark.usefixtures("registry")
def test_registering_is_a_decorator_and_keeps_tensors_whole_unless_told_otherwise():
    @register_optimizer
    class Decorated(Plain):
        pass

    assert optimizer_entry("Decorated") == OptimizerEntry(cls=Decorated, fused_on_cpu=False, elementwise=False)


@pytest.mark.usefixtures("registry")
def test_registering_again_in_the_same_way_changes_nothing():
    register_optimizer(Plain)
    before = dict(optimizers.OPTIMIZERS)
    register_optimizer(Plain)
    assert before == optimizers.OPTIMIZERS


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    ("again", "message"),
    [
        (lambda: register_optimizer(Plain, name="SGD"), "'SGD' is taken by <class 'torch.optim.sgd.SGD'>"),
        (lambda: register_optimizer(Plain, name="LBFGS"), "'LBFGS' is taken"),
        (lambda: register_optimizer(type("Plain", (Plain,), {})), "'Plain' is taken"),
        (lambda: register_optimizer(Plain, name="other"), "registered already, as 'Plain' with elementwise=False"),
        (lambda: register_optimizer(Plain, elementwise=True), "registered already, as 'Plain' with elementwise=False"),
        (lambda: register_optimizer(Plain, name=""), "1 to 64 characters"),
        (lambda: register_optimizer(Plain, name="n" * 65), "1 to 64 characters"),
        (lambda: register_optimizer(torch.nn.Linear), "expected a subclass of torch.optim.Optimizer"),
        (lambda: register_optimizer("SGD"), "expected a subclass of torch.optim.Optimizer"),
        (lambda: register_optimizer(torch.optim.Optimizer), "expected a subclass of torch.optim.Optimizer"),
    ],
)
def test_what_cannot_be_registered_is_refused_and_changes_nothing(again, message):
    register_optimizer(Plain)
    before = dict(optimizers.OPTIMIZERS)
    with pytest.raises(ConfigError, match=message):
        again()
    assert before == optimizers.OPTIMIZERS


@pytest.mark.usefixtures("registry")
def test_whatever_a_registered_class_raises_refuses_its_arguments():
    class Broken(Plain):
        def __init__(self, params, lr):
            raise KeyError("no such thing")

    register_optimizer(Broken)
    with pytest.raises(UnsupportedOptimizer, match=r"Broken refuses.*no such thing"):
        make_optimizer("Broken", {"lr": 0.1}, [torch.zeros(1)])


@pytest.mark.parametrize("name", [name for name, entry in OPTIMIZERS.items() if entry.fused_on_cpu])
@pytest.mark.parametrize(
    ("chosen", "fused"), [({}, True), ({"fused": False}, False), ({"foreach": True}, None), ({"foreach": False}, None)]
)
def test_the_implementation_is_fused_unless_the_user_chose(name, chosen, fused):
    (group,) = make_optimizer(name, {"lr": 0.1, **chosen}, [torch.zeros(3)]).param_groups
    assert (group["fused"], group["foreach"]) == (fused, chosen.get("foreach"))


@pytest.mark.parametrize("name", [name for name, entry in OPTIMIZERS.items() if entry.fused_on_cpu])
def test_what_is_said_to_be_fused_on_cpu_is(name):
    parameter = torch.ones(40, requires_grad=True)
    parameter.grad = torch.ones(40)
    make_optimizer(name, {"lr": 0.1}, [parameter]).step()
    assert (parameter < 1).all()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_torch_has_a_fused_cpu_kernel_for_is_known(name):
    has_kernel = hasattr(torch, f"_fused_{name.lower()}_") and name in ("SGD", "Adam", "AdamW", "Adagrad")
    assert OPTIMIZERS[name].fused_on_cpu == has_kernel


def test_numbers_that_may_change_travel_and_nothing_else_does():
    group = torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9).param_groups[0]
    group["initial_lr"] = 0.1
    assert numeric_options("SGD", group) == {
        "lr": 0.1,
        "momentum": 0.9,
        "dampening": 0,
        "weight_decay": 0,
        "nesterov": False,
        "maximize": False,
    }


def test_a_tuple_stays_one():
    assert numeric_options("Adam", {"betas": [0.8, 0.9]}) == {"betas": (0.8, 0.9)}


def test_none_and_strings_travel_where_the_constructor_has_them():
    assert numeric_options("Adafactor", {"eps": (None, 1e-3)}) == {"eps": (None, 1e-3)}
    if "Muon" in OPTIMIZERS:
        assert numeric_options("Muon", {"adjust_lr_fn": "original"}) == {"adjust_lr_fn": "original"}
        with pytest.raises(UnsupportedOptimizer, match="64 characters, but has 65"):
            numeric_options("Muon", {"adjust_lr_fn": "x" * 65})


@pytest.mark.parametrize(
    ("name", "like", "changed"),
    [
        ("Adafactor", {"eps": (None, 1e-3)}, {"eps": (1e-30, 1e-3)}),
        ("Adafactor", {"eps": (1e-30, 1e-3)}, {"eps": (None, 1e-3)}),
        ("Adam", {"betas": (0.9, 0.99)}, {"betas": (0, 1)}),
        ("SGD", {"lr": 1}, {"lr": 0.5, "nesterov": True}),
        pytest.param("Muon", {"adjust_lr_fn": None}, {"adjust_lr_fn": "original"}, marks=OPTIONAL),
        pytest.param("Muon", {"adjust_lr_fn": "original"}, {"adjust_lr_fn": None}, marks=OPTIONAL),
    ],
)
def test_options_may_change_within_their_form(name, like, changed):
    check_options(name, changed, like)


@pytest.mark.parametrize(
    ("name", "like", "changed"),
    [
        ("Adafactor", {"eps": (None, 1e-3)}, {"eps": (None, None)}),
        ("Adafactor", {"eps": (None, 1e-3)}, {"eps": (None, 1e-3, 1)}),
        ("Adafactor", {"eps": (None, 1e-3)}, {"eps": None}),
        ("Adam", {"betas": (0.9, 0.99)}, {"betas": 0.9}),
        ("Adam", {"betas": (0.9, 0.99)}, {"betas": [0.9, 0.99]}),
        ("Adam", {"betas": (0.9, 0.99)}, {"betas": (0.9, (0.99,))}),
        ("SGD", {"lr": 1}, {"lr": None}),
        ("SGD", {"lr": 1}, {"lr": "1"}),
        ("SGD", {"lr": 1}, {"lr": (1, 1)}),
        ("SGD", {"lr": 1}, {"rho": 1}),
        pytest.param("Muon", {"adjust_lr_fn": "original"}, {"adjust_lr_fn": 3}, marks=OPTIONAL),
        pytest.param("Muon", {"lr": 0.1}, {"adjust_lr_fn": "x" * 65}, marks=OPTIONAL),
    ],
)
def test_options_that_change_their_form_are_refused_by_name(name, like, changed):
    with pytest.raises(InvalidRequest, match=f"{name}.*'{next(iter(changed))}'"):
        check_options(name, changed, like)


@pytest.mark.parametrize("value", [torch.tensor(0.25), numpy.float64(0.25)], ids=["tensor", "numpy"])
def test_numbers_of_other_libraries_become_plain_ones_that_travel(value):
    """`LambdaLR` with numpy.cos makes a numpy.float64, which is a float and yet no plain one."""
    options = numeric_options("SGD", {"lr": value})
    assert type(options["lr"]) is float
    assert unpack_value(pack_value(options)) == {"lr": 0.25}


@pytest.mark.parametrize("value", ["0.1", None, torch.zeros(2), (0.9, "x")], ids=repr)
def test_an_option_that_is_no_number_is_refused_by_name(value):
    with pytest.raises(UnsupportedOptimizer, match="SGD: the option 'momentum' must be a number"):
        numeric_options("SGD", {"lr": 0.1, "momentum": value})


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"lr": -1.0}, "Invalid learning rate"),
        ({"lr": 0.1, "rho": 0.9}, "rho"),
        ({"lr": 0.1, "fused": True, "foreach": True}, "foreach"),
        ({"lr": 0.1, "differentiable": True}, "differentiable=True has no meaning on a server"),
    ],
)
def test_arguments_that_torch_or_a_server_refuses_are_refused_with_the_reason(group, message):
    with pytest.raises(UnsupportedOptimizer, match=message):
        check_groups("SGD", [{"lr": 0.1}, group], [])


def test_capturable_has_no_meaning_on_a_server():
    with pytest.raises(UnsupportedOptimizer, match="capturable=True"):
        check_groups("Adam", [{"capturable": True}], [])


def test_no_group_at_all_is_refused():
    with pytest.raises(UnsupportedOptimizer, match="at least one parameter group"):
        check_groups("SGD", [], [])


def test_a_group_that_tensors_name_and_nobody_described_is_refused():
    with pytest.raises(InvalidRequest, match="tensors name 2 groups, but 1 were described"):
        check_groups("SGD", [{"lr": 0.1}], [spec("w", 3), spec("b", 3, group=1)])
    check_groups("SGD", [{"lr": 0.1}], [spec("w", 3), spec("b", 3, group=STORED), spec("n", group=BUFFERS)])


@OPTIONAL
def test_a_tensor_that_an_optimizer_refuses_is_named():
    tensors = [spec("layer.weight", 10, 10), spec("layer.bias", 10), spec("last.bias", 10)]
    with pytest.raises(UnsupportedOptimizer, match=r"Muon refuses .*2D parameters.*'layer.bias' \[10\]"):
        check_groups("Muon", [{"lr": 0.1}], tensors)
    check_groups("Muon", [{"lr": 0.1}], [tensors[0], spec("layer.bias", 10, group=STORED)])


@pytest.mark.parametrize(
    ("name", "group"), [("Adam", {"fused": True}), ("Adafactor", {}), pytest.param("Muon", {}, marks=OPTIONAL)]
)
def test_complex_parameters_are_refused_at_once_where_torch_refuses_them_in_the_first_step(name, group):
    check_groups(name, [group], [spec("w", 3, 3)])
    with pytest.raises(UnsupportedOptimizer, match=rf"{name}.*complex"):
        check_groups(name, [group], [spec("w", 3, 3), spec("c", 3, 3, dtype=torch.complex64)])


def test_complex_parameters_are_accepted_where_torch_accepts_them():
    check_groups("Adam", [{"lr": 0.1}], [spec("w", 3), spec("c", 3, dtype=torch.complex64)])


@OPTIONAL
def test_each_group_s_arguments_are_tried_with_its_own_tensors():
    tensors = [spec("a", 3, 3), spec("b", 3, 3, group=1)]
    with pytest.raises(UnsupportedOptimizer, match=r"Learning rate should be >= 0 .*'b'"):
        check_groups("Muon", [{"lr": 0.1}, {"lr": -1.0}, {"lr": -2.0}], tensors)


def test_trying_large_tensors_takes_no_memory_and_absurd_ones_are_refused():
    check_groups("Adafactor", [{"lr": 0.1}], [spec("w", 1 << 20, 1 << 20)])
    with pytest.raises(InvalidRequest, match="'w'"):
        check_groups("Adafactor", [{"lr": 0.1}], [spec("w", 1 << 62, 1 << 62)])


@pytest.mark.parametrize(
    ("name", "key", "off", "on"),
    [
        ("Adam", "amsgrad", False, True),
        ("AdamW", "amsgrad", False, True),
        ("RMSprop", "momentum", 0, 0.9),
        ("RMSprop", "centered", False, True),
    ],
)
def test_options_that_need_state_cannot_be_turned_on_later(name: str, key: str, off: object, on: object) -> None:
    """Torch would raise a KeyError in the middle of a step."""
    with pytest.raises(InvalidRequest, match=f"'{key}' cannot be turned on"):
        check_options(name, {key: on}, {key: off})
    check_options(name, {key: off}, {key: on})
    check_options(name, {key: on}, {key: on})


def test_momentum_of_sgd_may_be_turned_on_later() -> None:
    check_options("SGD", {"momentum": 0.9}, {"momentum": 0})
