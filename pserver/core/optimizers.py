"""Optimizers that servers can run, by name: torch's own classes, and those that a user registers."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, TypeVar

import numpy as np
import torch

from pserver.errors import ConfigError, InvalidRequest, UnsupportedOptimizer
from pserver.types import GroupOptions
from pserver.wire.layout import TensorSpec
from pserver.wire.tensors import element_type

#: Arguments that choose how torch computes, not what; fixed when the optimizer is made.
IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
#: Longest name of an optimizer, and longest option that is a string, in characters.
MAX_TEXT_LENGTH = 64

#: Options that make torch's optimizer keep more state, and fail in a step if they are turned on later.
STATE_OPTIONS = {"Adam": ("amsgrad",), "AdamW": ("amsgrad",), "RMSprop": ("momentum", "centered")}

OptimizerClass = TypeVar("OptimizerClass", bound=type[torch.optim.Optimizer])


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerEntry:
    """One optimizer.

    `fused_on_cpu` says whether torch has a fused CPU kernel for it. `elementwise` says that each element's update
    depends on that element's gradient and state only, so that tensors may be cut; without it every tensor stays whole.
    """

    cls: type[torch.optim.Optimizer]
    fused_on_cpu: bool
    elementwise: bool

    @property
    def from_torch(self) -> bool:
        """Whether it is torch's own, of which it is known what it does with gradients: it keeps and changes none."""
        return self.cls.__module__.startswith("torch.optim")


_FUSED_ON_CPU = ("SGD", "Adam", "AdamW", "Adagrad")
_ELEMENTWISE = (*_FUSED_ON_CPU, "RMSprop", "Adadelta", "NAdam", "RAdam", "Adamax", "ASGD", "Rprop")
_WHOLE_TENSOR = ("Adafactor", "Muon")

#: By name. An optimizer that the installed torch does not have (Muon came with 2.9) is left out.
OPTIMIZERS: dict[str, OptimizerEntry] = {
    name: OptimizerEntry(
        cls=getattr(torch.optim, name), fused_on_cpu=name in _FUSED_ON_CPU, elementwise=name in _ELEMENTWISE
    )
    for name in (*_ELEMENTWISE, *_WHOLE_TENSOR)
    if hasattr(torch.optim, name)
}

#: Torch's optimizers that servers cannot run, by class name: why, and what to do.
REFUSED: dict[str, str] = {
    "LBFGS": (
        "it evaluates the closure several times in a step and needs all parameters in one place; train with another "
        "optimizer, for example Adam, or without servers"
    ),
    "SparseAdam": (
        "it takes sparse gradients, and only dense ones travel; use Adam, and sparse=False where gradients are sparse "
        "(torch.nn.Embedding)"
    ),
}

if REFUSED.keys() & OPTIMIZERS.keys() or any(name != entry.cls.__name__ for name, entry in OPTIMIZERS.items()):
    raise TypeError("the tables of optimizers contradict each other or torch")


