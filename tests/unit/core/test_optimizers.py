import numpy
import pytest
import torch

from pserver.core.optimizers import (
    OPTIMIZERS,
    check_groups,
    constructor_arguments,
    make_optimizer,
    numeric_options,
    optimizer_entry,
    optimizer_name,
)
from pserver.errors import UnsupportedOptimizer
from pserver.wire.values import pack_value, unpack_value


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_equal_optimizer_is_made_from_the_options_that_travel(name):
    local = OPTIMIZERS[name].cls([torch.zeros(3)], lr=0.25)
    arguments = constructor_arguments(name, local.param_groups[0])
    remote = make_optimizer(name, unpack_value(pack_value(arguments)), [torch.zeros(3)])
    ours, theirs = (dict(each.param_groups[0], params=None, fused=None) for each in (local, remote))
    assert ours == theirs


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_name_of_a_class_is_found_again(name):
    assert optimizer_name(optimizer_entry(name).cls) == name


def test_a_subclass_is_another_optimizer():
    class MySGD(torch.optim.SGD):
        pass

    with pytest.raises(UnsupportedOptimizer, match="MySGD"):
        optimizer_name(MySGD)


@pytest.mark.parametrize("name", ["LBFGS", "sgd", ""])
def test_an_unknown_optimizer_is_refused_and_the_known_ones_are_named(name):
    with pytest.raises(UnsupportedOptimizer, match=r"expected one of \['Adam', 'AdamW', 'SGD'"):
        optimizer_entry(name)


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
        check_groups("SGD", [{"lr": 0.1}, group])


def test_capturable_has_no_meaning_on_a_server():
    with pytest.raises(UnsupportedOptimizer, match="capturable=True"):
        check_groups("Adam", [{"capturable": True}])


def test_no_group_at_all_is_refused():
    with pytest.raises(UnsupportedOptimizer, match="at least one parameter group"):
        check_groups("SGD", [])
