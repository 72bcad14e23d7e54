"""The smallest model that there is, as a program of one trainer."""

import torch

import pserver
from pserver.client.cluster import Cluster
from pserver.types import StepResult


class Weight:
    """One parameter in two buckets, trained by SGD with learning rate 1; all of its elements are equal."""

    def __init__(self, session: Cluster, name: str) -> None:
        self.value = torch.nn.Parameter(torch.zeros(64))
        self.optimizer = pserver.optim.RemoteOptimizer(
            torch.optim.SGD, [("weight", self.value)], lr=1.0, name=name, cluster=session, bucket_bytes=128
        )

    def step(self, gradient: float) -> StepResult:
        self.value.grad = torch.full((64,), gradient)
        self.optimizer.step()
        assert self.optimizer.last_result is not None
        return self.optimizer.last_result

    @property
    def number(self) -> float:
        assert self.value.min() == self.value.max()
        return self.value[0].item()
