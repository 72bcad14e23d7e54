"""Gradients in shared memory: whose they are, who is refused, what is noticed, and when the memory is freed."""

import asyncio
import os
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch

from pserver.core.messages import EndTrainer
from pserver.errors import (
    DeadlineExceeded,
    InvalidRequest,
    ModelFailed,
    SharedMemoryUnavailable,
    TrainerEnded,
)
from pserver.server.hosted_shard import HostedShard
from pserver.server.shard_service import ShardService
from pserver.wire import shm
from tests.routes import MEMORY
from tests.service.grpc_cluster import GrpcCluster
from tests.service.weight import Weight
from tests.service.wire_trainer import WireModel, WireTrainer, everywhere
from tests.waiting import set_timeout, until

#: Of trainers' leases in tests that wait for their end.
LEASE_S = 2.0


@pytest.fixture
def trainer(cluster: GrpcCluster) -> Iterator[WireTrainer]:
    joined = WireTrainer(cluster)
    yield joined
    joined.leave()


@pytest.fixture
def model(trainer: WireTrainer, name: str) -> WireModel:
    """A model of zeros."""
    return trainer.model(name)


def hosted(cluster: GrpcCluster, name: str, server: int = 0) -> HostedShard:
    return cluster.nodes[server].shards._shards[name, server]


def mailboxes(cluster: GrpcCluster, name: str, server: int = 0) -> list[int]:
    """Trainers that have one."""
    memory = hosted(cluster, name, server).memory
    assert memory is not None
    return sorted(memory._mailboxes)


def segments() -> set[str]:
    """Names of those that this process has made or mapped, as far as they have one."""
    open_files = set()
    for each in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # it has been closed
            found = os.fstat(int(each))
            open_files.add((found.st_dev, found.st_ino))
    names = set()
    for path in shm.DIRECTORY.glob("pserver-*"):
        with suppress(FileNotFoundError):  # it has been removed
            found = path.stat()
            names |= {path.name} if (found.st_dev, found.st_ino) in open_files else set()
    return names


# What a step through memory may say


def test_a_push_whose_words_are_of_another_push_is_refused_and_the_right_one_taken(model: WireModel) -> None:
    mailbox = model.mailbox()
    for words in (0, 1 << 40, -1):
        request = model.step_request(0, 2.0, chunks=[], in_memory=True, context_id=7)
        mailbox.set_word(0, words)
        with pytest.raises(InvalidRequest, match=rf"should hold its push \d+ in every bucket, .* pushes \[{words}\]"):
            model.call("StepOnce", request)
        assert model.trainer.cluster.num_contexts(model.name) == [0, 0]
    model.push(model.step_request(0, 2.0, context_id=7), MEMORY)
    assert model.trainer.cluster.num_contexts(model.name) == [1, 0]


def test_a_push_in_memory_without_a_mailbox_is_refused(model: WireModel) -> None:
    with pytest.raises(InvalidRequest, match="has no mailbox here; open one, or send messages"):
        model.call("StepOnce", model.step_request(0, 2.0, chunks=[], in_memory=True))


def test_another_trainers_mailbox_is_not_read(model: WireModel, cluster: GrpcCluster) -> None:
    """A push is read in the mailbox of the trainer in its id, whoever sends it."""
    other = WireTrainer(cluster)
    theirs = model.of(other)
    model.push(model.step_request(0, 2.0, context_id=7), MEMORY)
    with pytest.raises(InvalidRequest, match=f"trainer {other.trainer_id} has no mailbox"):
        theirs.call("StepOnce", theirs.step_request(0, 2.0, chunks=[], in_memory=True))
    theirs.mailbox()
    with pytest.raises(InvalidRequest, match=f"mailbox of trainer {other.trainer_id} should hold"):
        theirs.call("StepOnce", theirs.step_request(0, 2.0, chunks=[], in_memory=True))
    other.leave()


