"""A parameter server for PyTorch. The public names, and nothing else.

Names are loaded on first use, so that command line tools that need no torch start fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pserver import autograd, compress, errors, optim
    from pserver.client.cluster import Cluster, ClusterStatistics, connect
    from pserver.client.distributed import DistributedModel, distribute
    from pserver.client.step_counts import ModelStatistics
    from pserver.core.sync import Async, Bsp, Ssp
    from pserver.types import ClusterStatus, StepResult

__all__ = [
    "Async",
    "Bsp",
    "Cluster",
    "ClusterStatistics",
    "ClusterStatus",
    "DistributedModel",
    "ModelStatistics",
    "Ssp",
    "StepResult",
    "autograd",
    "compress",
    "connect",
    "distribute",
    "errors",
    "optim",
]

_HOMES = {
    "Async": "pserver.core.sync",
    "Bsp": "pserver.core.sync",
    "Cluster": "pserver.client.cluster",
    "ClusterStatistics": "pserver.client.cluster",
    "ClusterStatus": "pserver.types",
    "DistributedModel": "pserver.client.distributed",
    "ModelStatistics": "pserver.client.step_counts",
    "Ssp": "pserver.core.sync",
    "StepResult": "pserver.types",
    "connect": "pserver.client.cluster",
    "distribute": "pserver.client.distributed",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in __all__:
        return import_module(f"pserver.{name}")
    raise AttributeError(f"module 'pserver' has no attribute {name!r}; public names: {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
