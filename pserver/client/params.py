"""What an optimizer was given -> what a model shares: names, groups, buffers."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from pserver.client.description import ModelDescription, NamedTensor
from pserver.core.rounds import BUFFER_POLICIES
from pserver.core.sync import SyncPolicy
from pserver.errors import InvalidRequest
from pserver.types import GroupOptions
from pserver.wire.compress import Codec
from pserver.wire.layout import BUFFERS, STORED

#: What an optimizer may be given: a module, tensors, (name, tensor) pairs, or group dicts of either.
Params = torch.nn.Module | Iterable[Any]
Named = Sequence[tuple[str, torch.Tensor]]


def unnamed(groups: Sequence[Mapping[str, Any]]) -> list[tuple[str, torch.Tensor]]:
    """Names for bare tensors: torch's own if the user gave pairs, else group and position."""
    named: list[tuple[str, torch.Tensor]] = []
    for number, group in enumerate(groups):
        names = group.get("param_names") or [f"{number}.{index}" for index in range(len(group["params"]))]
        named += zip(names, group["params"], strict=True)
    return named


def in_groups(named: Named, groups: Sequence[Mapping[str, Any]]) -> list[torch.Tensor]:
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


def describe(
    optimizer: str,
    groups: Sequence[Mapping[str, Any]],
    arguments: Sequence[GroupOptions],
    parameters: Named,
    module: torch.nn.Module | None,
    *,
    name: str,
    sync: SyncPolicy,
    buffers: str,
    bucket_bytes: int,
    compress: Codec,
    pull_dtype: torch.dtype | None,
    replicas: int,
) -> ModelDescription:
    """What is shared of a module; parameters in no group travel once and are never stepped.

    Args:
        optimizer: its name.
        groups: with their parameters.
        arguments: for the optimizer's constructor, one for each group.
        parameters: of the module, in order of registration.
        module: whose buffers travel along.
        name, sync, buffers, bucket_bytes, compress, pull_dtype, replicas: as in `RemoteOptimizer`.

    Raises:
        InvalidRequest: an unknown policy for buffers.
    """
    if buffers not in BUFFER_POLICIES:
        raise InvalidRequest(f"buffers must be one of {list(BUFFER_POLICIES)}, but is {buffers!r}")
    numbers = _group_numbers(groups)
    tensors = [NamedTensor(name=key, tensor=each, group=numbers.get(each, STORED)) for key, each in parameters]
    kind = STORED if buffers == "local" else BUFFERS
    found = () if module is None else module.named_buffers()
    tensors += [NamedTensor(name=key, tensor=each, group=kind) for key, each in found]
    return ModelDescription(
        name=name,
        tensors=tensors,
        optimizer=optimizer,
        optimizer_groups=arguments,
        sync=sync,
        buffers=buffers,
        bucket_bytes=bucket_bytes,
        compress=compress,
        pull_dtype=pull_dtype,
        replicas=replicas,
    )


def _group_numbers(groups: Sequence[Mapping[str, Any]]) -> dict[torch.Tensor, int]:
    return {parameter: number for number, group in enumerate(groups) for parameter in group["params"]}
