"""Checks of what a codec is constructed with; arguments may come from the network."""

from pserver.errors import InvalidRequest


def check_count(codec: str, name: str, value: object, *, least: int) -> None:
    """Refuses what is no integer from `least` to 2^63 - 1.

    Raises:
        InvalidRequest: names the codec and the argument.
    """
    if type(value) is not int or not least <= value < 1 << 63:
        raise InvalidRequest(f"{codec}: {name} must be an integer, {least} or more, but is {value!r:.80}")


def is_number(value: object) -> bool:
    """Whether it is an int or a float, and nothing that merely behaves like one."""
    return type(value) in (int, float)
