"""Starting in any order, and what happens when the rest never comes; Ctrl-C in the middle of it all."""

import signal
import time
from collections.abc import Iterator

import pytest

from tests.cluster.processes import SERVER_LEASE_S, START_S, Cluster, Pool, Server, Start, unused_address

STOP_S = 2.0
LEAVE_S = 6.0


@pytest.fixture(scope="module")
def late_cluster(pool: Pool) -> Iterator[Cluster]:
    """A cluster whose trainer came first, then its second server, and the coordinator last.

    A third server has not had that much patience.
    """
    servers: list[Server] = []
    try:
        with unused_address() as address, pool.trainers(1) as (trainer,):
            trainer.tell("join", address, 0, 1, START_S)
            servers += [Server(name, "--join", address) for name in ("s1", "impatient")]
            for server in servers:
                server.wait_for(f"not linked to the coordinator at {address}, still trying", START_S, stream="stderr")
            trainer.wait_for(f"joining: coordinator at {address}: still trying", stream="stderr")
            other, impatient = servers
            assert_sigint_ends(impatient)
            assert impatient.stdout == []

            coordinator = Server("s0", "--coordinator", "--port", address.split(":")[1])
            servers.append(coordinator)
            cluster = Cluster([coordinator, other])
            other.address()
            reply = trainer.reply(START_S)
            assert not reply.error
            assert reply.seconds > 2.0
            trainer.ask("model", "late", timeout_s=START_S)
            assert trainer.ask("steps", 3)["round"] == 3
            trainer.ask("leave")
        yield cluster
    finally:
        for server in servers:
            server.close()


def assert_sigint_ends(server: Server) -> None:
    begin_s = time.monotonic()
    server.send(signal.SIGINT)
    assert server.wait() == 0
    assert time.monotonic() - begin_s < STOP_S
    assert "Traceback" not in server.stderr


def test_processes_may_start_in_any_order(late_cluster: Cluster) -> None:
    assert late_cluster.coordinator.address() == late_cluster.address
    assert [shard.server for shard in late_cluster.model("late").shards] == ["s0", "s1"]
    assert late_cluster.model("late").round == 3


def test_leaving_takes_seconds_at_most_if_the_coordinator_hangs(pool: Pool, late_cluster: Cluster) -> None:
    coordinator = late_cluster.coordinator
    with pool.trainers(1) as (trainer,):
        # A rank of its own: it cannot say goodbye, so its lease goes on for a while.
        trainer.join(late_cluster.address, rank=7, world_size=8)
        coordinator.send(signal.SIGSTOP)
        try:
            trainer.tell("leave")
            reply = trainer.reply()
        finally:
            coordinator.send(signal.SIGCONT)
        assert not reply.error
        assert reply.seconds < LEAVE_S
    # Nobody has lost a lease: the coordinator knows that it was itself away.
    late_cluster.wait_until(lambda status: all(each.silent_s < SERVER_LEASE_S / 2 for each in status.servers))
    assert all(each.alive for each in late_cluster.status().servers)


def test_sigint_ends_servers_at_once_though_a_trainer_waits(pool: Pool, late_cluster: Cluster) -> None:
    coordinator, other = late_cluster.coordinator, late_cluster.other
    with pool.trainers(1) as (trainer,):
        trainer.join(late_cluster.address, world_size=2, timeout_s=8.0)
        trainer.ask("model", "waits")
        trainer.tell("steps", 1)
        late_cluster.wait_for_round("waits", 0, waiting_for=(), missing=1)
        assert_sigint_ends(coordinator)
        # The loss of the coordinator alone ends no server: it goes on trying.
        other.wait_for(r"not linked to the coordinator.* still trying", stream="stderr", skip=1)
        assert_sigint_ends(other)
        assert late_cluster.address in trainer.reply().error


def test_trainer_gives_up_by_name_if_nothing_is_ever_started(pool: Pool) -> None:
    with unused_address() as address, pool.trainers(1) as (trainer,):
        said_before = trainer.stderr
        trainer.tell("join", address, 0, 1, 7.0)
        reply = trainer.reply()
        assert reply.error.startswith("ServerUnavailable: ")
        assert f"coordinator at {address}: gave up after 7 s" in reply.error
        assert reply.seconds < 8.0
        said = trainer.stderr.removeprefix(said_before).strip().splitlines()
        assert len(said) == 1, said
        assert f"joining: coordinator at {address}: still trying" in said[0]
        trainer.ask("leave")


@pytest.mark.slow
def test_joining_nowhere_gives_up_after_a_minute(start: Start) -> None:
    with unused_address() as address:
        server = start(Server, "s1", "--join", address)
        assert server.wait(START_S + 30.0) == 1
        assert f"pserver: error: the coordinator at {address} did not answer within 60 s" in server.stderr
        assert server.stdout == []
        assert "Traceback" not in server.stderr
