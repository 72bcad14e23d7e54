"""Deadlines, and retries that respect them."""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from pserver.errors import DeadlineExceeded, InvalidRequest, PserverError, ServerUnavailable

logger = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_BACKOFF_S = 0.05
LONGEST_BACKOFF_S = 2.0
#: A wait is mentioned once it has lasted this long.
SAY_SO_AFTER_S = 2.0
#: Longest wait that a caller may ask of a server, in seconds.
LONGEST_WAIT_S = 7 * 86400.0


def check_wait_s(wait_s: float) -> float:
    """A wait that came over the wire, if it can be used.

    Raises:
        InvalidRequest: it is negative, NaN or absurdly long.
    """
    if not 0 <= wait_s <= LONGEST_WAIT_S:
        raise InvalidRequest(f"wait_s must be in 0..{LONGEST_WAIT_S:g} seconds, but is {wait_s}")
    return wait_s


class Deadline:
    """A moment on the monotonic clock, `timeout_s` from now."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._at = time.monotonic() + timeout_s

    def remaining_s(self) -> float:
        """Seconds left; 0 if it has passed."""
        return max(0.0, self._at - time.monotonic())

    def elapsed_s(self) -> float:
        """Seconds since it was made."""
        return self.timeout_s - (self._at - time.monotonic())


class Backoff:
    """Pauses between attempts: random up to a bound that doubles with each (full jitter), at most `longest_s`.

    https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/
    """

    def __init__(self, longest_s: float = LONGEST_BACKOFF_S) -> None:
        self.longest_s = longest_s
        self.reset()

    def reset(self) -> None:
        """The next pause is short again."""
        self._bound_s = FIRST_BACKOFF_S

    def next_s(self) -> float:
        """The next pause, in seconds."""
        bound_s, self._bound_s = self._bound_s, min(2 * self._bound_s, self.longest_s)
        return random.uniform(0, bound_s)


async def retry(
    attempt: Callable[[float], Awaitable[T]],
    *,
    deadline: Deadline,
    what: str,
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> T:
    """Repeats an attempt that fails in a way that may pass, with `Backoff`, until the deadline.

    Args:
        attempt: called with the seconds left. Must be safe to repeat.
        deadline: of all attempts together.
        what: what is attempted and where, for messages, for example "joining the coordinator at 127.0.0.1:7077".
        pause: waits so many seconds between two attempts, or less if it knows that the next one may succeed.

    Raises:
        ServerUnavailable: the deadline passed; names the last failure.
        PserverError: an attempt failed in a way that repeating cannot mend.
    """
    backoff = Backoff()
    said_so = False
    while True:
        try:
            return await attempt(deadline.remaining_s())
        except PserverError as error:
            if not error.retryable:
                raise
            last = error
        if not said_so and deadline.elapsed_s() > SAY_SO_AFTER_S:
            said_so = True
            logger.warning("%s: still trying, for another %.0f s: %s", what, deadline.remaining_s(), last)
        await pause(min(backoff.next_s(), deadline.remaining_s()))
        if not deadline.remaining_s():
            kind = ServerUnavailable if isinstance(last, ServerUnavailable) else DeadlineExceeded
            raise kind(f"{what}: gave up after {deadline.timeout_s:g} s; last failure: {last}") from None
