"""What must hold: said where it does, an error where it does not."""

import time
from collections.abc import Callable
from typing import TypeVar

from tests.docker.commands import say

T = TypeVar("T")

_EVERY_S = 0.5


class CheckFailed(Exception):
    """Something is not as it should be."""


def check(holds: bool, what: str, found: object = "") -> None:
    """Says that `what` holds, or raises CheckFailed with what was found instead."""
    if not holds:
        raise CheckFailed(f"not so: {what}" + (f"; found: {found}" if found != "" else ""))
    say(f"ok: {what}")


def check_soon(look: Callable[[], T], holds: Callable[[T], bool], what: str, *, timeout_s: float) -> T:
    """Checks what `look` sees again and again, until it holds or the time is over; returns what was seen last."""
    deadline = time.monotonic() + timeout_s
    while not holds(found := look()) and time.monotonic() < deadline:
        time.sleep(_EVERY_S)
    check(holds(found), what, found)
    return found
