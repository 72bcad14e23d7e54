"""Keeps what coordinators must remember in etcd, for clusters of several machines."""

import asyncio
import logging
import secrets
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from types import ModuleType
from typing import cast

from pserver.clock import Clock
from pserver.config import EtcdAddress
from pserver.errors import ConfigError, NotLeader, PserverError, StoreUnavailable
from pserver.server.coordination.etcd_messages import Json, Keys, decoded
from pserver.server.coordination.leadership import Leadership, check_may_lead, lasting, some
from pserver.transport.tasks import end_tasks

logger = logging.getLogger(__name__)

#: In one lease: how often it is extended, how often what failed is tried again and a candidate looks for the leader,
#: and how long one endpoint may take to extend it.
EXTENDED_PER_LEASE = 3
LOOKS_PER_LEASE = 10
TRIES_PER_LEASE = 4

#: Calls at a time; those that were given up end by themselves soon after.
_NUM_THREADS = 4
_LARGER_REQUESTS = "write fewer or smaller values, or start etcd with a larger --max-request-bytes"
#: What etcd says when it refuses for good or for long, and what to do.
_REFUSALS: dict[str, tuple[type[PserverError], str]] = {
    "request is too large": (ConfigError, _LARGER_REQUESTS),
    "message larger than max": (ConfigError, _LARGER_REQUESTS),
    "too many operations": (ConfigError, "write fewer values at once, or start etcd with a larger --max-txn-ops"),
    "user name is empty": (ConfigError, "it wants a password, and pserver has none; use an etcd that wants none"),
    "database space exceeded": (
        StoreUnavailable,
        "compact and defragment it or start it with a larger --quota-backend-bytes, then `etcdctl alarm disarm`",
    ),
}


