"""The coordinators of a cluster, as a trainer looks for the one that leads."""

from collections.abc import Sequence


class Coordinators:
    """Their addresses, and which one is asked first. May be used from any thread.

    Args:
        addresses: of all coordinators; usually there is one.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = tuple(addresses)
        self.current = self._addresses[0]

    def failed(self, address: str) -> None:
        """This one does not lead, or cannot be reached: the next one is asked."""
        if address == self.current:
            place = self._addresses.index(address)
            self.current = self._addresses[(place + 1) % len(self._addresses)]

    def __str__(self) -> str:
        return ",".join(self._addresses)
