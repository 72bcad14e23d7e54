"""Where memory cannot be shared, messages go instead, and one line a shard says why; unless memory is wanted."""

import errno
import logging
import os
import platform
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from pserver.client import shard_client
from pserver.errors import ServerErrors, SharedMemoryUnavailable
from pserver.server.memory_proof import NONCE_BYTES, MemoryProof
from pserver.transport.faults import Fault, FaultKind, FaultPlan
from tests.service.grpc_cluster import GrpcCluster
from tests.service.weight import Weight

NUM_SERVERS = 2
LOGGER = "pserver.client.shards"

Trouble = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is wrong, and what the line says of it."""

    trouble: Trouble = lambda patch: None
    reason: str
    shared_memory: bool = True


def only_room_for(fits: Callable[[int], bool]) -> Trouble:
    """Memory that has room for segments of some sizes only."""

    def trouble(patch: pytest.MonkeyPatch) -> None:
        take = os.posix_fallocate

        def take_if_it_fits(file: int, offset: int, num_bytes: int) -> None:
            if not fits(num_bytes):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            take(file, offset, num_bytes)

        patch.setattr(os, "posix_fallocate", take_if_it_fits)

    return trouble


def room_for_all_but_mailboxes(patch: pytest.MonkeyPatch) -> None:
    """Each server makes its values when the model is registered, and a mailbox later."""
    num_made = 0

    def fits(num_bytes: int) -> bool:
        nonlocal num_made
        num_made += num_bytes != NONCE_BYTES
        return num_made <= NUM_SERVERS

    only_room_for(fits)(patch)


def another_machine(patch: pytest.MonkeyPatch) -> None:
    """The segment that the server names is not here."""
    patch.setattr(MemoryProof, "segment", lambda proof: "pserver-" + "0" * 32)


def another_processor(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(platform, "machine", lambda: "aarch64")


def another_processor_here(patch: pytest.MonkeyPatch) -> None:
    """The servers' is a good one, or they would share nothing."""

    def map_segment(name: str, *, writable: bool) -> memoryview:
        raise SharedMemoryUnavailable("this processor does not keep stores in order")

    patch.setattr(shard_client, "map_segment", map_segment)


CASES = {
    "/dev/shm is full": Case(trouble=only_room_for(lambda num_bytes: False), reason=f"no room for {NONCE_BYTES} bytes"),
    "no room for values": Case(
        trouble=only_room_for(lambda num_bytes: num_bytes == NONCE_BYTES),
        reason="this shard's values are not in shared memory; the server's log says why",
    ),
    "no room for a mailbox": Case(
        trouble=room_for_all_but_mailboxes, reason=r"no room for \d+ bytes \(No space left on device\)"
    ),
    "switched off": Case(shared_memory=False, reason="the server was started with --no-shared-memory"),
    "another machine": Case(trouble=another_machine, reason="pserver-0{32} cannot be opened: No such file"),
    "another processor": Case(trouble=another_processor, reason="keeps stores in order .*, but this is aarch64"),
    "another processor on the trainer": Case(
        trouble=another_processor_here, reason="this processor does not keep stores in order"
    ),
}


@contextmanager
def in_trouble(case: Case, patch: pytest.MonkeyPatch) -> Iterator[GrpcCluster]:
    with patch.context() as troubled:
        case.trouble(troubled)
        with GrpcCluster(NUM_SERVERS, shared_memory=case.shared_memory) as running:
            yield running


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_steps_go_in_messages_and_one_line_a_shard_says_why(
    case: Case, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger=LOGGER), in_trouble(case, monkeypatch) as cluster:
        with cluster.connect() as session:
            weight = Weight(session, name)
            for number in range(1, 4):
                assert weight.step(2.0).round == number
            assert weight.number == -6.0
        lines = [each.getMessage() for each in caplog.records if each.name == LOGGER]
        assert len(lines) == NUM_SERVERS
        for address, (number, line) in zip(cluster.addresses, enumerate(sorted(lines)), strict=True):
            where = f"server s{number} at {address}"
            assert line.startswith(f"model {name}: {where} is reached by messages, not shared memory: ")
            assert re.search(case.reason, line), line


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_whoever_wants_memory_and_nothing_else_is_told_by_name(
    case: Case, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with in_trouble(case, monkeypatch) as cluster, cluster.connect(transport="shm") as session:
        with pytest.raises((SharedMemoryUnavailable, ServerErrors)) as raised:
            Weight(session, name)
        errors = raised.value.exceptions if isinstance(raised.value, ServerErrors) else [raised.value]
        for error in errors:
            assert type(error) is SharedMemoryUnavailable
            assert re.search(r"^server s\d at 127\.0\.0\.1:\d+: transport is 'shm', but ", str(error))
            assert re.search(case.reason, str(error))


def test_who_wants_messages_asks_for_no_memory(
    name: str, cluster: GrpcCluster, caplog: pytest.LogCaptureFixture
) -> None:
    plan = FaultPlan([Fault(kind=FaultKind.LOSE_REQUEST, method=each) for each in ("FindMemory", "OpenMemory")])
    with caplog.at_level(logging.INFO, logger=LOGGER), cluster.connect(transport="grpc", plan=plan) as session:
        assert Weight(session, name).step(1.0).accepted
    assert plan.struck == 0
    assert [each for each in caplog.records if each.name == LOGGER] == []


def test_a_trainer_that_shares_memory_has_nothing_to_say(
    name: str, cluster: GrpcCluster, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger=LOGGER), cluster.connect() as session:
        weight = Weight(session, name)
        assert weight.step(1.0).accepted
        assert weight.optimizer._model is not None
        assert all(each.readable is not None for each in weight.optimizer._model._shards._clients)
    assert [each for each in caplog.records if each.name == LOGGER] == []


def test_memory_of_one_server_and_messages_of_another_make_one_model(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with GrpcCluster(NUM_SERVERS) as cluster, caplog.at_level(logging.INFO, logger=LOGGER):
        monkeypatch.setattr(cluster.nodes[1].shards, "proof", MemoryProof(enabled=False))
        with cluster.connect(0, 2) as first, cluster.connect(1, 2) as second:
            weights = Weight(first, name), Weight(second, name)
            assert weights[0].optimizer._model is not None
            shards = weights[0].optimizer._model._shards._clients
            assert [each.readable is not None for each in shards] == [True, False]
            for number in range(1, 4):
                with ThreadPoolExecutor(2) as threads:
                    for result in threads.map(lambda weight: weight.step(2.0), weights):
                        assert (result.round, result.num_trainers) == (number, 2)
            assert [each.number for each in weights] == [-6.0, -6.0]
    lines = [each.getMessage() for each in caplog.records if each.name == LOGGER]
    assert len(lines) == 2, "one a trainer, of the one shard"
    assert all("server s1" in line for line in lines)
