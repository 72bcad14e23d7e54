"""The peers do the work that they are timed for."""

import socket
import threading

import pytest
import torch

from benchmarks.models import MODELS, TrainingStep
from benchmarks.parameters import LEARNING_RATE, make_parameters
from benchmarks.peers.batch_rpc import BatchServer
from benchmarks.peers.ddp import ReadyGradients
from benchmarks.peers.floor_copy import FlatStep
from benchmarks.peers.floor_socket import receive_into, socket_floor
from benchmarks.peers.grpc_call import MESSAGE_BYTES, grpc_call
from benchmarks.peers.rpc import LOCAL, TCP, Wiring
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


def test_batch_server_answers_everybody_with_one_step_of_the_mean() -> None:
    server = BatchServer(num_tensors=3, num_bytes=1200, num_trainers=2)
    gradients = [parameter.grad for parameter in make_parameters(3, 1200)]

    first = server.add("fused", [gradient.clone() for gradient in gradients])
    assert not first.done()
    second = server.add("fused", [3 * gradient for gradient in gradients])

    expected = [-LEARNING_RATE * 2 * gradient for gradient in gradients]
    torch.testing.assert_close(first.value(), expected)
    torch.testing.assert_close(second.value(), expected)
    assert not server.add("fused", gradients).done()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_copy_floor_takes_one_sgd_step(implementation: str) -> None:
    flat = FlatStep(num_tensors=3, num_bytes=1200)

    flat.step(implementation)

    gradients = [parameter.grad for parameter in flat.parameters]
    stepped = [parameter.detach() for parameter in flat.parameters]
    torch.testing.assert_close(stepped, [-LEARNING_RATE * gradient for gradient in gradients])


def test_socket_floor_moves_the_bytes_there_and_back() -> None:
    with socket_floor(num_bytes=1000) as peers:
        assert all(side() > 0 for side in peers.values())


def test_received_bytes_fill_the_buffer_however_they_come() -> None:
    near, far = socket.socketpair()
    with near, far:
        buffer = bytearray(6)
        sender = threading.Thread(target=lambda: [far.sendall(part) for part in (b"a", b"bcd", b"ef")])
        sender.start()
        assert receive_into(near, memoryview(buffer))
        sender.join()
        assert buffer == b"abcdef"
        far.close()
        assert not receive_into(near, memoryview(buffer))


def test_backward_of_ready_gradients_hands_them_out() -> None:
    module = ReadyGradients(num_tensors=3, num_bytes=1200)

    module().backward()

    handed_out = [parameter.grad for parameter in module.parameters()]
    torch.testing.assert_close(handed_out, [parameter.grad for parameter in make_parameters(3, 1200)])


@pytest.mark.parametrize("name", MODELS)
def test_model_takes_a_training_step(name: str) -> None:
    model, inputs, targets = MODELS[name](0)
    before = [parameter.detach().clone() for parameter in model.parameters()]

    TrainingStep(model, torch.optim.SGD(model.parameters(), lr=0.1), inputs, targets)()

    assert not all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("wiring", [LOCAL, TCP], ids=lambda wiring: wiring.label)
def test_torch_rpc_trainer_measures_a_step_with_each_implementation(wiring: Wiring) -> None:
    with torch_rpc_peer(num_tensors=2, num_bytes=8000, wiring=wiring) as peers:
        assert len(peers) == len(IMPLEMENTATIONS)
        assert all(side() > 0 for side in peers.values())
