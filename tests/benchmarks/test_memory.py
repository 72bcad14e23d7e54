"""Memory counts whether it is a process's own or shared, and what is allowed follows from the model."""

import mmap
import os

import pytest

from benchmarks.memory import highest_resident_bytes, resident_bytes
from benchmarks.scaling import allowed_server_bytes

_NUM_BYTES = 64 << 20


@pytest.mark.parametrize("flags", [mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS])
def test_own_and_shared_memory_count_while_they_are_held(flags: int) -> None:
    before = resident_bytes(os.getpid())

    with highest_resident_bytes(os.getpid()) as highest:
        with mmap.mmap(-1, _NUM_BYTES, flags=flags) as memory:
            for offset in range(0, _NUM_BYTES, mmap.PAGESIZE):
                memory[offset] = 1
            held = resident_bytes(os.getpid())
        assert highest() >= before

    assert held - before == pytest.approx(_NUM_BYTES, rel=0.2)


def test_allowed_memory_is_the_model_its_state_and_a_gradient_of_each_trainer() -> None:
    allowed = allowed_server_bytes(100_000_000, num_state_values=2, num_trainers=2)

    assert allowed == pytest.approx(1.15 * 300e6 + 200e6 + 200e6)
