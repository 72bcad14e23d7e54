"""Who waits for which tensor of a module, by which way to look at it."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from pserver.client.late_pull import LatePull


class Net(torch.nn.Module):
    """Two layers, of which the second is not called but looked at; a buffer, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(2, 2)
        self.second = torch.nn.Linear(2, 2)
        self.unused = torch.nn.Linear(2, 2)
        self.scale = torch.nn.Parameter(torch.zeros(1))
        self.register_buffer("shift", torch.zeros(2))
        self.register_buffer("nothing", None)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        return torch.nn.functional.linear(hidden, self.second.weight) * self.scale


class Pulled:
    """A net whose tensors become 1 when they are taken; records by name in which order they were."""

    def __init__(self) -> None:
        self.net = Net()
        with torch.no_grad():
            for each in self.net.parameters():
                each.zero_()
        self.tensors = dict(self.net.named_parameters()) | dict(self.net.named_buffers())
        self.taken: list[str] = []
        self.completed = 0
        indices = {tensor: index for index, tensor in enumerate(self.tensors.values())}
        self.late = LatePull(self.net, indices, self._take, self._complete)

    def _take(self, tensors: Iterable[int]) -> None:
        for index in tensors:
            name = list(self.tensors)[index]
            if name not in self.taken:
                self.taken.append(name)
                with torch.no_grad():
                    self.tensors[name].fill_(1.0)

    def _complete(self) -> None:
        self.completed += 1
        self._take(range(len(self.tensors)))
        self.late.end()


@pytest.fixture
def pulled() -> Pulled:
    found = Pulled()
    found.late.begin()
    return found


LOOKS: dict[str, tuple[Callable[[Net], Any], set[str]]] = {
    "attribute": (lambda net: net.first.weight, {"first.weight"}),
    "getattr": (lambda net: getattr(net, "scale"), {"scale"}),  # noqa: B009
    "get_parameter": (lambda net: net.get_parameter("second.bias"), {"second.bias"}),
    "get_buffer": (lambda net: net.get_buffer("shift"), {"shift"}),
    "own parameters": (lambda net: list(net.parameters(recurse=False)), {"scale"}),
    "buffers": (lambda net: dict(net.named_buffers()), {"shift"}),
    "state_dict of a part": (lambda net: net.first.state_dict(), {"first.weight", "first.bias"}),
    "get": (lambda net: net._parameters.get("scale"), {"scale"}),
    "values": (lambda net: list(net._buffers.values()), {"shift"}),
    "a copy of the table": (lambda net: net._parameters.copy(), {"scale"}),
    "a part that is called": (lambda net: net.first(torch.ones(1, 2)), {"first.weight", "first.bias"}),
}


@pytest.mark.parametrize("look", LOOKS)
def test_whoever_looks_at_a_tensor_waits_for_it_and_for_it_alone(look: str, pulled: Pulled) -> None:
    how, expected = LOOKS[look]
    how(pulled.net)
    assert set(pulled.taken) == expected
    assert pulled.completed == 0


EVERYTHING: dict[str, Callable[[Net], Any]] = {
    "parameters and buffers": lambda net: (list(net.parameters()), list(net.buffers())),
    "state_dict": lambda net: net.state_dict(),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "to": lambda net: net.to(torch.float32),
    "requires_grad_": lambda net: (net.requires_grad_(True), list(net.buffers())),
    "functional_call": lambda net: (
        torch.func.functional_call(net, dict(net.named_parameters()), (torch.ones(1, 2),)),
        net.shift,
    ),
}


@pytest.mark.parametrize("look", EVERYTHING)
def test_whoever_looks_at_all_of_them_waits_for_all(look: str, pulled: Pulled) -> None:
    EVERYTHING[look](pulled.net)
    assert set(pulled.taken) == set(pulled.tensors)


@pytest.mark.parametrize(
    "look",
    [
        lambda net: list(net.named_modules()),
        lambda net: net.train(),
        lambda net: net.nothing,
        lambda net: "scale" in net._parameters,
        dir,
        lambda net: setattr(net, "something", 3),
    ],
    ids=["modules", "train", "a buffer that is None", "in", "dir", "setattr"],
)
def test_who_does_not_look_at_a_tensor_does_not_wait(look: Callable[[Net], Any], pulled: Pulled) -> None:
    look(pulled.net)
    assert pulled.taken == []


def test_a_forward_pass_waits_for_each_layer_when_it_comes_to_it_and_at_its_end_for_the_rest(pulled: Pulled) -> None:
    """Of the root's own before anything else: its forward may use them without looking at them."""
    seen: list[list[str]] = []
    pulled.net.first.register_forward_hook(lambda *_: seen.append(list(pulled.taken)))
    output = pulled.net(torch.ones(1, 2))
    assert seen == [["scale", "shift", "first.weight", "first.bias"]]
    assert pulled.taken[4] == "second.weight"
    assert set(pulled.taken) == set(pulled.tensors)
    assert pulled.completed == 1
    assert output.tolist() == [[6.0, 6.0]]


def test_a_copy_has_the_new_values_and_is_not_watched(pulled: Pulled) -> None:
    for found in (copy.deepcopy(pulled.net), pickle.loads(pickle.dumps(pulled.net))):
        assert type(found._parameters) is type(found.first._buffers) is dict
        assert found.scale == 1.0
        found(torch.ones(1, 2))
    assert pulled.completed == 0


def test_tables_are_plain_before_and_after() -> None:
    pulled = Pulled()
    modules = list(pulled.net.modules())
    assert all(type(each._parameters) is type(each._buffers) is dict for each in modules)
    pulled.late.begin()
    assert type(pulled.net._parameters) is not dict
    pulled.net(torch.ones(1, 2))
    assert all(type(each._parameters) is type(each._buffers) is dict for each in modules)
    assert list(pulled.net._parameters) == ["scale"]


def test_what_is_added_and_removed_meanwhile_stays_so(pulled: Pulled) -> None:
    pulled.net.more = torch.nn.Parameter(torch.ones(1))
    del pulled.net.first.bias
    pulled.late.end()
    assert list(pulled.net._parameters) == ["scale", "more"]
    assert list(pulled.net.first._parameters) == ["weight"]


def test_nobody_waits_when_nothing_is_on_its_way() -> None:
    pulled = Pulled()
    pulled.net(torch.ones(1, 2))
    pulled.late.begin()
    pulled.late.end()
    pulled.net(torch.ones(1, 2))
    assert list(pulled.net.state_dict()) == ["scale", "shift", *(name for name in pulled.tensors if "." in name)]
    assert (pulled.taken, pulled.completed) == ([], 0)


def test_what_taking_raises_reaches_whoever_looked() -> None:
    pulled = Pulled()

    def fail(tensors: Iterable[int]) -> None:
        raise ConnectionError("gone")

    pulled.late._take = fail
    pulled.late.begin()
    for look in (lambda: pulled.net.scale, lambda: pulled.net.state_dict(), lambda: pulled.net(torch.ones(1, 2))):
        with pytest.raises(ConnectionError, match="gone"):
            look()


@pytest.mark.parametrize("how", ["close", "del"])
def test_a_module_outlives_what_watched_it(how: str) -> None:
    pulled = Pulled()
    if how == "close":
        pulled.late.begin()
        pulled.late.close()
    else:
        alive = weakref.ref(pulled.late)
        del pulled.late
        gc.collect()
        assert alive() is None
    for each in pulled.net.modules():
        assert not each._forward_pre_hooks
        assert not each._forward_hooks
        assert type(each._parameters) is dict
    pulled.net(torch.ones(1, 2))
    assert pulled.taken == []
