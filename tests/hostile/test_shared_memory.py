"""Trainers that ask for memory they may not have, or write to theirs what they should not."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from random import Random
from threading import Event

import pytest
import torch

from pserver.errors import DeadlineExceeded, InvalidRequest, ModelFailed
from pserver.server.memory_proof import NONCE_BYTES, MemoryProof
from pserver.transport.gen import shards_pb2
from pserver.wire.shm import map_segment
from tests.hostile.world import WAIT_S, Trainer, WireModel, World, model_spec, num_staged
from tests.waiting import until


@pytest.fixture
def attacker(world: World) -> Trainer:
    return Trainer(world)


@pytest.fixture
def victims(attacker: Trainer, world: World) -> WireModel:
    """The victim's model, as the attacker addresses it."""
    return WireModel(attacker, world.victim_model.spec, world.victim_model.epoch)


@pytest.fixture
def model(attacker: Trainer) -> WireModel:
    """The attacker's own, ready."""
    return attacker.model(model_spec("own"))


def in_memory(model: WireModel, words: Callable[[int], int], value: float = 0.0) -> shards_pb2.StepRequest:
    """A push that says that it lies in the mailbox, where every bucket has the word made of its sequence number."""
    request = model.push_request({}, in_memory=True)
    del request.chunks[:]
    for bucket in model.mailbox().offsets.buckets:
        model.mailbox().tensor_of(bucket).fill_(value)
        model.mailbox().set_word(bucket.index, words(request.push_id.sequence))
    return request


# Who may have memory


@pytest.mark.parametrize(
    "nonce",
    [b"", b"x", bytes(NONCE_BYTES), b"x" * NONCE_BYTES, bytes(NONCE_BYTES + 1), bytes(1 << 20)],
    ids=["none", "short", "zeros", "wrong", "long", "very long"],
)
def test_a_nonce_that_nobody_gave_is_refused_and_no_mailbox_made(
    nonce: bytes, victims: WireModel, world: World
) -> None:
    with pytest.raises(InvalidRequest, match="not what this server's segment holds; ask FindMemory"):
        world.call("OpenMemory", victims.open_memory_request(nonce=nonce))
    assert world.footprint().num_mailboxes == 0


def test_the_nonce_of_another_server_is_refused(victims: WireModel, world: World) -> None:
    other = MemoryProof(enabled=True)
    nonce = bytes(map_segment(other.segment(), writable=False))
    with pytest.raises(InvalidRequest, match="ask FindMemory"):
        world.call("OpenMemory", victims.open_memory_request(nonce=nonce))
    other.close()


def test_memory_that_is_asked_for_again_and_again_is_made_once(victims: WireModel, world: World) -> None:
    found = {world.call("FindMemory", shards_pb2.FindMemoryRequest())[0].segment for _ in range(50)}
    assert len(found) == 1
    request = victims.open_memory_request()
    opened = {(each.values, each.mailbox) for _ in range(50) for each in world.call("OpenMemory", request)}
    assert len(opened) == 1
    assert world.footprint().num_mailboxes == 1


def test_a_mailbox_under_another_trainers_id_is_that_trainers(victims: WireModel, world: World) -> None:
    """Ids are names, not proofs: whoever uses one gets its mailbox, and the trainer the same one later."""
    victim = world.victim
    (opened,) = world.call("OpenMemory", victims.open_memory_request(trainer_id=victim.trainer_id))
    (again,) = world.call("OpenMemory", world.victim_model.open_memory_request())
    assert opened == again
    world.check_victim()


def test_values_that_were_given_away_cannot_be_written_through_what_is_given(victims: WireModel, world: World) -> None:
    (opened,) = world.call("OpenMemory", victims.open_memory_request())
    with pytest.raises(TypeError, match="read-only"):
        map_segment(opened.values, writable=False)[5000] = 1
    world.check_victim()


# What a push in memory may say


def test_a_push_in_memory_without_a_mailbox_is_refused(victims: WireModel, world: World) -> None:
    request = victims.push_request({}, in_memory=True)
    for sent in (request, shards_pb2.StepRequest(shard=request.shard, push_id=request.push_id, in_memory=True)):
        with pytest.raises(InvalidRequest, match=f"trainer {victims.trainer.trainer_id} has no mailbox here"):
            world.call("StepOnce", sent)
    assert world.footprint().num_contexts == 0