class EtcdStore:
    """A `CoordinationStore` in etcd 3.4 or newer; who has put the key of the leader leads, as long as its lease lasts.

    Every write is a transaction that etcd makes only if the key of the leader is as this store last knew it, and that
    changes the key: nothing is written by whom etcd deposed, and no write overtakes a later one. The lease ends by the
    clock of this process, `lease_ttl_s` after the last extension that succeeded was sent, and so never after etcd
    ends it. Every call takes at most `timeout_s` for each endpoint.

    Args:
        address: of the cluster; its endpoints are tried in turn, the one that answered last before all others.
        clock: tells when the lease ends.
        lease_ttl_s: how soon another one can lead when this process ends without `close`. Etcd makes at least 2 of
            it, with its usual settings.
        timeout_s: of one call to one endpoint.

    Raises:
        ConfigError: an argument cannot be used, or the client for etcd is not installed.
    """

    durable = True

    def __init__(self, address: EtcdAddress, clock: Clock, *, lease_ttl_s: int = 5, timeout_s: float = 3.0) -> None:
        if lease_ttl_s < 1:
            raise ConfigError(f"lease_ttl_s must be a whole number of seconds, 1 or more, but is {lease_ttl_s}")
        self._etcd = _Etcd(address, timeout_s)
        self._keys = Keys(address.prefix)
        self._clock = clock
        self._lease_ttl_s = lease_ttl_s
        self._leadership: Leadership | None = None
        self._lease = 0
        self._lease_ends_s = 0.0
        #: When the key of the leader was last changed, as far as is known.
        self._revision = 0
        self._extending: asyncio.Task[None] | None = None
        self._writing = asyncio.Lock()

    async def lead(self, address: str) -> int:
        check_may_lead(self._leadership)
        # So that an address where no etcd is, is told at once.
        await self._leader_pair()
        said = ""
        while isinstance(leadership := await self._try_to_lead(address), str):
            if leadership != said:
                said = leadership
                logger.info("waits until %s", said)
            await asyncio.sleep(self._lease_ttl_s / LOOKS_PER_LEASE)
        self._leadership = leadership
        self._extending = asyncio.create_task(self._extend_until_ended(leadership))
        logger.info("leads with term %d by %s", leadership.term, self._etcd)
        return leadership.term

    async def leader(self) -> str | None:
        pair = await self._leader_pair()
        return None if pair is None else _address_in(pair)

    async def load(self) -> dict[str, bytes]:
        self._lasting()
        kept: dict[str, bytes] = {}
        last, revision, more = None, 0, True
        while more:
            reply = await self._etcd.call("kv/range", self._keys.page(last, revision))
            kept |= await asyncio.to_thread(self._keys.kept, reply.get("kvs", []))
            # All pages are of the moment of the first one.
            revision = revision or int(reply["header"]["revision"])
            last, more = next(reversed(kept), None), reply.get("more", False)
        self._lasting()
        return kept

    async def write(self, changes: Mapping[str, bytes | None]) -> None:
        copied = dict(changes)
        async with self._writing:
            while True:
                leadership = self._lasting()
                message = await asyncio.to_thread(self._keys.change, copied, self._revision)
                reply = await self._etcd.call("kv/txn", message)
                if reply.get("succeeded"):
                    self._revision = int(reply["header"]["revision"])
                    return
                pair = _pair_in(reply)
                if pair is None or int(pair["create_revision"]) != leadership.term:
                    who = "nobody leads" if pair is None else f"the one at {_address_in(pair)} leads"
                    leadership.end(f"etcd has ended its lease, and {who} now")
                    raise leadership.refusal()
                # A write that got no answer was made nevertheless. There are only so many of them.
                self._revision = int(pair["mod_revision"])

    async def deposed(self) -> str:
        return await some(self._leadership).ended()

    async def close(self) -> None:
        if self._leadership is not None:
            self._leadership.end("this coordinator gave it up")
        if self._extending is not None:
            await end_tasks(self._extending)
            self._extending = None
            await self._revoke(self._lease)
        self._etcd.close()

    def _lasting(self) -> Leadership:
        """The leadership, if it lasts by the clock, too; raises NotLeader if not."""
        leadership = lasting(self._leadership)
        if self._clock.now_s() >= self._lease_ends_s:
            leadership.end(f"its lease of {self._lease_ttl_s} s ran out before etcd extended it")
            raise leadership.refusal()
        return leadership

    async def _leader_pair(self) -> Json | None:
        """The key of the leader, its value and its revisions; None if nobody leads."""
        reply = await self._etcd.call("kv/range", self._keys.leader())
        return cast(Json, reply["kvs"][0]) if reply.get("kvs") else None

    async def _try_to_lead(self, address: str) -> Leadership | str:
        """The leadership, or what it has to wait for."""
        try:
            if (pair := await self._leader_pair()) is not None:
                return f"the leader at {_address_in(pair)} ends"
            return await self._campaign(address) or "it is seen which candidate was faster"
        except StoreUnavailable as error:
            return f"etcd answers again: {error}"

    async def _campaign(self, address: str) -> Leadership | None:
        """Puts the key of the leader, with a new lease; None if another one was faster."""
        lease = secrets.randbelow(2**63 - 1) + 1
        sent_s = self._clock.now_s()
        leadership = None
        try:
            with suppress(_LeaseExists):
                await self._etcd.call("lease/grant", {"ID": str(lease), "TTL": str(self._lease_ttl_s)})
            with suppress(_NoLease):
                reply = await self._etcd.call("kv/txn", self._keys.create_leader(address, lease))
                leadership = self._won(reply, lease, sent_s + self._lease_ttl_s)
        finally:
            if leadership is None:
                await self._revoke(lease)
        return leadership

    def _won(self, reply: Json, lease: int, ends_s: float) -> Leadership | None:
        if reply.get("succeeded"):
            term = revision = int(reply["header"]["revision"])
        else:
            pair = _pair_in(reply)
            # Ours, if an endpoint put it without an answer, and the next one was asked.
            if pair is None or pair.get("lease") != str(lease):
                return None
            term, revision = int(pair["create_revision"]), int(pair["mod_revision"])
        if self._clock.now_s() >= ends_s:
            return None
        self._lease, self._lease_ends_s, self._revision = lease, ends_s, revision
        return Leadership(term)

    async def _revoke(self, lease: int) -> None:
        try:
            await self._etcd.call("lease/revoke", {"ID": str(lease)})
        except _NoLease:
            pass
        except StoreUnavailable as error:
            logger.warning("a lease of at most %d s is left behind: %s", self._lease_ttl_s, error)

    async def _extend_until_ended(self, leadership: Leadership) -> None:
        try:
            pause_s = self._lease_ttl_s / EXTENDED_PER_LEASE
            while leadership.lasts:
                await asyncio.sleep(min(pause_s, self._left_s()))
                if leadership.lasts:
                    extended = await self._extend(leadership)
                    pause_s = self._lease_ttl_s / (EXTENDED_PER_LEASE if extended else LOOKS_PER_LEASE)
        finally:
            leadership.end("its lease is extended no longer")

    async def _extend(self, leadership: Leadership) -> bool:
        """Extends the lease, or ends the leadership, or does neither because etcd does not answer; then False."""
        sent_s = self._clock.now_s()
        timeout_s = min(self._etcd.timeout_s, self._lease_ttl_s / TRIES_PER_LEASE)
        reply: Json = {}
        try:
            async with asyncio.timeout(self._left_s()):
                reply = await self._etcd.call("lease/keepalive", {"ID": str(self._lease)}, timeout_s=timeout_s)
        except TimeoutError:
            pass
        except PserverError as error:
            logger.warning("the lease of term %d is not extended yet: %s", leadership.term, error)
        # An answer that comes too late is none: others may have been told already that this process does not lead.
        with suppress(NotLeader):
            self._lasting()
            if reply and "TTL" not in reply["result"]:
                leadership.end("etcd has ended its lease")
            elif reply:
                self._lease_ends_s = sent_s + self._lease_ttl_s
        return bool(reply)

    def _left_s(self) -> float:
        return max(0.0, self._lease_ends_s - self._clock.now_s())


