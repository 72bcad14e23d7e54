"""What codecs remember: names of tensors in a saved state, a kind and numbers that say whose it is; and entries."""

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def parse_key(key: str) -> tuple[str, tuple[int, ...]]:
    """ "factor.3.12" -> ("factor", (3, 12)). A name of another form has no numbers."""
    kind, *numbers = key.split(".")
    if not all(each.isdecimal() and len(each) < 20 for each in numbers):
        return key, ()
    return kind, tuple(map(int, numbers))


def set_or_remove(entries: dict[K, V], key: K, value: V | None) -> None:
    """Makes a value what is remembered; None: there was none."""
    if value is None:
        entries.pop(key, None)
    else:
        entries[key] = value
