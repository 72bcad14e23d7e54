"""Optimizers whose steps happen on servers: torch's shape for existing loops, and DistributedOptimizer for contexts."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from pserver.client.cluster import Cluster, current_cluster
from pserver.client.model import NamedTensor, SharedModel
from pserver.core.optimizers import constructor_arguments, numeric_options, optimizer_name
from pserver.core.sync import Bsp, SyncPolicy
from pserver.errors import InvalidRequest, UnsupportedOptimizer
from pserver.types import StepResult
from pserver.wire.layout import STORED

#: What an optimizer may be given: a module, tensors, (name, tensor) pairs, or group dicts of either.
Params = torch.nn.Module | Iterable[Any]


@dataclass(frozen=True, slots=True)
class ParameterRef:
    """A parameter of a distributed model, as `DistributedModel.parameter_refs` hands it out."""

    model: "DistributedModel"
    name: str
    parameter: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributedModel:
    """A module that is to be trained on a cluster, under a name; make it with `distribute`."""

    module: torch.nn.Module
    cluster: Cluster
    name: str
    sync: SyncPolicy
    bucket_bytes: int

    def parameter_refs(self) -> list[ParameterRef]:
        """References to the parameters that require a gradient, in order of registration."""
        return [
            ParameterRef(self, name, parameter)
            for name, parameter in self.module.named_parameters()
            if parameter.requires_grad
        ]


def distribute(
    module: torch.nn.Module,
    *,
    name: str = "model",
    sync: SyncPolicy | None = None,
    cluster: Cluster | None = None,
    bucket_bytes: int = 0,
) -> DistributedModel:
    """Names a module for training on a cluster; `DistributedOptimizer` registers it.

    Args:
        module: the replica on this trainer; its parameters and buffers will be overwritten by the cluster's values.
        name, sync, cluster, bucket_bytes: as in `RemoteOptimizer`.
    """
    return DistributedModel(
        module=module, cluster=cluster or current_cluster(), name=name, sync=sync or Bsp(), bucket_bytes=bucket_bytes
    )


class DistributedOptimizer:
    """Steps a distributed model on its servers with the gradients of an autograd context.

    The shape of torch.distributed.optim.DistributedOptimizer
    (https://docs.pytorch.org/docs/stable/distributed.optim.html). Making it registers the model: the first trainer's
    values win, and all others' parameters and buffers are overwritten with them.

    Args:
        optimizer_class: a torch.optim class that servers know.
        params_rref: what `DistributedModel.parameter_refs` returned, or group dicts with such lists under "params".
        args, kwargs: for `optimizer_class`.

    Raises:
        InvalidRequest: references of several models, or none.
        UnsupportedOptimizer, LayoutMismatch, DeadlineExceeded

    Not thread-safe.
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        params_rref: Sequence[ParameterRef | dict[str, Any]],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        groups = [each for each in params_rref if isinstance(each, dict)] or [{"params": params_rref}]
        model = _only_model(groups)
        self._cluster = model.cluster
        self._name = optimizer_name(optimizer_class)
        plain = [{**group, "params": [ref.parameter for ref in group["params"]]} for group in groups]
        self._optimizer = optimizer_class(plain, *args, **kwargs)
        named = list(model.module.named_parameters())
        self._parameters = _in_groups(named, self.param_groups)
        self._model = _share(
            model.cluster,
            self._name,
            self.param_groups,
            named,
            model.module.named_buffers(),
            name=model.name,
            sync=model.sync,
            bucket_bytes=model.bucket_bytes,
        )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups with their options; changes take effect at the next step."""
        return self._optimizer.param_groups

    def push(self, context_id: int) -> None:
        """Sends the context's gradients to the servers, which add them up there, and frees them here.

        For accumulation over several backward passes; `step` sends what is left and commits.

        Raises:
            UnknownContext: no such context.
        """
        context = self._cluster.contexts.require(context_id)
        if not context.drop_on_servers:
            context.drop_on_servers.append(lambda: self._model.drop_context(context_id))
        self._model.push(context_id, context.take(self._parameters))

    def step(self, context_id: int, *, samples: int = 1) -> StepResult:
        """Steps every parameter with the mean of all trainers' gradients; blocks until every shard has.

        The context's gradients are used up; the parameters on this trainer are overwritten with the new values.

        Args:
            context_id: from `pserver.autograd.context()`.
            samples: weight of this trainer's gradient in the mean.

        Raises:
            UnknownContext: no such context. And what `RemoteOptimizer.step` raises.
        """
        context = self._cluster.contexts.require(context_id)
        gradients = context.take(self._parameters)
        on_servers = bool(context.drop_on_servers) and all(each is None for each in gradients)
        result = self._model.step(
            context_id,
            None if on_servers else gradients,
            samples=samples,
            options=[numeric_options(self._name, group) for group in self.param_groups],
        )
        context.drop_on_servers.clear()
        return result


class RemoteOptimizer(torch.optim.Optimizer):
    """A torch.optim.Optimizer whose step happens on the servers: `loss.backward(); opt.step(); opt.zero_grad()`.

    Making it registers the model: the first trainer's values win, and all others' parameters and buffers are
    overwritten with them. `step` sends what `.grad` holds when it is called; `.grad` stays this trainer's own.

    Args:
        optimizer_class: a torch.optim class that servers know.
        params: a module, or what torch's optimizers take: tensors, (name, tensor) pairs, or group dicts of either.
        args, kwargs: for `optimizer_class`.
        name: of the model in the cluster; trainers with the same name train together.
        sync: when a round closes; `Bsp()` by default.
        module: where names and buffers come from when `params` is not a module.
        cluster: the session; by default that of the enclosing `with pserver.connect()`.
        bucket_bytes: unit of cutting and sending; 0 chooses. A multiple of 64.

    Raises:
        UnsupportedOptimizer: servers cannot run it. LayoutMismatch: another trainer's model differs.
        DeadlineExceeded: the model was not ready in time.

    Not thread-safe.
    """

    def __init__(
        self,
        optimizer_class: Any,
        params: Params,
        *args: Any,
        name: str = "model",
        sync: SyncPolicy | None = None,
        module: torch.nn.Module | None = None,
        cluster: Cluster | None = None,
        bucket_bytes: int = 0,
        **kwargs: Any,
    ) -> None:
        self._name = optimizer_name(optimizer_class)
        if isinstance(params, torch.nn.Module):
            module = params
            params = [each for each in module.parameters() if each.requires_grad]
        local = optimizer_class(params, *args, **kwargs)
        self._model: SharedModel | None = None
        super().__init__(local.param_groups, local.defaults)
        named = _unnamed(self.param_groups) if module is None else list(module.named_parameters())
        self._parameters = _in_groups(named, self.param_groups)
        self._cluster = cluster or current_cluster()
        self._model = _share(
            self._cluster,
            self._name,
            self.param_groups,
            named,
            () if module is None else module.named_buffers(),
            name=name,
            sync=sync or Bsp(),
            bucket_bytes=bucket_bytes,
        )
        self.last_result: StepResult | None = None

    def step(self, closure: Callable[[], Any] | None = None, *, samples: int = 1) -> Any:
        """Steps with the mean of all trainers' gradients; the parameters are complete when it returns.

        Args:
            closure: called once, with gradients enabled; computes the loss.
            samples: weight of this trainer's gradient in the mean: the size of its batch, if batches differ.

        Returns:
            What the closure returned; None without one. `last_result` says what became of the step.

        Raises:
            DeadlineExceeded: the round was not decided in time; names the trainers it waits for.
            ModelFailed: a server was lost. ServerUnavailable: a server cannot be reached. ServerErrors: several.
            InvalidRequest: the model has changed since it was registered.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        assert self._model is not None
        self.last_result = self._model.step(
            self._cluster.contexts.new_id(),
            [parameter.grad for parameter in self._parameters],
            samples=samples,
            options=[numeric_options(self._name, group) for group in self.param_groups],
        )
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not supported once the model is registered."""
        if self._model is not None:
            self._refuse("add_param_group")
        super().add_param_group(param_group)

    def state_dict(self) -> NoReturn:
        """Not supported: the state is on the servers."""
        self._refuse("state_dict")

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> NoReturn:
        """Not supported: the state is on the servers."""
        self._refuse("load_state_dict")

    def _refuse(self, what: str) -> NoReturn:
        raise UnsupportedOptimizer(
            f"{what} of a remote optimizer is not supported: its state lives on the servers. The model's own "
            "state_dict() has the current parameters"
        )


def _only_model(groups: Sequence[dict[str, Any]]) -> DistributedModel:
    refs = [ref for group in groups for ref in group.get("params", ())]
    models = {id(ref.model): ref.model for ref in refs if isinstance(ref, ParameterRef)}
    if len(models) != 1 or not all(isinstance(ref, ParameterRef) for ref in refs):
        raise InvalidRequest(
            "params_rref must be the references of one model, as pserver.distribute(module).parameter_refs() returns "
            f"them; got {len(refs)} references of {len(models)} models"
        )
    return next(iter(models.values()))


def _unnamed(groups: Sequence[Mapping[str, Any]]) -> list[tuple[str, torch.Tensor]]:
    """Names for bare tensors: torch's own if the user gave pairs, else group and position."""
    named: list[tuple[str, torch.Tensor]] = []
    for number, group in enumerate(groups):
        names = group.get("param_names") or [f"{number}.{index}" for index in range(len(group["params"]))]
        named += zip(names, group["params"], strict=True)
    return named


def _group_numbers(groups: Sequence[Mapping[str, Any]]) -> dict[torch.Tensor, int]:
    return {parameter: number for number, group in enumerate(groups) for parameter in group["params"]}


def _in_groups(named: Sequence[tuple[str, torch.Tensor]], groups: Sequence[Mapping[str, Any]]) -> list[torch.Tensor]:
    """The parameters that are stepped, in order of registration.

    Raises:
        InvalidRequest: a group has a parameter that the module lacks.
    """
    numbers = _group_numbers(groups)
    stepped = [parameter for _, parameter in named if parameter in numbers]
    if len(stepped) != len(numbers):
        raise InvalidRequest(
            f"the optimizer's groups have {len(numbers)} parameters, of which the module has only {len(stepped)}; pass "
            "parameters of the same module"
        )
    return stepped


def _share(
    cluster: Cluster,
    optimizer: str,
    groups: Sequence[Mapping[str, Any]],
    parameters: Iterable[tuple[str, torch.Tensor]],
    buffers: Iterable[tuple[str, torch.Tensor]],
    *,
    name: str,
    sync: SyncPolicy,
    bucket_bytes: int,
) -> SharedModel:
    """Registers a model; parameters in no group travel once, like buffers, and are never stepped."""
    numbers = _group_numbers(groups)
    tensors = [NamedTensor(name=key, tensor=each, group=numbers.get(each, STORED)) for key, each in parameters]
    tensors += [NamedTensor(name=key, tensor=each, group=STORED) for key, each in buffers]
    model = SharedModel(
        cluster,
        name=name,
        tensors=tensors,
        optimizer=optimizer,
        optimizer_groups=[constructor_arguments(optimizer, group) for group in groups],
        sync_policy=sync,
        bucket_bytes=bucket_bytes,
    )
    model.register()
    return model
