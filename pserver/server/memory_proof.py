"""How a trainer proves to be on this machine: it reads a nonce that lies in this machine's memory."""

import logging
import secrets

from pserver.errors import InvalidRequest, SharedMemoryUnavailable
from pserver.wire.shm import Segment

logger = logging.getLogger(__name__)

NONCE_BYTES = 16


class MemoryProof:
    """A segment with a nonce, made when it is first asked for. One event loop.

    Args:
        enabled: whether this server shares memory at all.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._segment: Segment | None = None
        self._nonce = b""

    def segment(self) -> str:
        """Name of the segment.

        Raises:
            SharedMemoryUnavailable: memory cannot be shared, or is not to be.
        """
        if not self._enabled:
            raise SharedMemoryUnavailable("the server was started with --no-shared-memory")
        if self._segment is None:
            self._segment = Segment(NONCE_BYTES)
            self._nonce = secrets.token_bytes(NONCE_BYTES)
            self._segment.memory[:NONCE_BYTES] = self._nonce
        return self._segment.name

    def check(self, nonce: bytes) -> None:
        """Refuses whoever has not read the nonce.

        Raises:
            InvalidRequest
        """
        if self._segment is None or not secrets.compare_digest(nonce, self._nonce):
            raise InvalidRequest("the nonce is not what this server's segment holds; ask FindMemory for its name first")

    def close(self) -> None:
        """Removes the segment."""
        if self._segment is not None:
            self._segment.close()