def register_optimizer(cls: OptimizerClass, *, name: str | None = None, elementwise: bool = False) -> OptimizerClass:
    """Lets servers run an optimizer class of your own; usable as a decorator, `@register_optimizer`.

    Trainers and servers find the class by its name, each in its own process: the call must be made on trainers and
    servers alike, at import of a module that both load. Only the name travels, never code.

    What the class must be like:

    - its constructor takes the parameters first, and the options that become the parameter group's fields: numbers,
      None, strings of at most 64 characters, or tuples of these;
    - `step()` works without a closure and steps exactly the parameters that have a gradient; it may be called more than
      once a round, each time for other parameters, and is called for each bucket of the model apart;
    - what it remembers is in `self.state[parameter]`: tensors, numbers, None, booleans or strings.

    Args:
        cls: a subclass of torch.optim.Optimizer. A subclass of an optimizer that servers know is another optimizer.
        name: under which servers know it, 1 to 64 characters; the class's `__name__` if None.
        elementwise: whether each element's update depends on that element's gradient and state only (and on options),
            and every tensor of the state has the parameter's shape or 0 dimensions. Then large tensors are cut and
            spread over servers, and the optimizer sees 1-D pieces of them. Without it, each tensor lies whole on one
            server, and the optimizer sees it in its shape.

    Returns:
        `cls`, unchanged. Registering the same class in the same way again does nothing.

    Raises:
        ConfigError: `cls` is no subclass of torch.optim.Optimizer or one that servers cannot run, or the name is taken
            by another class, or the class is registered in another way already.
    """
    if not isinstance(cls, type) or not issubclass(cls, torch.optim.Optimizer) or cls is torch.optim.Optimizer:
        raise ConfigError(f"expected a subclass of torch.optim.Optimizer to register, got {cls!r}")
    name = cls.__name__ if name is None else name
    if not 1 <= len(name) <= MAX_TEXT_LENGTH:
        raise ConfigError(f"an optimizer's name must have 1 to {MAX_TEXT_LENGTH} characters, but is {name[:80]!r}")
    reason = _refusal(cls)
    if reason is not None:
        raise ConfigError(f"{cls.__qualname__} cannot be registered: {reason}")
    try:
        inspect.signature(cls)
    except ValueError as error:
        raise ConfigError(f"{cls!r} has a constructor whose arguments cannot be read: {error}") from error
    entry = OptimizerEntry(cls=cls, fused_on_cpu=False, elementwise=elementwise)
    known = OPTIMIZERS.get(name)
    if known == entry:
        return cls
    if (known is not None and known.cls is not cls) or name in REFUSED:
        taken_by = REFUSED[name] if known is None else known.cls
        raise ConfigError(f"the name {name!r} is taken by {taken_by!r}; register {cls!r} under another name")
    for other, each in OPTIMIZERS.items():
        if each.cls is cls:
            raise ConfigError(
                f"{cls!r} is registered already, as {other!r} with elementwise={each.elementwise}; register it once"
            )
    OPTIMIZERS[name] = entry
    return cls


def optimizer_entry(name: str) -> OptimizerEntry:
    """The optimizer of that name.

    Raises:
        UnsupportedOptimizer: this process does not know it, or servers cannot run it.
    """
    entry = OPTIMIZERS.get(name)
    if entry is not None:
        return entry
    if name in REFUSED:
        raise UnsupportedOptimizer(f"servers cannot run the optimizer {name!r}: {REFUSED[name]}")
    raise UnsupportedOptimizer(
        f"servers cannot run the optimizer {name[:80]!r}; expected one of {sorted(OPTIMIZERS)}; {_HOW_TO_REGISTER}"
    )


def optimizer_name(cls: object) -> str:
    """The name under which servers know an optimizer class.

    Raises:
        UnsupportedOptimizer: they do not know it (a subclass is another optimizer), or cannot run it.
    """
    for name, entry in OPTIMIZERS.items():
        if entry.cls is cls:
            return name
    reason = _refusal(cls)
    if reason is not None:
        raise UnsupportedOptimizer(f"servers cannot run {cls!r}: {reason}")
    known = ", ".join(sorted(OPTIMIZERS))
    raise UnsupportedOptimizer(f"servers cannot run {cls!r}; expected one of {known}; {_HOW_TO_REGISTER}")


_HOW_TO_REGISTER = (
    "a class of your own, a subclass of these too, must be given to register_optimizer on trainers and servers alike"
)


def _refusal(cls: object) -> str | None:
    for name, reason in REFUSED.items():
        if isinstance(cls, type) and issubclass(cls, getattr(torch.optim, name)):
            return reason
    return None


def numeric_options(name: str, group: Mapping[str, object]) -> dict[str, object]:
    """The options of a parameter group that may change from step to step (lr, momentum, betas, ...), as plain values.

    These are numbers, tuples of numbers, and None and strings where the constructor has them. Fields that the
    constructor does not know (a scheduler's `initial_lr`) are left out.

    Raises:
        UnsupportedOptimizer: an option has another value.
    """
    defaults = _defaults(name)
    return {key: _plain(name, key, group[key], default) for key, default in defaults.items() if key in group}


