"""Optimizers whose steps happen on servers."""

from pserver.client.optimizers import DistributedOptimizer, RemoteOptimizer

__all__ = ["DistributedOptimizer", "RemoteOptimizer"]
