"""Names of tensors in a saved state: a kind, and numbers that say whose it is."""


def parse_key(key: str) -> tuple[str, tuple[int, ...]]:
    """ "factor.3.12" -> ("factor", (3, 12)). A name of another form has no numbers."""
    kind, *numbers = key.split(".")
    if not all(each.isdecimal() and len(each) < 20 for each in numbers):
        return key, ()
    return kind, tuple(map(int, numbers))