def check_options(name: str, options: GroupOptions, like: GroupOptions) -> None:
    """Refuses what `numeric_options` would not have sent.

    Args:
        like: options of the group that are known to be good.

    Raises:
        InvalidRequest: an option that the optimizer does not take, or that has not the form it had: a tuple stays one
            of that length, a string a string, a number a number; None may come and go where the constructor has it. Or
            one that needs state which the optimizer does not have, or with which a step raises.
    """
    defaults = _defaults(name)
    for key, value in options.items():
        if key not in defaults:
            raise InvalidRequest(f"{name} takes the options {list(defaults)} in a step, but {key!r} came")
        try:
            plain = _plain(name, key, value, defaults[key])
        except UnsupportedOptimizer as error:
            raise InvalidRequest(str(error)) from None
        if isinstance(value, list) or not _same_form(plain, like.get(key, plain)):
            raise InvalidRequest(
                f"{name}: the option {key!r} must be of the form of {like.get(key, plain)!r}, but is {value!r}"
            )
        if key in STATE_OPTIONS.get(name, ()) and bool(plain) and not like.get(key, plain):
            raise InvalidRequest(
                f"{name}: {key!r} cannot be turned on while training ({value!r} came): torch keeps no state for it. "
                "Begin with it, or make the optimizer anew under another name"
            )
    rest = tuple(sorted((key, value) for key, value in options.items() if key != "lr"))
    try:
        _try_step(name, rest)
    except Exception as error:  # whatever torch's code or Python's arithmetic raises
        raise InvalidRequest(f"{name} cannot step with the options {dict(options)}: {error!r}") from error


@lru_cache(maxsize=256)
def _try_step(name: str, options: tuple[tuple[str, Any], ...]) -> None:
    """Steps one element with these options, as a shard would. The learning rate is a mere factor, and left out."""
    entry = optimizer_entry(name)
    if not entry.from_torch:
        return
    param = torch.zeros((1,) if entry.elementwise else (1, 1))
    param.grad = torch.ones_like(param)
    started = {key: value for key, value in options if key in STATE_OPTIONS.get(name, ())}
    optimizer = make_optimizer(name, started, [param])
    optimizer.param_groups[0].update(options)
    for _ in range(2):
        optimizer.step()


def constructor_arguments(name: str, group: Mapping[str, object]) -> dict[str, object]:
    """The arguments that make an equal optimizer: its numeric options, and the implementation if one was chosen.

    Raises:
        UnsupportedOptimizer: an option has a value that cannot travel, as in `numeric_options`.
    """
    chosen = {flag: group[flag] for flag in sorted(IMPLEMENTATION) if group.get(flag) is not None}
    return numeric_options(name, group) | chosen


def _same_form(value: object, like: object) -> bool:
    if isinstance(value, tuple) and isinstance(like, tuple | list):
        return len(value) == len(like) and all(map(_same_form, value, like))
    if isinstance(value, tuple | list) or isinstance(like, tuple | list):
        return False
    return value is None or like is None or isinstance(value, str) == isinstance(like, str)


#: Stands for a default that the constructor does not have.
_ANYTHING = inspect.Parameter.empty


@cache
def _defaults(name: str) -> dict[str, object]:
    """The options that the constructor takes, without the parameters and the choice of implementation."""
    _, *options = inspect.signature(optimizer_entry(name).cls).parameters.values()
    return {
        option.name: option.default
        for option in options
        if option.name not in IMPLEMENTATION and option.kind not in (option.VAR_POSITIONAL, option.VAR_KEYWORD)
    }