@pytest.mark.parametrize(
    "word",
    [lambda sequence: 0, lambda sequence: sequence - 1, lambda sequence: sequence + 1, lambda sequence: -sequence,
     lambda sequence: (1 << 63) - 1, lambda sequence: -(1 << 63)],
    ids=["none", "the one before", "the next", "negative", "largest", "smallest"],
)  # fmt: skip
def test_a_push_whose_words_are_of_none_or_another_is_refused(
    word: Callable[[int], int], victims: WireModel, world: World
) -> None:
    with pytest.raises(InvalidRequest, match="in every bucket, but holds the pushes"):
        world.call("StepOnce", in_memory(victims, word))
    assert world.footprint().num_contexts == 0


def test_a_message_of_a_step_beyond_the_limit_is_refused(victims: WireModel, world: World) -> None:
    request = victims.push_request({}, context_id=1)
    request.chunks[0].data = bytes(17 << 20)
    with pytest.raises(InvalidRequest, match="at most 16777216 are accepted"):
        world.call("StepOnce", request)
    assert world.footprint().num_contexts == 0


def test_a_bucket_far_too_long_is_refused(victims: WireModel, world: World) -> None:
    request = victims.push_request({}, context_id=1)
    request.chunks[0].data = bytes(15 << 20)
    with pytest.raises(InvalidRequest, match=f"got {15 << 20} bytes from byte 0 on"):
        world.call("StepOnce", request)
    assert world.footprint().num_contexts == 0


@pytest.mark.parametrize("by_memory", [True, False])
def test_contexts_without_end_are_refused_in_one_message_as_well(
    by_memory: bool, victims: WireModel, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pserver.core.contexts.MAX_CONTEXTS_PER_TRAINER", 20)

    def push() -> None:
        request = in_memory(victims, lambda sequence: sequence) if by_memory else victims.push_request({})
        world.call("StepOnce", request)

    for _ in range(20):
        push()
    with pytest.raises(InvalidRequest, match="20 contexts"):
        push()
    assert world.footprint().num_contexts == 20


# What is written when it should not be


def test_a_trainer_that_writes_to_its_mailbox_all_the_time_harms_its_own_model_alone(
    model: WireModel, world: World
) -> None:
    """Each of its steps is taken, refused, or fails its model by name."""
    stop = Event()
    random = Random(1)

    def scribble() -> None:
        for sequence in iter(lambda: random.randrange(100), None):
            for bucket in model.mailbox().offsets.buckets:
                model.mailbox().set_word(bucket.index, sequence)
                model.mailbox().tensor_of(bucket).fill_(torch.nan)
            if stop.is_set():
                return

    model.mailbox()
    with ThreadPoolExecutor(1) as threads:
        scribbling = threads.submit(scribble)
        for _ in range(30):
            request = in_memory(model, lambda sequence: sequence)
            request.commit.CopyFrom(model.commit(base_round=1 << 30))
            request.wait_s = WAIT_S
            with suppress(InvalidRequest, ModelFailed, DeadlineExceeded):
                world.call("StepOnce", request)
            world.check_victim()
        stop.set()
        scribbling.result()


def test_gradients_that_are_noise_are_a_models_own_affair(model: WireModel, world: World) -> None:
    generator = torch.Generator().manual_seed(3)
    for number in range(1, 5):
        request = in_memory(model, lambda sequence: sequence)
        for bucket in model.mailbox().offsets.buckets:
            memory = model.mailbox().bytes_of(bucket.index)
            memory[:] = bytes(torch.randint(256, (len(memory),), generator=generator, dtype=torch.uint8).tolist())
        request.commit.CopyFrom(model.commit(base_round=number - 1))
        request.wait_s = 5.0
        (reply,) = world.call("StepOnce", request)
        assert reply.outcome.round == number
        world.check_victim()


# What waits


@pytest.fixture
def waiting_commit(victims: WireModel) -> shards_pb2.StepRequest:
    """A commit that enters no round, since its trainer is not attached; every repeat of it waits for 2 s."""
    return victims.push_request({}, context_id=5, commit=victims.commit(), wait_s=2.0)


@pytest.mark.parametrize("name", ["Step", "StepOnce"])
def test_what_waits_for_a_round_holds_none_of_the_bytes_that_came(
    name: str, waiting_commit: shards_pb2.StepRequest, world: World
) -> None:
    """A trainer may repeat a commit as often as it likes, and each repeat brings a whole shard of gradients."""
    calls = [world.hold(name, waiting_commit) for _ in range(20)]
    for call in calls:
        call.end()
    until(lambda: world.footprint().num_contexts == 1, "the commit arrives")
    until(lambda: num_staged() == 0, lambda: f"{num_staged()} are still held")
    for call in calls:
        assert isinstance(call.outcome().error, DeadlineExceeded)
