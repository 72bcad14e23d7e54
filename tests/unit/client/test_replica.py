"""What of a trainer's tensors may be sent, and whether they are still as the servers left them."""

from collections.abc import Sequence

import pytest
import torch

from pserver.client.description import ModelDescription, NamedTensor
from pserver.client.replica import Replica, model_device
from pserver.core.sync import Bsp
from pserver.errors import InvalidRequest
from pserver.wire.compress import NoCompression
from pserver.wire.layout import BUFFERS, STORED


def replica_of(tensors: Sequence[torch.Tensor], groups: Sequence[int] | None = None) -> Replica:
    """Of a model of tensors named t0, t1, ..., all in group 0 unless told otherwise."""
    named = [
        NamedTensor(name=f"t{index}", tensor=tensor, group=group)
        for index, (tensor, group) in enumerate(zip(tensors, groups or [0] * len(tensors), strict=True))
    ]
    description = ModelDescription(
        name="model",
        tensors=named,
        optimizer="SGD",
        optimizer_groups=({"lr": 1.0},),
        sync=Bsp(),
        buffers="lowest",
        bucket_bytes=0,
        compress=NoCompression(),
        pull_dtype=None,
        replicas=0,
    )
    return Replica(description, world_size=1)


def refuse(index: int, tensor: torch.Tensor) -> bool:
    """Of a server that holds other values."""
    return False


def test_gradients_and_buffers_are_sent_and_what_is_stored_is_not() -> None:
    tensors = [torch.ones(2), torch.ones(3), torch.ones(4), torch.ones(5)]
    replica = replica_of(tensors, [0, STORED, BUFFERS, 0])
    found = replica.to_send([torch.full((2,), 2.0), None])
    assert found.keys() == {0, 2, 3}
    assert found[0] is not None
    assert found[0][0] == 2.0
    assert found[2] is tensors[2]
    assert found[3] is None
    assert replica.exchanged.keys() == {0, 2, 3}


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        (torch.ones(4), r"\[4\] torch.float32 on cpu"),
        (torch.ones(3, 1), r"\[3, 1\] torch.float32 on cpu"),
        (torch.ones(3, dtype=torch.float64), r"\[3\] torch.float64 on cpu"),
        (torch.ones(3, device="meta"), r"\[3\] torch.float32 on meta"),
    ],
    ids=["shape", "dimensions", "dtype", "device"],
)
def test_a_gradient_unlike_its_parameter_is_refused_by_name(changed: torch.Tensor, found: str) -> None:
    replica = replica_of([torch.ones(2), torch.ones(3)])
    with pytest.raises(InvalidRequest, match=rf"'t1' was registered as \[3\] torch.float32 on cpu, .* {found}"):
        replica.to_send([torch.zeros(2), changed])


def test_a_sparse_gradient_is_refused_by_name() -> None:
    embedding = torch.nn.Embedding(4, 3, sparse=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    replica = replica_of([embedding.weight])
    with pytest.raises(InvalidRequest, match=r"gradient of 't0' is torch.sparse_coo; .*sparse=False"):
        replica.to_send([embedding.weight.grad])


def test_a_parameter_that_was_written_to_is_refused_by_name_unless_it_has_the_values_it_had() -> None:
    tensors = [torch.ones(2), torch.ones(3)]
    replica = replica_of(tensors)
    replica.written([0, 1])
    replica.check_unchanged(refuse)
    tensors[1].mul_(1.0)
    replica.check_unchanged(lambda index, tensor: index == 1 and torch.equal(tensor, torch.ones(3)))
    replica.check_unchanged(refuse)
    tensors[1].mul_(2.0)
    with pytest.raises(InvalidRequest, match=r"parameter 't1' was changed on this trainer since the last step"):
        replica.check_unchanged(refuse)


def test_parameters_that_were_being_written_when_that_was_interrupted_are_not_held_against_anybody() -> None:
    tensors = [torch.ones(2)]
    replica = replica_of(tensors)
    replica.written([0])
    replica.writing([0])
    tensors[0].zero_()
    replica.check_unchanged(refuse)


def test_each_parameter_counts_as_unchanged_from_when_it_was_written() -> None:
    """One that was given its values early, and then changed, is not forgiven when the others get theirs."""
    tensors = [torch.ones(2), torch.ones(3), torch.ones(4)]
    replica = replica_of(tensors, [0, 0, BUFFERS])
    replica.writing([0])
    replica.written([0])
    tensors[0].zero_()
    replica.writing([1, 2])
    replica.written([1, 2])
    tensors[2].zero_()  # buffers are the trainer's to write
    with pytest.raises(InvalidRequest, match="parameter 't0' was changed"):
        replica.check_unchanged(refuse)


def test_a_model_is_on_one_device_that_is_known() -> None:
    assert model_device([torch.ones(2), torch.ones(3)]) == torch.device("cpu")
    with pytest.raises(InvalidRequest, match=r"must be on one device, .*\['cpu', 'meta'\]"):
        model_device([torch.ones(2), torch.ones(3, device="meta")])
    with pytest.raises(InvalidRequest, match="CPU or CUDA device, but is on meta"):
        model_device([torch.ones(3, device="meta")])


def test_parts_are_runs_of_tensors_of_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pserver.client.replica.PART_BYTES", 16)
    tensors = [torch.ones(size) for size in (2, 3, 1, 0, 9, 4, 1)]
    replica = replica_of(tensors, [0, 0, STORED, 0, 0, BUFFERS, 0])
    assert [list(part) for part in replica.parts] == [[0, 1], [3, 4], [5], [6]]
    assert all(tensor is tensors[index] for part in replica.parts for index, tensor in part.items())


def test_a_bucket_is_complete_with_the_last_of_its_tensors() -> None:
    # Each tensor begins at a boundary of 64 bytes; buckets hold at least that.
    replica = replica_of([torch.ones(16), torch.ones(16), torch.ones(2048)])
    buckets = [{segment.tensor for segment in segments} for segments in replica.layout.segments]
    together = next(number for number, tensors in enumerate(buckets) if {0, 1} <= tensors)
    assert together not in replica.complete_with([0], {0})
    everything = {0, 1, 2}
    assert replica.complete_with([1], everything) == {number for number, tensors in enumerate(buckets) if 1 in tensors}
    assert replica.complete_with(everything, everything) == set(range(len(buckets)))
