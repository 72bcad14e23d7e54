"""The peers do the work that they are timed for."""

import pytest
import torch

from benchmarks.parameters import LEARNING_RATE, make_parameters
from benchmarks.peers.grpc_call import MESSAGE_BYTES, grpc_call
from benchmarks.peers.torch_rpc import IMPLEMENTATIONS, ParameterServer, torch_rpc_peer


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_torch_rpc_server_takes_one_sgd_step(implementation: str) -> None:
    gradients = [parameter.grad for parameter in make_parameters(3, 1200)]

    stepped = ParameterServer(num_tensors=3, num_bytes=1200).step(implementation, gradients)

    torch.testing.assert_close(stepped, [-LEARNING_RATE * gradient for gradient in gradients])


def test_parameters_are_the_same_for_everyone_and_of_the_size_asked_for() -> None:
    ours, theirs = make_parameters(50, 10_000), make_parameters(50, 10_000)

    assert sum(parameter.numel() * parameter.element_size() for parameter in ours) == 10_000
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours, theirs, strict=True))


def test_grpc_call_comes_back_with_what_it_sent() -> None:
    with grpc_call() as call:
        assert call() == bytes(MESSAGE_BYTES)


def test_torch_rpc_trainer_measures_a_step_with_each_implementation() -> None:
    with torch_rpc_peer(num_tensors=2, num_bytes=8000) as peers:
        assert len(peers) == len(IMPLEMENTATIONS)
        assert all(side() > 0 for side in peers.values())
