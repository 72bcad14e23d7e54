"""What a trainer says of the model it wants to share."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pserver.core.messages import ModelSpec
from pserver.core.sync import SyncPolicy, policy_arguments
from pserver.errors import InvalidRequest
from pserver.types import GroupOptions
from pserver.wire.compress import BFloat16, Codec, Float16, NoCompression, codec_arguments
from pserver.wire.layout import TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTensor:
    """A parameter or buffer to share; `group` is its optimizer group, `STORED` or `BUFFERS`."""

    name: str
    tensor: torch.Tensor
    group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """What a trainer shares: tensors in the order of registration, and everything that trainers must agree on.

    `optimizer_groups` are constructor arguments for each group, complete with defaults; `bucket_bytes` 0 chooses.
    `compress` is the codec of gradients; `pull_dtype` what parameters are rounded to on their way here, None: nothing.
    `replicas` other servers keep a copy of each shard.
    """

    name: str
    tensors: Sequence[NamedTensor]
    optimizer: str
    optimizer_groups: Sequence[GroupOptions]
    sync: SyncPolicy
    buffers: str
    bucket_bytes: int
    compress: Codec
    pull_dtype: torch.dtype | None
    replicas: int

    def spec(self, world_size: int) -> ModelSpec:
        """The same without the tensors' values, as it travels."""
        return ModelSpec(
            name=self.name,
            tensors=tuple(
                TensorSpec(name=each.name, shape=tuple(each.tensor.shape), dtype=each.tensor.dtype, group=each.group)
                for each in self.tensors
            ),
            bucket_bytes=self.bucket_bytes,
            optimizer=self.optimizer,
            optimizer_groups=tuple(self.optimizer_groups),
            sync_policy=self.sync.name,
            sync_policy_arguments=policy_arguments(self.sync),
            world_size=world_size,
            buffers=self.buffers,
            codec=self.compress.name,
            codec_arguments=codec_arguments(self.compress),
            pull_codec=_pull_codec(self.pull_dtype),
            replicas=self.replicas,
        )


def _pull_codec(dtype: torch.dtype | None) -> str:
    if dtype is None:
        return NoCompression.name
    for codec in (Float16, BFloat16):
        if codec.dtype == dtype:
            return codec.name
    raise InvalidRequest(f"parameters can be pulled as torch.float16 or torch.bfloat16, or as they are, not {dtype}")
