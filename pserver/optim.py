"""Optimizers whose steps happen on servers."""

from pserver.client.distributed import DistributedOptimizer
from pserver.client.optimizers import RemoteOptimizer
from pserver.core.optimizers import register_optimizer

__all__ = ["DistributedOptimizer", "RemoteOptimizer", "register_optimizer"]