def test_chunks_beside_a_push_in_memory_do_not_count(model: WireModel) -> None:
    for server in (0, 1):
        model.push(model.step_request(server, 2.0, context_id=1001), MEMORY, server=server)
    commit = model.commit(1)
    with pytest.raises(DeadlineExceeded):
        model.call("StepOnce", model.step_request(0, 7.0, chunks=[], context_id=1001, commit=commit, wait_s=0.0))
    model.call("StepOnce", model.step_request(1, 7.0, chunks=[], context_id=1001, commit=commit), server=1)
    assert [model.values(0), model.values(1)] == [everywhere(-2.0)] * 2


def test_a_reply_without_values_has_none_and_the_memory_has_them(model: WireModel) -> None:
    commit = model.commit(1)
    with pytest.raises(DeadlineExceeded):
        model.push(model.step_request(0, 2.0, commit=commit, wait_s=0.0), MEMORY)
    (reply,) = model.push(model.step_request(1, 2.0, commit=commit), MEMORY, server=1)
    assert (reply.outcome.accepted, reply.outcome.round, list(reply.chunks)) == (True, 1, [])
    memory = hosted(model.trainer.cluster, model.name, 1).memory
    assert memory is not None
    assert memory._values.words() == [2]


# What is noticed


def test_a_gradient_that_is_written_over_before_its_round_fails_the_model_by_name(
    model: WireModel, cluster: GrpcCluster
) -> None:
    with pytest.raises(DeadlineExceeded):
        model.push(model.step_request(0, 2.0, commit=model.commit(1), wait_s=0.0), MEMORY)
    model.mailbox().bytes_of(0)[:] = bytes(len(model.mailbox().bytes_of(0)))
    model.mailbox().set_word(0, 99)
    with suppress(ModelFailed):  # the other shard has no reason to fail, and may answer before it hears
        model.push(model.step_request(1, 2.0, commit=model.commit(1)), MEMORY, server=1)
    until(lambda: cluster.model_status(model.name).state == "failed", "the model has failed")
    with pytest.raises(ModelFailed, match=f"trainer {model.trainer.trainer_id} wrote to the memory of its push before"):
        model.values(0)


def test_a_client_that_makes_its_next_gradient_ready_too_early_is_noticed(name: str) -> None:
    """It has not announced it: the values alone have changed."""
    with GrpcCluster(1) as own, own.connect(0, 2) as early, own.connect(1, 2) as other:
        weight, others = Weight(early, name), Weight(other, name)
        set_timeout(early, 0.5)
        with pytest.raises(TimeoutError):
            weight.step(1.0)
        shared = weight.optimizer._model
        assert shared is not None
        shared._shards.prepare()
        shared._shards.gather({0: torch.full((64,), 100.0)}, {0}, None)
        with pytest.raises(ModelFailed, match=f"trainer {early.trainer_id} wrote to the memory of its push before"):
            others.step(5.0)


def test_a_step_that_waits_keeps_its_gradient_while_another_one_is_computed(cluster: GrpcCluster, name: str) -> None:
    """Whoever steps again after a timeout settles the first step, with the gradient of then, before it writes."""
    with cluster.connect(0, 2, transport="shm") as impatient, cluster.connect(1, 2, transport="shm") as patient:
        weight, others = Weight(impatient, name), Weight(patient, name)
        set_timeout(impatient, 0.5)
        with pytest.raises(TimeoutError):
            weight.step(2.0)
        with pytest.raises(TimeoutError):
            weight.step(64.0)
        assert others.step(4.0).num_trainers == 2
        assert others.number == -3.0


def test_a_push_without_a_commit_is_copied_once_and_its_mailbox_free_again(model: WireModel) -> None:
    for server in (0, 1):
        request = model.step_request(server, 2.0, context_id=1001)
        for _ in range(3):
            assert model.push(request, MEMORY, server=server) == []
        model.push(model.step_request(server, 4.0, context_id=1001), MEMORY, server=server)
        model.mailbox(server).bytes_of(server)[:] = bytes(len(model.mailbox(server).bytes_of(server)))
    commit = model.commit(1)
    with pytest.raises(DeadlineExceeded):
        model.push(model.step_request(0, 0.0, chunks=[], context_id=1001, commit=commit, wait_s=0.0), MEMORY)
    model.push(model.step_request(1, 0.0, chunks=[], context_id=1001, commit=commit), MEMORY, server=1)
    assert [model.values(0), model.values(1)] == [everywhere(-6.0)] * 2


