"""What every store of coordinators promises: `CoordinationStore` in memory, in a directory and in etcd."""

import asyncio
import os
import shutil
import signal
import socket
import sqlite3
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from pserver.clock import ManualClock, SystemClock
from pserver.errors import ConfigError, InternalError, NotLeader, PserverError, StoreUnavailable
from pserver.server.coordination.etcd_messages import Json
from pserver.server.coordination.etcd_store import EtcdStore
from pserver.server.coordination.file_store import DATABASE, FileStore
from pserver.server.coordination.memory_store import MemoryStore
from pserver.server.coordination.open_store import open_store
from pserver.server.coordination.store import CoordinationStore
from tests.cluster.processes import Child
from tests.contract.stores import TTL_S, Place, etcd_place, etcd_store, file_place, memory_place
from tests.etcd_server import EtcdServer, NoEtcd, find_etcd
from tests.waiting import run_limited

#: Every scenario must be over by then.
LIMIT_S = 30.0
MEGABYTE = 1_000_000


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """One etcd for all tests that leave it running."""
    try:
        program = find_etcd()
    except NoEtcd as error:
        pytest.skip(str(error))
    server = EtcdServer(program, tmp_path_factory.mktemp("etcd"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    """Of the test's own keys."""
    return f"/{abs(hash(request.node.nodeid))}"


def place_of(kind: str, request: pytest.FixtureRequest) -> Place:
    if kind == "memory":
        return memory_place()
    if kind == "file":
        return file_place(request.getfixturevalue("tmp_path") / "coordinator")
    return etcd_place(request.getfixturevalue("etcd").endpoint, request.getfixturevalue("prefix"))


@pytest.fixture(params=["memory", "file", "etcd"])
def place(request: pytest.FixtureRequest) -> Place:
    """Each kind of store."""
    return place_of(request.param, request)


@pytest.fixture(params=["file", "etcd"])
def shared(request: pytest.FixtureRequest) -> Place:
    """Each kind of store that several processes share."""
    return place_of(request.param, request)


@pytest.fixture
def start() -> Iterator[Callable[..., Child]]:
    """Starts a candidate in a process of its own, which ends with the test."""
    children = []

    def candidate(*command: str) -> Child:
        children.append(Child("candidate", command))
        return children[-1]

    yield candidate
    for child in children:
        child.close()


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    """Polls until a condition holds."""
    give_up = time.monotonic() + LIMIT_S / 2
    while not await condition():
        assert time.monotonic() < give_up, f"not in time: {what}"
        await asyncio.sleep(0.01)


async def kept_by_next(place: Place) -> dict[str, bytes]:
    """What the next leader finds."""
    store = place.open()
    await store.lead("next:1")
    kept = await store.load()
    await store.close()
    return kept


async def led(place: Place) -> CoordinationStore:
    store = place.open()
    await store.lead("first:1")
    return store


# Every store


def test_terms_grow_across_leaders(place: Place) -> None:
    async def scenario() -> None:
        terms = []
        for _ in range(3):
            store = place.open()
            terms.append(await store.lead("a:1"))
            await store.write({"key": b"value"})
            await store.close()
        assert terms == sorted(set(terms))
        assert terms[0] > 0

    run_limited(scenario(), LIMIT_S)


def test_a_store_that_lost_its_leadership_may_lead_again_with_a_higher_term(shared: Place) -> None:
    async def scenario() -> None:
        store = shared.open()
        first = await store.lead("a:1")
        shared.depose()
        other = shared.open()
        second = await other.lead("b:1")
        with pytest.raises(NotLeader):
            await store.write({"k": b"v"})
        await other.close()
        assert first < second < await store.lead("a:1")
        await store.write({"k": b"v"})
        await store.close()

    run_limited(scenario(), LIMIT_S)


def test_what_is_written_is_loaded(place: Place) -> None:
    async def scenario() -> None:
        store = await led(place)
        assert await store.load() == {}
        await store.write({"a": b"1", "b": b"", "c": b"3"})
        await store.write({"a": b"2", "c": None, "never written": None})
        await store.write({})
        assert await store.load() == {"a": b"2", "b": b""}
        await store.close()

    run_limited(scenario(), LIMIT_S)


def test_what_is_written_is_loaded_by_the_next_leader_of_a_durable_store(shared: Place) -> None:
    async def scenario() -> None:
        store = await led(shared)
        assert store.durable
        await store.write({"a": b"1", "b": b"2"})
        await store.write({"b": None})
        await store.close()
        assert await kept_by_next(shared) == {"a": b"1"}

    run_limited(scenario(), LIMIT_S)


def test_repeating_a_write_is_harmless(place: Place) -> None:
    async def scenario() -> None:
        store = await led(place)
        for _ in range(3):
            await store.write({"a": b"1", "b": None})
        assert await store.load() == {"a": b"1"}
        await store.close()

    run_limited(scenario(), LIMIT_S)


def test_writes_side_by_side_happen_in_the_order_of_the_calls(place: Place) -> None:
    async def scenario() -> None:
        store = await led(place)
        await asyncio.gather(*(store.write({"last": b"%d" % number}) for number in range(20)))
        assert await store.load() == {"last": b"19"}
        await store.close()

    run_limited(scenario(), LIMIT_S)


def test_values_of_a_megabyte_and_many_keys_pass(place: Place) -> None:
    values = {"text": b"layer.weight " * (MEGABYTE // 13), "random": os.urandom(MEGABYTE)}

    async def scenario() -> None:
        store = await led(place)
        for key, value in values.items():
            await store.write({key: value})
        small = {f"trainers/{number:03}": b"%d" % number for number in range(100)}
        await store.write(small)
        assert await store.load() == values | small
        await store.close()

    run_limited(scenario(), LIMIT_S)


def test_keys_may_have_slashes_and_any_letters(place: Place) -> None:
    kept = {key: key.encode() for key in ("models/größer/λ", "/", "a b", "//x", "state0", "零", "", "%2f")}

    async def scenario() -> None:
        store = await led(place)
        await store.write(kept)
        assert await store.load() == kept
        await store.write(dict.fromkeys(kept))
        assert await store.load() == {}
        await store.close()

    run_limited(scenario(), LIMIT_S)


def test_the_leaders_address_is_told_while_it_leads(place: Place) -> None:
    async def scenario() -> None:
        store = place.open()
        assert await store.leader() is None
        await store.lead("größer.example:7077")
        assert await store.leader() == "größer.example:7077"
        await store.close()

    run_limited(scenario(), LIMIT_S)


def test_who_does_not_lead_reads_and_writes_nothing(place: Place) -> None:
    async def scenario() -> None:
        store = place.open()
        for call in (store.load(), store.write({"a": b"1"}), store.deposed()):
            with pytest.raises(NotLeader, match="does not lead yet"):
                await call
        await store.close()

    run_limited(scenario(), LIMIT_S)


def test_a_leader_cannot_lead_twice_at_once(place: Place) -> None:
    async def scenario() -> None:
        store = await led(place)
        with pytest.raises(InternalError, match="leads already"):
            await store.lead("first:1")
        await store.write({"a": b"1"})
        await store.close()

    run_limited(scenario(), LIMIT_S)


def test_closing_ends_the_leadership_and_may_be_repeated(place: Place) -> None:
    async def scenario() -> None:
        store = await led(place)
        waiting = asyncio.create_task(store.deposed())
        await store.close()
        assert "gave it up" in await waiting
        assert "gave it up" in await store.deposed()
        with pytest.raises(NotLeader, match="gave it up"):
            await store.write({"a": b"1"})
        await store.close()

    run_limited(scenario(), LIMIT_S)


# Several candidates


def test_a_second_candidate_waits_and_takes_over_when_the_first_closes(shared: Place) -> None:
    async def scenario() -> None:
        first, second = await led(shared), shared.open()
        waiting = asyncio.create_task(second.lead("second:1"))
        done, _ = await asyncio.wait((waiting,), timeout=0.5)
        assert not done
        assert await second.leader() == "first:1"
        await first.write({"a": b"1"})
        await first.close()
        began = time.monotonic()
        await waiting
        assert time.monotonic() - began < 5.0
        assert await second.leader() == "second:1"
        assert await second.load() == {"a": b"1"}
        await second.close()

    run_limited(scenario(), LIMIT_S)


def test_of_many_candidates_one_leads_at_a_time(shared: Place) -> None:
    async def scenario() -> None:
        leading: list[int] = []
        terms = []

        async def one(number: int) -> None:
            store = shared.open()
            term = await store.lead(f"{number}:1")
            assert not leading
            leading.append(number)
            terms.append(term)
            assert await store.leader() == f"{number}:1"
            await store.write({str(number): b""})
            leading.remove(number)
            await store.close()

        await asyncio.gather(*map(one, range(6)))
        assert terms == sorted(set(terms))
        assert set(await kept_by_next(shared)) == set(map(str, range(6)))

    run_limited(scenario(), LIMIT_S)


def test_a_deposed_leader_changes_nothing_and_is_told(shared: Place) -> None:
    async def scenario() -> None:
        first, second = await led(shared), shared.open()
        await first.write({"a": b"1"})
        shared.depose()
        await second.lead("second:1")
        await second.write({"a": b"2"})
        with pytest.raises(NotLeader, match="ask the one that leads now"):
            await first.write({"a": b"3", "b": b"3"})
        assert "lead" in await first.deposed()
        with pytest.raises(NotLeader):
            await first.load()
        assert await second.load() == {"a": b"2"}
        # What the first one gives up is not the second one's.
        await first.close()
        await second.write({"a": b"4"})
        assert await second.leader() == "second:1"
        await second.close()

    run_limited(scenario(), LIMIT_S)


def test_a_cancelled_candidate_leaves_nothing_behind(shared: Place) -> None:
    async def scenario() -> None:
        # At every moment of a campaign that would succeed: after so many turns of the loop, and after some time.
        for pause_s in (0.0, 0.0005, 0.001, 0.002, 0.004, 0.008):
            store = shared.open()
            leading = asyncio.create_task(store.lead("cancelled:1"))
            await asyncio.sleep(pause_s)
            leading.cancel()
            await asyncio.wait((leading,))
            if leading.cancelled():
                assert await store.leader() is None
            await store.close()
        # And while another one leads.
        first, second = await led(shared), shared.open()
        leading = asyncio.create_task(second.lead("cancelled:1"))
        await asyncio.wait((leading,), timeout=0.3)
        leading.cancel()
        await asyncio.wait((leading,))
        await second.close()
        await first.close()
        third = shared.open()
        assert await third.leader() is None
        await third.lead("third:1")
        await third.close()

    run_limited(scenario(), LIMIT_S)


def test_a_killed_leader_is_replaced(shared: Place, start: Callable[..., Child]) -> None:
    async def scenario() -> None:
        child = start(*shared.command)
        term = int((await asyncio.to_thread(child.wait_for, "leads with")).split()[-1])
        child.say("from the child")
        await asyncio.to_thread(child.wait_for, "wrote")
        store = shared.open()
        waiting = asyncio.create_task(store.lead("parent:1"))
        await asyncio.wait((waiting,), timeout=0.3)
        assert not waiting.done()
        began = time.monotonic()
        child.send(signal.SIGKILL)
        assert await waiting > term
        print(f"taken over {time.monotonic() - began:.2f} s after SIGKILL, with a lease of {TTL_S} s")
        assert await store.load() == {"line": b"from the child"}
        await store.close()

    run_limited(scenario(), LIMIT_S)


# In a directory


def test_a_directory_is_made_for_this_user_only(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = FileStore(tmp_path / "a" / "b")
        await store.lead("a:1")
        assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
        assert (tmp_path / "a" / "b" / DATABASE).stat().st_mode & 0o077 == 0
        await store.close()

    run_limited(scenario(), LIMIT_S)


def test_a_full_disk_fails_the_write_and_keeps_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is SQLite's own, after which it goes on as with a disk that is full."""
    limit = [""]
    connect = sqlite3.connect

    def limited(*arguments: object, **options: object) -> sqlite3.Connection:
        database = connect(*arguments, **options)  # type: ignore[call-overload]
        if limit[0]:
            database.execute(limit[0])
        return database

    monkeypatch.setattr(sqlite3, "connect", limited)

    async def scenario() -> None:
        store = FileStore(tmp_path / "data")
        await store.lead("a:1")
        await store.write({"a": b"1"})
        limit[0] = "PRAGMA max_page_count = 20"
        with pytest.raises(StoreUnavailable, match="free space") as refused:
            await store.write({"a": b"2", "large": os.urandom(MEGABYTE)})
        assert str(tmp_path / "data") in str(refused.value)
        assert await store.load() == {"a": b"1"}
        limit[0] = ""
        await store.write({"large": b"small"})
        assert await store.load() == {"a": b"1", "large": b"small"}
        await store.close()

    run_limited(scenario(), LIMIT_S)


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="only root can mount a small disk")
def test_a_real_disk_that_is_full_fails_the_write_alone(tmp_path: Path, start: Callable[..., Child]) -> None:
    mount = f'mount -t tmpfs -o size=256k none "{tmp_path}" && exec "$@"'
    child = start("unshare", "--mount", "sh", "-c", mount, "sh", *file_place(tmp_path / "data").command)
    child.wait_for("leads with")
    child.say("small")
    child.wait_for("wrote")
    child.say(str(MEGABYTE))
    said = child.wait_for("unavailable: ")
    assert str(tmp_path / "data") in said
    assert "free space" in said
    assert said.endswith("kept: {'line': b'small'}")
    child.say("small again")
    child.wait_for("wrote", skip=1)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(b"no database " * 1000),
        lambda path: path.write_bytes(path.read_bytes()[:5000]),
        lambda path: os.truncate(path, 100),
    ],
    ids=["other content", "cut", "only the head"],
)
def test_a_damaged_database_is_refused_by_name(spoil: Callable[[Path], None], tmp_path: Path) -> None:
    async def scenario() -> None:
        first = FileStore(tmp_path)
        await first.lead("a:1")
        await first.write({"a": os.urandom(100_000)})
        await first.close()
        spoil(tmp_path / DATABASE)
        store = FileStore(tmp_path)
        with pytest.raises(ConfigError, match="damaged") as refused:
            await store.lead("a:1")
        assert str(tmp_path / DATABASE) in str(refused.value)
        # Who could not lead does not hold the lock.
        assert await store.leader() is None
        await store.close()

    run_limited(scenario(), LIMIT_S)


def test_a_database_of_a_later_version_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / DATABASE) as database:
        database.execute("PRAGMA user_version = 9")
    database.close()

    async def scenario() -> None:
        store = FileStore(tmp_path)
        with pytest.raises(ConfigError, match="format 9"):
            await store.lead("a:1")
        await store.close()

    run_limited(scenario(), LIMIT_S)


def test_a_database_that_was_removed_under_its_leader_is_not_made_anew(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = FileStore(tmp_path)
        await store.lead("a:1")
        (tmp_path / DATABASE).unlink()
        with pytest.raises(StoreUnavailable, match=str(tmp_path)):
            await store.write({"a": b"1"})
        assert not (tmp_path / DATABASE).exists()
        await store.close()

    run_limited(scenario(), LIMIT_S)


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    async def scenario() -> None:
        for path in (tmp_path / "file", tmp_path / "file" / "below"):
            store = FileStore(path)
            with pytest.raises(ConfigError, match="name another one"):
                await store.lead("a:1")
            await store.close()

    run_limited(scenario(), LIMIT_S)


# In etcd


def test_a_leader_whose_lease_ran_out_by_its_own_clock_knows_before_it_asks(etcd: EtcdServer, prefix: str) -> None:
    clock = ManualClock()

    async def scenario() -> None:
        # Etcd would keep this lease for a while yet.
        store = etcd_store(etcd.endpoint, prefix=prefix, clock=clock, lease_ttl_s=3)
        await store.lead("a:1")
        await store.write({"a": b"1"})
        clock.advance(3.0)
        with pytest.raises(NotLeader, match="lease of 3 s ran out"):
            await store.write({"a": b"2"})
        assert "ran out" in await store.deposed()
        await store.close()
        assert await kept_by_next(etcd_place(etcd.endpoint, prefix)) == {"a": b"1"}

    run_limited(scenario(), LIMIT_S)


def test_a_leader_that_is_idle_stays_leader(etcd: EtcdServer, prefix: str) -> None:
    async def scenario() -> None:
        store = etcd_store(etcd.endpoint, prefix=prefix)
        await store.lead("a:1")
        deposed = asyncio.create_task(store.deposed())
        done, _ = await asyncio.wait((deposed,), timeout=1.5 * TTL_S)
        assert not done
        await store.write({"a": b"1"})
        await store.close()
        await deposed

    run_limited(scenario(), LIMIT_S)


def test_a_paused_leader_is_replaced_and_changes_nothing_when_it_goes_on(
    etcd: EtcdServer, prefix: str, start: Callable[..., Child]
) -> None:
    place = etcd_place(etcd.endpoint, prefix)

    async def scenario() -> None:
        child = start(*place.command)
        await asyncio.to_thread(child.wait_for, "leads with")
        child.send(signal.SIGSTOP)
        store = place.open()
        await store.lead("parent:1")
        await store.write({"line": b"from the parent"})
        child.say("from the child")
        child.send(signal.SIGCONT)
        await asyncio.to_thread(child.wait_for, "deposed: ")
        assert await store.load() == {"line": b"from the parent"}
        await store.close()

    run_limited(scenario(), LIMIT_S)


def test_a_write_without_an_answer_never_undoes_a_later_one(etcd: EtcdServer, prefix: str) -> None:
    """It arrives, here late, or was made before its answer was lost: both are what a paused etcd does."""

    async def scenario() -> None:
        store = etcd_store(etcd.endpoint, prefix=prefix, lease_ttl_s=10, timeout_s=0.5)
        await store.lead("a:1")
        for number in range(2):
            etcd.pause()
            with pytest.raises(StoreUnavailable, match="no answer within"):
                await store.write({"a": b"lost %d" % number})
            etcd.resume()
            await store.write({"a": b"later %d" % number})
            # Whatever was still on its way has arrived once others have, too.
            for _ in range(5):
                assert (await store.load())["a"] == b"later %d" % number
        await store.close()

    try:
        run_limited(scenario(), LIMIT_S)
    finally:
        etcd.resume()


def test_a_write_that_arrives_after_a_later_one_is_not_made(
    etcd: EtcdServer, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        store = etcd_store(etcd.endpoint, prefix=prefix)
        await store.lead("a:1")
        late = []

        async def hold(path: str, message: Json) -> Json:
            late.append((path, message))
            raise StoreUnavailable("held up on its way")

        with monkeypatch.context() as patched:
            patched.setattr(store._etcd, "call", hold)
            with pytest.raises(StoreUnavailable):
                await store.write({"a": b"first"})
        await store.write({"a": b"second"})
        ((path, message),) = late
        assert "succeeded" not in await store._etcd.call(path, message)
        assert await store.load() == {"a": b"second"}
        await store.close()

    run_limited(scenario(), LIMIT_S)


@pytest.mark.parametrize("lease_ttl_s", [1, 10], ids=["past the lease", "within the lease"])
def test_an_etcd_that_is_killed_and_started_again_keeps_everything(
    lease_ttl_s: int, etcd: EtcdServer, prefix: str
) -> None:
    async def scenario() -> None:
        store = etcd_store(etcd.endpoint, prefix=prefix, lease_ttl_s=lease_ttl_s, timeout_s=2.0)
        term = await store.lead("a:1")
        await store.write({"a": b"1"})
        etcd.kill()
        if lease_ttl_s == 1:
            assert "ran out" in await store.deposed()
        else:
            with pytest.raises(StoreUnavailable, match=etcd.endpoint):
                await store.write({"a": b"2"})
        await asyncio.to_thread(etcd.start)
        if lease_ttl_s == 1:
            with pytest.raises(NotLeader):
                await store.write({"a": b"2"})
            assert await store.lead("a:1") > term
        assert await store.load() == {"a": b"1"}
        await store.write({"a": b"3"})
        await store.close()
        assert await kept_by_next(etcd_place(etcd.endpoint, prefix)) == {"a": b"3"}

    run_limited(scenario(), LIMIT_S)


def test_a_candidate_waits_out_an_etcd_that_is_away(etcd: EtcdServer, prefix: str) -> None:
    async def scenario() -> None:
        first, second = etcd_store(etcd.endpoint, prefix=prefix), etcd_store(etcd.endpoint, prefix=prefix)
        await first.lead("first:1")
        waiting = asyncio.create_task(second.lead("second:1"))
        await asyncio.wait((waiting,), timeout=0.3)
        etcd.kill()
        await first.deposed()
        await asyncio.to_thread(etcd.start)
        await waiting
        assert await second.leader() == "second:1"
        await first.close()
        await second.close()

    run_limited(scenario(), LIMIT_S)


def test_an_etcd_that_cannot_be_reached_is_told_within_the_deadline(prefix: str) -> None:
    # One refuses connections; the other takes them, and says nothing.
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as closed:
        endpoints = [f"127.0.0.1:{each.getsockname()[1]}" for each in (silent, closed)]
        closed.close()

        async def scenario() -> None:
            store = etcd_store(*endpoints, prefix=prefix, timeout_s=0.3)
            for call in (store.leader(), store.lead("a:1")):
                began = time.monotonic()
                with pytest.raises(StoreUnavailable, match="no endpoint of etcd answers") as refused:
                    await call
                assert time.monotonic() - began < 5.0
                assert all(endpoint in str(refused.value) for endpoint in endpoints)
            await store.close()

        run_limited(scenario(), LIMIT_S)


def test_of_two_endpoints_one_may_be_dead(etcd: EtcdServer, prefix: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        dead = f"127.0.0.1:{silent.getsockname()[1]}"

        async def scenario() -> None:
            store = etcd_store(dead, etcd.endpoint, prefix=prefix, timeout_s=0.5)
            await store.lead("a:1")
            await store.write({"a": b"1"})
            deposed = asyncio.create_task(store.deposed())
            assert not (await asyncio.wait((deposed,), timeout=1.5 * TTL_S))[0]
            assert await store.load() == {"a": b"1"}
            await store.close()
            await deposed

        run_limited(scenario(), LIMIT_S)


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"large": os.urandom(2 * MEGABYTE)}, "max-request-bytes"),
        ({"huge": os.urandom(6 * MEGABYTE)}, "max-request-bytes"),
        ({str(number): b"" for number in range(200)}, "max-txn-ops"),
        ({"unpackable": bytes(65 << 20)}, "at most 67108864"),
    ],
    ids=["2 MB", "6 MB", "200 keys", "65 MiB of zeros"],
)
def test_what_etcd_does_not_take_is_refused_with_a_remedy(
    changes: dict[str, bytes], remedy: str, etcd: EtcdServer, prefix: str
) -> None:
    async def scenario() -> None:
        store = etcd_store(etcd.endpoint, prefix=prefix, timeout_s=10.0)
        await store.lead("a:1")
        with pytest.raises(ConfigError, match=remedy):
            await store.write(changes)
        assert await store.load() == {}
        await store.write({"small": b"1"})
        await store.close()

    run_limited(scenario(), LIMIT_S)


# Which store


def test_the_settings_choose_the_store(tmp_path: Path) -> None:
    def chosen(data_dir: Path | None, coordination: str | None) -> type[CoordinationStore]:
        return type(open_store(data_dir=data_dir, coordination=coordination, first_term=1, clock=SystemClock()))

    assert chosen(None, None) is MemoryStore
    assert chosen(tmp_path, None) is FileStore
    assert chosen(None, "etcd://127.0.0.1:1/p") is EtcdStore
    with pytest.raises(ConfigError, match="leave one out"):
        chosen(tmp_path, "etcd://127.0.0.1:1/p")
    with pytest.raises(ConfigError, match="etcd://127"):
        chosen(None, "consul://127.0.0.1:1/p")


def test_a_lease_of_less_than_a_second_is_refused() -> None:
    with pytest.raises(ConfigError, match="lease_ttl_s"):
        etcd_store("127.0.0.1:1", prefix="/p", lease_ttl_s=0)


def test_a_missing_client_for_etcd_is_told_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "etcd3gw", None)
    with pytest.raises(PserverError, match=r"pip install 'pserver\[etcd\]'"):
        etcd_store("127.0.0.1:1", prefix="/p")