def _plain(name: str, key: str, value: object, default: object) -> object:
    if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        value = value.item()
    if type(value) in (bool, int, float):
        return value
    if isinstance(value, tuple | list):
        return tuple(
            _plain(name, key, each, inner)
            for each, inner in zip(value, _inner_defaults(default, len(value)), strict=True)
        )
    if value is None and default in (None, _ANYTHING):
        return None
    if isinstance(value, str) and (default in (None, _ANYTHING) or isinstance(default, str)):
        if len(value) > MAX_TEXT_LENGTH:
            raise UnsupportedOptimizer(
                f"{name}: the option {key!r} may have {MAX_TEXT_LENGTH} characters, but has {len(value)}"
            )
        return str(value)
    raise UnsupportedOptimizer(
        f"{name}: the option {key!r} must be a number or a tuple of numbers (None or a string only where the "
        f"constructor has one), but is {value!r}"
    )


def _inner_defaults(default: object, length: int) -> Sequence[object]:
    if isinstance(default, tuple | list):
        return default if len(default) == length else [_ANYTHING] * length
    return [_ANYTHING if default is None else default] * length


def check_groups(name: str, groups: Sequence[GroupOptions], tensors: Sequence[TensorSpec]) -> None:
    """Tries an optimizer's arguments: on a scalar if it is element-wise, else on the shapes of all tensors.

    Args:
        groups: arguments of each parameter group.
        tensors: the model; those of a group below 0 are not stepped and not tried.

    Raises:
        UnsupportedOptimizer: unknown optimizer, or arguments or a tensor that it refuses.
        InvalidRequest: a tensor of a group that is not described.
    """
    entry = optimizer_entry(name)
    if not groups:
        raise UnsupportedOptimizer(f"{name}: expected at least one parameter group, got none")
    num_groups = max((tensor.group for tensor in tensors), default=-1) + 1
    if num_groups > len(groups):
        raise InvalidRequest(f"tensors name {num_groups} groups, but {len(groups)} were described")
    by_group: dict[int, list[TensorSpec]] = {}
    for tensor in tensors:
        by_group.setdefault(tensor.group, []).append(tensor)
    for number, group in enumerate(groups):
        members = by_group.get(number, [])
        if entry.elementwise:
            for dtype in {element_type(tensor.dtype).master for tensor in members} or {torch.float32}:
                _try_scalar(name, group, dtype)
        else:
            _try_tensors(name, group, members)


def _try_scalar(name: str, group: GroupOptions, dtype: torch.dtype) -> None:
    param = torch.zeros(1, dtype=dtype)
    param.grad = torch.zeros_like(param)
    optimizer = make_optimizer(name, group, [param])
    try:
        optimizer.step()
    except Exception as error:  # a user's class may raise anything
        raise UnsupportedOptimizer(f"{name} with {dict(group)} cannot step parameters of {dtype}: {error}") from error


def _try_tensors(name: str, group: GroupOptions, tensors: Sequence[TensorSpec]) -> None:
    if not tensors:
        return
    for tensor in tensors:
        if tensor.dtype.is_complex and name in _WHOLE_TENSOR:  # torch says so in the first step
            raise UnsupportedOptimizer(
                f"{name} refuses complex parameters, such as {tensor.name!r} {list(tensor.shape)}; use Adam instead"
            )
    shapes = [_without_memory(name, tensor) for tensor in tensors]
    try:
        make_optimizer(name, group, shapes)
    except UnsupportedOptimizer:
        for tensor, shape in zip(tensors, shapes, strict=True):
            try:
                make_optimizer(name, group, [shape])
            except UnsupportedOptimizer as error:
                raise UnsupportedOptimizer(f"{error}; found with {tensor.name!r} {list(tensor.shape)}") from error
        raise


def _without_memory(name: str, tensor: TensorSpec) -> torch.Tensor:
    try:
        return torch.empty(tensor.shape, dtype=element_type(tensor.dtype).master, device="meta")
    except RuntimeError as error:
        raise InvalidRequest(f"{name}: no tensor can be like {tensor}: {error}") from error


def make_optimizer(name: str, group: GroupOptions, params: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    """The optimizer over these tensors, fused where torch has it unless the arguments say otherwise.

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
    except Exception as error:  # a user's class may raise anything
        raise UnsupportedOptimizer(f"{name} refuses {dict(group)}: {error}") from error