# When it is freed


def test_a_mailbox_is_freed_when_its_trainer_leaves(cluster: GrpcCluster, name: str) -> None:
    before = segments()
    trainer = WireTrainer(cluster)
    model = trainer.model(name)
    for server in (0, 1):
        model.mailbox(server)
        assert mailboxes(cluster, name, server) == [trainer.trainer_id]
    assert len(segments() - before) == 4, "values and a mailbox on each server"
    trainer.leave()
    for server in (0, 1):
        until(lambda server=server: mailboxes(cluster, name, server) == [], "the mailbox is freed")
    until(lambda: len(segments() - before) == 2, "only the values are left")


def test_a_mailbox_is_freed_when_its_trainers_lease_ends_and_others_keep_theirs(name: str) -> None:
    with GrpcCluster(1, trainer_lease_s=LEASE_S) as own:
        silent = WireTrainer(own, rank=1)
        with own.connect(0, 1, transport="shm") as session:
            weight = Weight(session, name)
            silent.renew()
            silent.model(name).mailbox()
            assert mailboxes(own, name) == sorted([session.trainer_id, silent.trainer_id])
            until(lambda: mailboxes(own, name) == [session.trainer_id], "the mailbox is freed")
            assert weight.step(1.0).accepted


def test_everything_is_freed_when_the_model_is_dropped(cluster: GrpcCluster, name: str) -> None:
    before = segments()
    with cluster.connect(transport="shm") as session:
        weight = Weight(session, name)
        weight.step(1.0)
        assert len(segments() - before) == 4
        session.drop_model(name)
        until(lambda: cluster.num_contexts(name) == [-1, -1], "the shards are gone")
        until(lambda: segments() <= before, lambda: f"still there: {segments() - before}")


def test_memory_of_a_former_description_is_freed_and_that_of_the_new_one_used(cluster: GrpcCluster, name: str) -> None:
    with cluster.connect(transport="shm") as session:
        weight = Weight(session, name)
        weight.step(1.0)
        before = segments()
        weight.optimizer.load_state_dict(weight.optimizer.state_dict())
        weight.step(1.0)
        assert weight.number == -2.0
        until(lambda: len(segments()) == len(before), "as many as before")
        assert len(segments() & before) == len(before) - 4, "none of them are the same"


def test_who_opens_a_mailbox_while_its_lease_ends_gets_none(model: WireModel, cluster: GrpcCluster) -> None:
    """The request waits for the shard; the end of the lease comes before it does."""
    node, shard = cluster.nodes[0], hosted(cluster, model.name)
    request = model.open_memory_request()
    ended = EndTrainer(trainer_id=model.trainer.trainer_id)

    async def scenario() -> None:
        async with shard._lock:
            opening = asyncio.ensure_future(ShardService(node.shards).open_memory(request))
            await asyncio.sleep(0)
            ending = asyncio.ensure_future(node.shards.handle(ended))
            await asyncio.sleep(0)
            assert not opening.done()
        await ending
        await opening

    with pytest.raises(TrainerEnded, match=str(model.trainer.trainer_id)):
        cluster.loop.run(scenario())
    assert mailboxes(cluster, model.name) == []


def test_who_opens_a_mailbox_of_a_model_that_has_just_failed_gets_none(model: WireModel, cluster: GrpcCluster) -> None:
    before = segments()
    shard = hosted(cluster, model.name)
    shard.close_memory()
    with pytest.raises(SharedMemoryUnavailable, match="the model has ended"):
        model.mailbox()
    assert segments() < before
