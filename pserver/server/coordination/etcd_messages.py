"""What is said to etcd: transactions and ranges as JSON, as its gateway takes them.

https://etcd.io/docs/v3.4/dev-guide/api_grpc_gateway/: bytes are in base64, and 64-bit integers are strings.
"""

import base64
import zlib
from collections.abc import Mapping
from typing import Any

from pserver.errors import ConfigError

#: Longest value; what etcd returns is never unpacked beyond it.
LONGEST_VALUE_BYTES = 64 << 20
#: A page stays below 70 MB: etcd takes no values above 1.5 MiB, and sends them in base64.
KEYS_OF_A_PAGE = 32

Json = dict[str, Any]


class Keys:
    """The keys of one prefix, as etcd sees them."""

    def __init__(self, prefix: str) -> None:
        self._leader = f"{prefix}/leader"
        self._state = f"{prefix}/state/"
        # The first key after all those that begin with it: "0" follows "/".
        self._end = f"{prefix}/state0"

    def create_leader(self, address: str, lease: int) -> Json:
        """Puts the leader's address under a lease if there is no leader; tells the leader's key if there is one."""
        put = {"key": _coded(self._leader), "value": _coded(address), "lease": str(lease)}
        return {
            "compare": [{"key": _coded(self._leader), "target": "CREATE", "result": "EQUAL", "create_revision": "0"}],
            "success": [{"request_put": put}],
            "failure": [{"request_range": self.leader()}],
        }

    def leader(self) -> Json:
        """The range of the leader's key."""
        return {"key": _coded(self._leader)}

    def change(self, changes: Mapping[str, bytes | None], leader_revision: int) -> Json:
        """Makes changes if the leader's key was last changed at a revision, and changes it; else tells it."""
        touch = {"key": _coded(self._leader), "ignore_value": True, "ignore_lease": True}
        return {
            "compare": [
                {
                    "key": _coded(self._leader),
                    "target": "MOD",
                    "result": "EQUAL",
                    "mod_revision": str(leader_revision),
                }
            ],
            "success": [{"request_put": touch}, *(self._operation(*change) for change in changes.items())],
            "failure": [{"request_range": self.leader()}],
        }

    def page(self, after: str | None, revision: int) -> Json:
        """The range of what is kept, from the beginning or after a key, at a revision or (0) now."""
        begin = self._state if after is None else f"{self._state}{after}\0"
        limits = {"limit": str(KEYS_OF_A_PAGE), "revision": str(revision)}
        return {"key": _coded(begin), "range_end": _coded(self._end), **limits}

    def kept(self, pairs: list[Json]) -> dict[str, bytes]:
        """Keys and values of a page.

        Raises:
            ConfigError: something is none that was written here.
        """
        start = len(self._state.encode())
        kept = {}
        for pair in pairs:
            name = decoded(pair["key"])[start:]
            try:
                kept[name.decode()] = _unpacked(decoded(pair.get("value", "")))
            except (UnicodeDecodeError, zlib.error) as error:
                raise ConfigError(
                    f"the value of {name!r} in etcd was not written by a coordinator: {error}; choose a prefix that "
                    "nothing else uses"
                ) from error
        return kept

    def _operation(self, key: str, value: bytes | None) -> Json:
        coded = _coded(f"{self._state}{key}")
        if value is None:
            return {"request_delete_range": {"key": coded}}
        if len(value) > LONGEST_VALUE_BYTES:
            raise ConfigError(
                f"the value of {key!r} has {len(value)} bytes, and a coordinator keeps at most {LONGEST_VALUE_BYTES} "
                "in one"
            )
        return {"request_put": {"key": coded, "value": base64.b64encode(zlib.compress(value)).decode()}}


def decoded(text: str) -> bytes:
    """Bytes from etcd."""
    return base64.b64decode(text)


def _coded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _unpacked(packed: bytes) -> bytes:
    unpacking = zlib.decompressobj()
    value = unpacking.decompress(packed, LONGEST_VALUE_BYTES)
    if not unpacking.eof:
        raise zlib.error("it ends too early, or is too long")
    return value
