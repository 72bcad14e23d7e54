import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pserver.wire import shm


@pytest.fixture(autouse=True)
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where segments are made: a directory of the test's own, whose content it can count."""
    with tempfile.TemporaryDirectory(prefix="test-segments-", dir=shm.DIRECTORY) as name:
        monkeypatch.setattr(shm, "DIRECTORY", Path(name))
        yield Path(name)