class _EndpointFailed(Exception):
    """One endpoint could not be reached or had no answer; another one may."""


class _NoLease(Exception):
    """There is no such lease, or no longer."""


class _LeaseExists(Exception):
    """There is such a lease already."""


class _Etcd:
    """Calls to whatever endpoint answers. Belongs to one event loop."""

    def __init__(self, address: EtcdAddress, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._client = _client_module()
        self._endpoints = list(address.endpoints)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="etcd-store")

    def __str__(self) -> str:
        return "etcd at " + ", ".join(f"{host}:{port}" for host, port in self._endpoints)

    async def call(self, path: str, message: Json, *, timeout_s: float | None = None) -> Json:
        """The reply of the first endpoint that has one, within `timeout_s` for each.

        Raises:
            StoreUnavailable: none has; names the failure of each. Or etcd is full.
            ConfigError: etcd refuses the message.
            _NoLease, _LeaseExists: it says so.
        """
        timeout_s = timeout_s or self.timeout_s
        failures = []
        for endpoint in tuple(self._endpoints):
            post = partial(self._post, endpoint, path, message, timeout_s)
            try:
                async with asyncio.timeout(timeout_s):
                    reply = await asyncio.get_running_loop().run_in_executor(self._threads, post)
            except TimeoutError:
                failures.append(f"{endpoint[0]}:{endpoint[1]}: no answer within {timeout_s:g} s")
            except _EndpointFailed as error:
                failures.append(f"{endpoint[0]}:{endpoint[1]}: {error}")
            else:
                self._endpoints.sort(key=lambda each: each != endpoint)
                return reply
        raise StoreUnavailable(
            f"no endpoint of etcd answers; see that it runs, has a majority and can be reached: {'; '.join(failures)}"
        )

    def close(self) -> None:
        """Starts no call any longer."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _post(self, endpoint: tuple[str, int], path: str, message: Json, timeout_s: float) -> Json:
        host, port = endpoint
        # A client, and so a connection, for each call: calls are rare, and a connection that is older than the last
        # restart of etcd would fail without telling whether the message arrived.
        client = self._client.client(host=host.strip("[]"), port=port, timeout=timeout_s, api_path="/v3/")
        # Etcd is near; a proxy that the environment names is for other things.
        client.session.trust_env = False
        with client.session:
            try:
                reply = client.post(client.get_url(path), json=message)
            except self._client.exceptions.Etcd3Exception as error:
                raise _failure(error.detail_text or str(error), message) from error
            except OSError as error:  # requests derives all its errors from it
                raise _EndpointFailed(f"{error}") from error
        if not isinstance(reply, dict) or not {"header", "result"} & reply.keys():
            raise _EndpointFailed(f"answers, but not as etcd does: {str(reply)[:100]}")
        return reply


def _client_module() -> ModuleType:
    try:
        import etcd3gw
    except ImportError as error:
        raise ConfigError(f"a client for etcd is needed: pip install 'pserver[etcd]' ({error})") from error
    return etcd3gw


def _failure(text: str, message: Json) -> Exception:
    """The exception for what etcd said about a message."""
    if "requested lease not found" in text:
        return _NoLease()
    if "lease already exists" in text:
        return _LeaseExists()
    for said, (kind, remedy) in _REFUSALS.items():
        if said in text:
            num_bytes = len(str(message)) * 3 // 4
            return kind(f"etcd refuses a request of about {num_bytes} bytes: {text.strip()}; {remedy}")
    return _EndpointFailed(text.strip())


def _pair_in(reply: Json) -> Json | None:
    """The key of the leader in the reply to a transaction that was not made."""
    pairs = reply["responses"][0]["response_range"].get("kvs")
    return cast(Json, pairs[0]) if pairs else None


def _address_in(pair: Json) -> str:
    return decoded(pair["value"]).decode()
