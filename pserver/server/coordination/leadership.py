"""One leadership: its term, and how it ended."""

import asyncio
import logging

from pserver.errors import InternalError, NotLeader

logger = logging.getLogger(__name__)


class Leadership:
    """That this process leads, until it does not. Belongs to one event loop."""

    def __init__(self, term: int) -> None:
        self.term = term
        self._ended = asyncio.Event()
        self._why = ""

    @property
    def lasts(self) -> bool:
        return not self._ended.is_set()

    def end(self, why: str) -> None:
        """Notes that it has ended; the first reason stays."""
        if self.lasts:
            self._why = why
            self._ended.set()
            logger.info("the leadership of term %d has ended: %s", self.term, why)

    async def ended(self) -> str:
        """Waits until it has ended, and returns why."""
        await self._ended.wait()
        return self._why

    def refusal(self) -> NotLeader:
        """What is raised when something is asked of a leader that it is no longer."""
        return NotLeader(
            f"this coordinator led with term {self.term}, but no longer: {self._why}; ask the one that leads now"
        )


def lasting(leadership: Leadership | None) -> Leadership:
    """The leadership, if it lasts; raises NotLeader if not, or if there is none."""
    found = some(leadership)
    if not found.lasts:
        raise found.refusal()
    return found


def some(leadership: Leadership | None) -> Leadership:
    """The leadership, whether it lasts or not; raises NotLeader if there is none."""
    if leadership is None:
        raise NotLeader("this coordinator does not lead yet; ask the one that does, or wait until this one leads")
    return leadership


def check_may_lead(leadership: Leadership | None) -> None:
    """Raises InternalError if this process leads already."""
    if leadership is not None and leadership.lasts:
        raise InternalError(f"this coordinator leads already, with term {leadership.term}, and was to lead again")
