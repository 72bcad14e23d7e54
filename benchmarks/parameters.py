"""The parameters and gradients that ours and the peer hold alike."""

import torch

FLOAT32_BYTES = 4
LEARNING_RATE = 0.1


def make_parameters(num_tensors: int, num_bytes: int) -> list[torch.nn.Parameter]:
    """fp32 parameters, all zero and of equal size, `num_bytes` together; each has the gradient of every step.

    The gradients come from a fixed seed: whoever calls this gets the same ones.
    """
    numel = num_bytes // FLOAT32_BYTES // num_tensors
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.zeros(numel)) for _ in range(num_tensors)]
    for parameter in parameters:
        parameter.grad = torch.randn(numel, generator=generator).mul_(1e-3)
    return parameters
