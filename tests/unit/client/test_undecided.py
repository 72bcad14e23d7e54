"""What a codec remembers of gradients of which it is not known yet whether they are applied."""

from typing import Any

import pytest
import torch

from pserver.client.undecided import Undecided
from pserver.wire.compress import Codec, ErrorFeedback, GradBucket, Int8, PowerSGD, TensorSegment, TopK
from pserver.wire.layout import TensorSpec, build_layout

CONTEXT = 7
CODECS = [
    ErrorFeedback(TopK(ratio=0.25)),
    ErrorFeedback(PowerSGD(rank=1, start_iteration=1)),
    PowerSGD(rank=1, start_iteration=1),
    Int8(block=16),
]


class Trainer:
    """Encodes buckets of 8 x 8 elements, as a model does."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.state: Any = codec.make_state()
        self.undecided = Undecided(codec, self.state)

    def encode(self, seed: int, bucket: int = 0) -> bytes:
        segment = TensorSegment(tensor=bucket, start=0, stop=64, shape=(8, 8))
        buffer = torch.randn(64, generator=torch.Generator().manual_seed(seed))
        self.undecided.encoding([bucket])
        encoded = self.codec.encode(self.state, GradBucket(index=bucket, buffer=buffer, segments=(segment,)))
        return bytes(encoded.wait().numpy())

    def push(self, seed: int, context: int = CONTEXT, bucket: int = 0) -> bytes:
        data = self.encode(seed, bucket)
        self.undecided.add(context)
        return data

    def remembered(self) -> dict[str, torch.Tensor]:
        return {} if self.state is None else self.state.state_dict()


def assert_remember_the_same(one: Trainer, other: Trainer) -> None:
    found, expected = one.remembered(), other.remembered()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_what_is_encoded_once_more_for_a_push_is_encoded_as_if_for_the_first_time(codec: Codec) -> None:
    once, twice = Trainer(codec), Trainer(codec)
    for trainer in (once, twice):
        trainer.push(1)
        trainer.push(2, bucket=1)
    twice.encode(3)
    twice.encode(4)
    assert twice.push(6) == once.push(6)
    assert_remember_the_same(twice, once)
    for trainer in (once, twice):
        trainer.undecided.give_back(CONTEXT)
    assert_remember_the_same(twice, once)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_what_is_taken_back_before_it_was_pushed_leaves_nothing(codec: Codec) -> None:
    trainer, other = Trainer(codec), Trainer(codec)
    trainer.encode(1)
    trainer.encode(2, bucket=1)
    trainer.undecided.take_all_back()
    assert_remember_the_same(trainer, other)
    for each in (trainer, other):
        each.push(3)
    trainer.encode(4)
    trainer.encode(5, bucket=1)
    trainer.undecided.take_all_back()
    trainer.undecided.take_all_back()
    assert_remember_the_same(trainer, other)
    assert trainer.push(6) == other.push(6)


def test_what_was_pushed_and_not_applied_is_kept() -> None:
    trainer = Trainer(ErrorFeedback(TopK(ratio=0.25)))
    trainer.push(1)
    trainer.push(2)
    trainer.undecided.give_back(CONTEXT)
    expected = sum(torch.randn(64, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    torch.testing.assert_close(trainer.state.residuals[0], expected)
    trainer.undecided.give_back(CONTEXT)
    torch.testing.assert_close(trainer.state.residuals[0], expected)


def test_of_a_refused_push_the_others_of_its_context_are_left() -> None:
    trainer, other = Trainer(ErrorFeedback(TopK(ratio=0.25))), Trainer(ErrorFeedback(TopK(ratio=0.25)))
    for each in (trainer, other):
        each.push(1)
    trainer.push(2, bucket=1)
    trainer.undecided.give_back(CONTEXT, last_only=True)
    assert torch.equal(trainer.state.residuals[0], other.state.residuals[0])
    trainer.undecided.give_back(CONTEXT)
    other.undecided.give_back(CONTEXT)
    assert torch.equal(trainer.state.residuals[0], other.state.residuals[0])


def test_what_was_applied_is_forgotten() -> None:
    trainer = Trainer(ErrorFeedback(TopK(ratio=0.25)))
    trainer.push(1)
    before = trainer.state.residuals[0]
    trainer.undecided.forget(CONTEXT)
    trainer.undecided.give_back(CONTEXT)
    assert trainer.state.residuals[0] is before


def test_tensors_of_which_something_is_kept_are_known() -> None:
    specs = [TensorSpec(name=f"t{index}", shape=(8, 8), dtype=torch.float32, group=0) for index in range(2)]
    layout = build_layout(specs, 256)
    trainer = Trainer(ErrorFeedback(TopK(ratio=0.25)))
    trainer.push(1)
    assert trainer.undecided.kept_of({0, 1}, layout) == {0}
    assert trainer.undecided.kept_of({1}, layout) == set()
    assert Trainer(Int8()).undecided.kept_of({0}, layout) == set()
