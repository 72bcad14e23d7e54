"""Settings of every unit test."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# A busy machine makes single examples slow; pytest's own timeout still ends what hangs.
settings.register_profile("unit", deadline=None, max_examples=50)
settings.load_profile("unit")


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """No test leaves torch with another number of threads: sums would have other bits in the tests that follow."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
