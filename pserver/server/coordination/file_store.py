"""Keeps what coordinators must remember in a directory of one machine, in a SQLite database."""

import asyncio
import logging
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypeVar

from pserver.errors import ConfigError, StoreUnavailable
from pserver.server.coordination.leadership import Leadership, check_may_lead, lasting, some
from pserver.server.coordination.lock_file import LockFile

logger = logging.getLogger(__name__)

T = TypeVar("T")

DATABASE = "coordinator.sqlite3"
LOCK = "coordinator.lock"
#: A candidate looks this often whether the lock is free.
LOOK_EVERY_S = 0.2

_VERSION = 1
_TABLES = (
    "CREATE TABLE kept (key TEXT PRIMARY KEY, value BLOB NOT NULL)",
    "CREATE TABLE leadership (term INTEGER NOT NULL)",
    "INSERT INTO leadership VALUES (0)",
    f"PRAGMA user_version = {_VERSION}",
)
#: What SQLite says about a file that is damaged, or none of ours. https://www.sqlite.org/rescode.html
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)


class _LaterTerm(Exception):
    """Another process has begun a term since; the argument."""


class FileStore:
    """A `CoordinationStore` in a directory; of all processes of the machine, the one that holds its lock leads.

    A leader is deposed only if somebody removes the lock file; it finds out when it writes next.

    Args:
        directory: made when it is missing, for this user only.
        timeout_s: of every call to the disk.
    """

    durable = True

    def __init__(self, directory: Path, *, timeout_s: float = 10.0) -> None:
        self._directory = directory
        self._timeout_s = timeout_s
        self._lock = LockFile(directory / LOCK)
        self._leadership: Leadership | None = None
        self._closed = False
        # One thread: what is written later is never overtaken, not even by a call that was given up.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="file-store")

    async def lead(self, address: str) -> int:
        check_may_lead(self._leadership)
        try:
            await self._call(self._make_directory)
            await self._take_lock(address)
            self._leadership = Leadership(await self._call(self._begin_term))
        except BaseException:
            # The thread may have taken the lock when nobody waited any longer.
            await self._release()
            raise
        logger.info("leads from %s with term %d", self._directory, self._leadership.term)
        return self._leadership.term

    async def leader(self) -> str | None:
        return await self._call(self._lock.holder)

    async def load(self) -> dict[str, bytes]:
        return await self._as_leader(_read)

    async def write(self, changes: Mapping[str, bytes | None]) -> None:
        copied = dict(changes)
        await self._as_leader(lambda database: _change(database, copied))

    async def deposed(self) -> str:
        return await some(self._leadership).ended()

    async def close(self) -> None:
        if self._leadership is not None:
            self._leadership.end("this coordinator gave it up")
        if not self._closed:
            self._closed = True
            await self._release()
            self._thread.shutdown(wait=False)

    async def _release(self) -> None:
        try:
            await self._call(self._lock.release)
        except StoreUnavailable as error:
            logger.warning("the lock is released only when the disk answers or this process ends: %s", error)

    async def _take_lock(self, address: str) -> None:
        said_so = False
        while not await self._call(lambda: self._lock.take(address)):
            holder = await self._call(self._lock.holder)
            if holder is not None and not said_so:
                said_so = True
                logger.info("waits until the coordinator at %s ends, which leads from %s", holder, self._directory)
            await asyncio.sleep(LOOK_EVERY_S)

    async def _as_leader(self, function: Callable[[sqlite3.Connection], T]) -> T:
        """What `function` returns, in a transaction in which this process leads."""
        leadership = lasting(self._leadership)

        def in_term() -> T:
            with self._transaction() as database:
                if (found := _term(database)) != leadership.term:
                    raise _LaterTerm(found)
                return function(database)

        try:
            return await self._call(in_term)
        except _LaterTerm as later:
            leadership.end(f"another one leads from {self._directory} with term {later}")
            raise leadership.refusal() from None

    async def _call(self, function: Callable[[], T]) -> T:
        """What `function` returns, on the thread.

        Raises:
            StoreUnavailable: the disk is full, read-only, or slow beyond the deadline.
            ConfigError: the directory, or what is in it, cannot be used.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.get_running_loop().run_in_executor(self._thread, function)
        except TimeoutError:
            raise self._unavailable(f"did not answer within {self._timeout_s:g} s") from None
        except (FileExistsError, NotADirectoryError) as error:
            raise ConfigError(
                f"the coordinator keeps its data in a directory, but {self._directory} cannot be one: {error}; "
                "name another one"
            ) from error
        except OSError as error:
            raise self._unavailable(f"cannot be used: {error}") from error
        except sqlite3.DatabaseError as error:
            # The low byte says what kind of error it is.
            if error.sqlite_errorcode & 0xFF in _DAMAGED:
                raise self._damaged(str(error)) from error
            raise self._unavailable(f"cannot be used: {error}") from error

    def _unavailable(self, why: str) -> StoreUnavailable:
        return StoreUnavailable(
            f"the coordinator's data in {self._directory} {why}; see that this user may write there and that its "
            "disk has free space, and try again"
        )

    def _damaged(self, why: str) -> ConfigError:
        return ConfigError(
            f"the coordinator's data in {self._directory / DATABASE} is damaged, or not written by this version of "
            f"pserver: {why}; put a good copy in its place, or move it away to begin with an empty cluster"
        )

    # What follows runs on the thread.

    def _make_directory(self) -> None:
        missing = [each for each in (self._directory, *self._directory.parents) if not each.exists()]
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        # A directory outlives a power cut once the one that it is in is on disk.
        for each in missing:
            parent = os.open(each.parent, os.O_RDONLY)
            try:
                os.fsync(parent)
            finally:
                os.close(parent)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """A transaction on a connection of its own, committed at the end, undone by an exception."""
        # mode=rw: a database that has been removed under a leader is missed, not made anew.
        uri = f"{(self._directory / DATABASE).absolute().as_uri()}?mode=rw"
        with closing(sqlite3.connect(uri, uri=True, isolation_level=None, timeout=self._timeout_s)) as database:
            # EXTRA: with FULL, a power cut may bring back the journal of a transaction that was committed, and so
            # undo it. https://www.sqlite.org/pragma.html#pragma_synchronous
            database.execute("PRAGMA synchronous = EXTRA")
            database.execute("BEGIN IMMEDIATE")
            yield database
            database.execute("COMMIT")

    def _begin_term(self) -> int:
        (self._directory / DATABASE).touch(mode=0o600)
        with self._transaction() as database:
            (version,) = database.execute("PRAGMA user_version").fetchone()
            if version == 0:
                for statement in _TABLES:
                    database.execute(statement)
            elif version != _VERSION:
                raise self._damaged(f"expected format {_VERSION}, but it has format {version}")
            (found,) = database.execute("PRAGMA integrity_check(1)").fetchone()
            if found != "ok":
                raise self._damaged(found)
            database.execute("UPDATE leadership SET term = term + 1")
            return _term(database)


def _read(database: sqlite3.Connection) -> dict[str, bytes]:
    return dict(database.execute("SELECT key, value FROM kept"))


def _change(database: sqlite3.Connection, changes: Mapping[str, bytes | None]) -> None:
    for key, value in changes.items():
        if value is None:
            database.execute("DELETE FROM kept WHERE key = ?", (key,))
        else:
            database.execute("INSERT OR REPLACE INTO kept VALUES (?, ?)", (key, value))


def _term(database: sqlite3.Connection) -> int:
    (term,) = database.execute("SELECT term FROM leadership").fetchone()
    return int(term)
