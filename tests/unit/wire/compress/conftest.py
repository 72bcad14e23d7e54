"""Settings of these tests."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread(same_threads: None) -> None:
    """On a busy machine threads wait for each other longer than these small buckets take."""
    torch.set_num_threads(1)
