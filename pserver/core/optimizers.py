"""Optimizers that servers can run: torch's own classes, by name."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from pserver.errors import InvalidRequest, UnsupportedOptimizer
from pserver.types import GroupOptions

#: Arguments that choose how torch computes, not what; fixed when the optimizer is made.
IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerEntry:
    """One optimizer that works element by element; `fused_on_cpu` says whether torch has a fused CPU kernel for it."""

    cls: type[torch.optim.Optimizer]
    fused_on_cpu: bool


OPTIMIZERS: dict[str, OptimizerEntry] = {
    "SGD": OptimizerEntry(cls=torch.optim.SGD, fused_on_cpu=True),
    "Adam": OptimizerEntry(cls=torch.optim.Adam, fused_on_cpu=True),
    "AdamW": OptimizerEntry(cls=torch.optim.AdamW, fused_on_cpu=True),
}


def optimizer_entry(name: str) -> OptimizerEntry:
    """The optimizer of that name.

    Raises:
        UnsupportedOptimizer: servers do not know it.
    """
    entry = OPTIMIZERS.get(name)
    if entry is None:
        raise UnsupportedOptimizer(f"servers cannot run the optimizer {name!r}; expected one of {sorted(OPTIMIZERS)}")
    return entry


def optimizer_name(cls: object) -> str:
    """The name under which servers know a torch optimizer class.

    Raises:
        UnsupportedOptimizer: they do not know it (a subclass is another optimizer).
    """
    for name, entry in OPTIMIZERS.items():
        if entry.cls is cls:
            return name
    known = ", ".join(f"torch.optim.{name}" for name in OPTIMIZERS)
    raise UnsupportedOptimizer(f"servers cannot run {cls!r}; expected one of {known}")


def numeric_options(name: str, group: Mapping[str, object]) -> dict[str, object]:
    """The options of a parameter group that may change from step to step (lr, momentum, betas, ...), as plain numbers.

    Fields that the optimizer's constructor does not know (a scheduler's `initial_lr`) are left out.

    Raises:
        UnsupportedOptimizer: an option has a value that is not a number.
    """
    return {key: _plain(name, key, group[key]) for key in _numeric_names(name) if key in group}


def check_options(name: str, options: GroupOptions, like: GroupOptions) -> None:
    """Refuses what `numeric_options` would not have sent.

    Args:
        like: options of the group that are known to be good.

    Raises:
        InvalidRequest: an option that the optimizer does not take, or that is neither a number nor a tuple as it was.
    """
    for key, value in options.items():
        if key not in _numeric_names(name):
            raise InvalidRequest(f"{name} takes the options {list(_numeric_names(name))} in a step, but {key!r} came")
        try:
            _plain(name, key, value)
        except UnsupportedOptimizer as error:
            raise InvalidRequest(str(error)) from None
        if _form(value) != _form(like.get(key, value)):
            raise InvalidRequest(f"{name}: the option {key!r} must be of the form of {like[key]!r}, but is {value!r}")


def constructor_arguments(name: str, group: Mapping[str, object]) -> dict[str, object]:
    """The arguments that make an equal optimizer: its numeric options, and the implementation if one was chosen.

    Raises:
        UnsupportedOptimizer: an option has a value that is not a number.
    """
    chosen = {flag: group[flag] for flag in sorted(IMPLEMENTATION) if group.get(flag) is not None}
    return numeric_options(name, group) | chosen


def _form(value: object) -> object:
    return len(value) if isinstance(value, tuple) else type(value) is list


@cache
def _numeric_names(name: str) -> tuple[str, ...]:
    parameters = inspect.signature(optimizer_entry(name).cls).parameters
    return tuple(each for each in parameters if each != "params" and each not in IMPLEMENTATION)


def _plain(name: str, key: str, value: object) -> object:
    if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        value = value.item()
    if type(value) in (bool, int, float):
        return value
    if isinstance(value, tuple | list):
        return tuple(_plain(name, key, each) for each in value)
    raise UnsupportedOptimizer(f"{name}: the option {key!r} must be a number or a tuple of numbers, but is {value!r}")


def check_groups(name: str, groups: Sequence[GroupOptions]) -> None:
    """Tries an optimizer's arguments on a scalar.

    Raises:
        UnsupportedOptimizer: unknown optimizer, or arguments that it refuses.
    """
    if not groups:
        raise UnsupportedOptimizer(f"{name}: expected at least one parameter group, got none")
    for group in groups:
        make_optimizer(name, group, [torch.zeros(1)])


def make_optimizer(name: str, group: GroupOptions, params: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    """Torch's optimizer over these tensors, fused where torch has it unless the arguments say otherwise.

    Raises:
        UnsupportedOptimizer: unknown optimizer, or arguments that it refuses.
    """
    entry = optimizer_entry(name)
    arguments: dict[str, Any] = dict(group)
    for flag in ("capturable", "differentiable"):
        if arguments.get(flag):
            raise UnsupportedOptimizer(f"{name}: {flag}=True has no meaning on a server; leave it out")
    chosen = arguments.get("fused") is not None or arguments.get("foreach") is not None
    if entry.fused_on_cpu and not chosen and all(param.is_floating_point() for param in params):
        arguments["fused"] = True
    try:
        return entry.cls(list(params), **arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UnsupportedOptimizer(f"torch.optim.{name} refuses {dict(group)}: {error}") from error
