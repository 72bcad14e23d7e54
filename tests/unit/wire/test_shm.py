"""Segments of shared memory within one process; tests/cluster has their owners' deaths."""

import errno
import os
import platform
import stat
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pserver.errors import SharedMemoryUnavailable
from pserver.wire import shm
from pserver.wire.shm import Segment, map_segment, sweep, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason="this machine cannot share memory")


@pytest.fixture(autouse=True)
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of the test's own on the same file system, so that it sweeps nobody else's."""
    with tempfile.TemporaryDirectory(prefix="test-segments-", dir=shm.DIRECTORY) as name:
        monkeypatch.setattr(shm, "DIRECTORY", Path(name))
        yield Path(name)


def leave_behind(segment: Segment) -> None:
    """As the kernel does when the owner dies: the name stays, the lock goes."""
    os.close(segment._file)
    segment._closed = True
    del segment.memory  # it has a descriptor of its own


def test_owner_and_user_see_the_same_bytes_zeros_at_first() -> None:
    segment = Segment(100)
    theirs = map_segment(segment.name, writable=True)
    assert len(segment.memory) == len(theirs) == 100
    assert bytes(theirs) == bytes(100)
    segment.memory[3:6] = b"abc"
    theirs[97:] = b"xyz"
    assert bytes(theirs[3:6]) == b"abc"
    assert bytes(segment.memory[97:]) == b"xyz"
    segment.close()


def test_what_is_mapped_to_be_read_cannot_be_written() -> None:
    segment = Segment(8)
    theirs = map_segment(segment.name, writable=False)
    assert theirs.readonly
    with pytest.raises(TypeError, match="read-only"):
        theirs[0] = 1
    segment.close()


def test_only_the_same_user_may_open_it(directory: Path) -> None:
    segment = Segment(8)
    assert stat.S_IMODE((directory / segment.name).stat().st_mode) == 0o600
    segment.close()


def test_names_cannot_be_guessed() -> None:
    segments = [Segment(1) for _ in range(20)]
    assert len({segment.name for segment in segments}) == 20
    assert all(len(segment.name) == len("pserver-") + 32 for segment in segments)
    for segment in segments:
        segment.close()


def test_every_page_is_taken_at_once() -> None:
    """Else a write into a full file system would end the process with SIGBUS."""
    segment = Segment(1 << 20)
    assert os.fstat(segment._file).st_blocks * 512 >= 1 << 20
    segment.close()


def test_more_than_there_is_room_for_is_an_error_and_leaves_nothing(directory: Path) -> None:
    system = os.statvfs(directory)
    too_many = (system.f_blocks + 1) * system.f_frsize
    num_files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(SharedMemoryUnavailable, match=f"no room for {too_many} bytes .*shm_size"):
        Segment(too_many)
    assert list(directory.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == num_files
    assert os.statvfs(directory).f_bfree == pytest.approx(system.f_bfree, rel=0.01)


@pytest.mark.parametrize("call", ["posix_fallocate", "link"])
def test_whatever_fails_while_it_is_made_it_leaves_nothing(
    call: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    num_files = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(SharedMemoryUnavailable, match="No space left"):
        Segment(4096)
    assert list(directory.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == num_files


def test_a_directory_that_cannot_be_written_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "DIRECTORY", Path("/proc"))
    with pytest.raises(SharedMemoryUnavailable, match="/proc cannot be written"):
        Segment(8)


def test_closing_removes_the_name_and_twice_is_no_error(directory: Path) -> None:
    segment = Segment(8)
    assert [path.name for path in directory.iterdir()] == [segment.name]
    segment.close()
    assert list(directory.iterdir()) == []
    segment.close()
    with pytest.raises(SharedMemoryUnavailable, match=segment.name):
        map_segment(segment.name, writable=False)


def test_closing_is_no_error_if_somebody_has_removed_it(directory: Path) -> None:
    segment = Segment(8)
    (directory / segment.name).unlink()
    segment.close()


def test_memory_that_is_mapped_outlives_the_close() -> None:
    segment = Segment(1 << 16)
    theirs = map_segment(segment.name, writable=True)
    segment.memory[:4] = b"kept"
    segment.close()
    assert bytes(theirs[:4]) == b"kept"
    theirs[-4:] = b"more"
    assert bytes(segment.memory[-4:]) == b"more"
    del segment
    assert bytes(theirs[:4]) == b"kept"


@pytest.mark.parametrize(
    "name", ["", "pserver", "other-123", "../pserver-1", "pserver-/../../etc/passwd", "/etc/passwd"]
)
def test_what_is_no_name_of_a_segment_is_refused(name: str) -> None:
    with pytest.raises(SharedMemoryUnavailable, match="is not the name of a segment"):
        map_segment(name, writable=False)


def test_a_link_in_the_place_of_a_segment_is_not_followed(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"secret")
    (directory / "pserver-link").symlink_to(tmp_path / "target")
    with pytest.raises(SharedMemoryUnavailable, match="cannot be opened"):
        map_segment("pserver-link", writable=False)


def test_a_file_without_content_is_refused(directory: Path) -> None:
    (directory / "pserver-empty").touch()
    with pytest.raises(SharedMemoryUnavailable, match="cannot be mapped"):
        map_segment("pserver-empty", writable=False)


@pytest.mark.parametrize(
    ("patched", "value", "reason"),
    [
        ((platform, "machine"), lambda: "aarch64", "keeps stores in order .* this is aarch64"),
        ((sys, "platform"), "darwin", "needs Linux, but this is darwin"),
        ((shm, "DIRECTORY"), Path("/no/such/directory"), "/no/such/directory is missing"),
    ],
    ids=["processor", "system", "directory"],
)
def test_a_machine_that_cannot_share_memory_says_why(
    patched: tuple[Any, str], value: object, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = Segment(8)
    monkeypatch.setattr(*patched, value)
    for attempt in (lambda: Segment(8), lambda: map_segment(segment.name, writable=False)):
        with pytest.raises(SharedMemoryUnavailable, match=reason):
            attempt()
    assert sweep() == []
    monkeypatch.undo()
    segment.close()


# Sweeping


def test_sweeping_removes_what_the_dead_have_left_and_nothing_else(directory: Path) -> None:
    alive, dead = Segment(8), Segment(8)
    (directory / "other-file").touch()
    (directory / "pserver-link").symlink_to("/etc/passwd")
    leave_behind(dead)
    assert sweep() == [dead.name]
    assert {path.name for path in directory.iterdir()} == {alive.name, "other-file", "pserver-link"}
    assert sweep() == []
    assert bytes(map_segment(alive.name, writable=False)) == bytes(8)
    alive.close()


def test_memory_of_the_dead_stays_with_those_who_have_mapped_it() -> None:
    dead = Segment(8)
    dead.memory[:4] = b"kept"
    theirs = map_segment(dead.name, writable=False)
    leave_behind(dead)
    assert sweep() == [dead.name]
    assert bytes(theirs[:4]) == b"kept"


def test_mapping_a_segment_does_not_keep_its_name(directory: Path) -> None:
    """Only its owner's life does."""
    dead = Segment(8)
    theirs = map_segment(dead.name, writable=True)
    leave_behind(dead)
    assert sweep() == [dead.name]
    assert len(theirs) == 8


def test_a_segment_that_is_being_made_is_never_swept(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no name before it is locked: between any two of the calls that make it, there is nothing to take."""
    swept: list[str] = []

    def sweeping_around(module: Any, name: str) -> None:
        call = getattr(module, name)

        def wrapped(*arguments: Any, **options: Any) -> Any:
            swept.extend(sweep())
            result = call(*arguments, **options)
            swept.extend(sweep())
            return result

        monkeypatch.setattr(module, name, wrapped)

    sweeping_around(os, "posix_fallocate")
    sweeping_around(os, "link")
    segment = Segment(8)
    assert swept == []
    assert [path.name for path in directory.iterdir()] == [segment.name]
    segment.close()


def test_many_who_make_and_sweep_at_once_take_nothing_from_the_living() -> None:
    def make(_: int) -> None:
        segment = Segment(4096)
        assert len(map_segment(segment.name, writable=False)) == 4096
        segment.close()

    with ThreadPoolExecutor(4) as threads:
        making = [threads.submit(make, number) for number in range(300)]
        swept = [threads.submit(sweep) for _ in range(100)]
        for each in making:
            each.result()
        assert {name for each in swept for name in each.result()} == set()
