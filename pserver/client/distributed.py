"""Modules trained through autograd contexts: `distribute`, and DistributedOptimizer in the shape of torch's."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pserver.client.cluster import Cluster, current_cluster
from pserver.client.model import SharedModel
from pserver.client.params import describe, in_groups
from pserver.client.step_counts import ModelStatistics
from pserver.core.optimizers import constructor_arguments, numeric_options, optimizer_name
from pserver.core.rules import GradientRules
from pserver.core.sync import Bsp, SyncPolicy
from pserver.errors import InvalidRequest
from pserver.types import StepResult
from pserver.wire.compress import Codec, NoCompression


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
    buffers: str
    bucket_bytes: int
    compress: Codec
    pull_dtype: torch.dtype | None
    replicas: int

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
    buffers: str = "lowest",
    compress: Codec | None = None,
    pull_dtype: torch.dtype | None = None,
    replicas: int = 0,
    cluster: Cluster | None = None,
    bucket_bytes: int = 0,
) -> DistributedModel:
    """Names a module for training on a cluster; `DistributedOptimizer` registers it.

    Args:
        module: the replica on this trainer; its parameters and buffers will be overwritten by the cluster's values.
        name, sync, buffers, compress, pull_dtype, replicas, cluster, bucket_bytes: as in `RemoteOptimizer`.
    """
    return DistributedModel(
        module=module,
        cluster=cluster or current_cluster(),
        name=name,
        sync=sync or Bsp(),
        buffers=buffers,
        bucket_bytes=bucket_bytes,
        compress=compress or NoCompression(),
        pull_dtype=pull_dtype,
        replicas=replicas,
    )


class DistributedOptimizer:
    """Steps a distributed model on its servers with the gradients of an autograd context.

    The shape of torch.distributed.optim.DistributedOptimizer
    (https://docs.pytorch.org/docs/stable/distributed.optim.html). Making it registers the model: the first trainer's
    values win, and all others' parameters and buffers are overwritten with them.

    Args:
        optimizer_class: a class that servers know: torch.optim's, or a registered one.
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
        self._parameters = in_groups(named, self.param_groups)
        description = describe(
            self._name,
            self.param_groups,
            [constructor_arguments(self._name, group) for group in self.param_groups],
            named,
            model.module,
            name=model.name,
            sync=model.sync,
            buffers=model.buffers,
            bucket_bytes=model.bucket_bytes,
            compress=model.compress,
            pull_dtype=model.pull_dtype,
            replicas=model.replicas,
        )
        self._model = SharedModel(model.cluster, description)

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

    def step(
        self,
        context_id: int,
        *,
        samples: int = 1,
        max_norm: float | None = None,
        clip_value: float | None = None,
        nonfinite: str = "pass",
    ) -> StepResult:
        """Steps every parameter with the mean of all trainers' gradients; blocks until every shard has.

        The context's gradients are used up; the parameters on this trainer are overwritten with the new values.

        Args:
            context_id: from `pserver.autograd.context()`.
            samples: weight of this trainer's gradient in the mean.
            max_norm, clip_value, nonfinite: as in `RemoteOptimizer`.

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
            rules=GradientRules(max_norm=max_norm, clip_value=clip_value, nonfinite=nonfinite),
        )
        context.drop_on_servers.clear()
        return result

    def statistics(self) -> ModelStatistics:
        """What became of this trainer's steps."""
        return self._model.statistics()


def _only_model(groups: Sequence[dict[str, Any]]) -> DistributedModel:
    refs = [ref for group in groups for ref in group.get("params", ())]
    models = {id(ref.model): ref.model for ref in refs if isinstance(ref, ParameterRef)}
    if len(models) != 1 or not all(isinstance(ref, ParameterRef) for ref in refs):
        raise InvalidRequest(
            "params_rref must be the references of one model, as pserver.distribute(module).parameter_refs() returns "
            f"them; got {len(refs)} references of {len(models)} models"
        )
    return next(iter(models.values()))
