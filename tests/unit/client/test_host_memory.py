"""Memory that is registered with CUDA's driver, with a driver that only notes what it is asked."""

import gc
import logging
import mmap

import pytest
import torch

from pserver.client.host_memory import registered_with_driver
from pserver.wire.shared_buckets import tensor_over

NUM_BYTES = 8192
PORTABLE, READ_ONLY = 1, 8


class Driver:
    """CUDA's runtime, as far as it is used; answers `result` to every registration."""

    def __init__(self, result: int = 0) -> None:
        self.result = result
        self.registered: list[tuple[int, int, int]] = []
        self.unregistered: list[int] = []

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.registered.append((address, num_bytes, flags))
        return self.result

    def cudaHostUnregister(self, address: int) -> int:
        self.unregistered.append(address)
        return 0


@pytest.fixture
def memory() -> memoryview:
    return memoryview(mmap.mmap(-1, NUM_BYTES))


def test_memory_is_registered_once_whole_and_for_every_context(memory: memoryview) -> None:
    driver = Driver()
    found = registered_with_driver(memory, driver)
    assert found is memory
    assert driver.registered == [(tensor_over(memory, torch.uint8).data_ptr(), NUM_BYTES, PORTABLE)]
    assert driver.unregistered == []


def test_memory_that_cannot_be_written_is_registered_as_such(memory: memoryview) -> None:
    driver = Driver()
    registered_with_driver(memory.toreadonly(), driver)
    assert [flags for *_, flags in driver.registered] == [PORTABLE | READ_ONLY]


def test_it_is_unregistered_once_when_nothing_refers_to_it_any_more() -> None:
    driver = Driver()
    memory = registered_with_driver(memoryview(mmap.mmap(-1, NUM_BYTES)), driver)
    tensor = tensor_over(memory[4096:], torch.float32)
    del memory
    gc.collect()
    assert driver.unregistered == [], "the tensor refers to it"
    del tensor
    gc.collect()
    assert driver.unregistered == [address for address, *_ in driver.registered]


def test_memory_that_the_driver_refuses_is_usable_and_one_line_says_so(
    memory: memoryview, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver(result=304)
    with caplog.at_level(logging.WARNING, logger="pserver"):
        found = registered_with_driver(memory, driver)
    found[:4] = b"used"
    assert bytes(memory[:4]) == b"used"
    (record,) = caplog.records
    assert record.getMessage() == (
        "CUDA could not register 8192 bytes of shared memory (error 304); copies go through a buffer of the driver"
    )
    del found, memory
    gc.collect()
    assert driver.unregistered == [], "it was never registered"
