import gc
from collections.abc import Iterator

import pytest

from tests.hostile.world import TRANSPORTS, WAIT_S, CountedStaging, CountedStateStaging, World


@pytest.fixture(autouse=True)
def short_admission(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that never joined is refused soon; the real time is for news that are late."""
    monkeypatch.setattr("pserver.server.shard_host.ADMISSION_WAIT_S", WAIT_S)


@pytest.fixture(autouse=True)
def counted_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    """What streams have brought is counted; see `num_staged`."""
    monkeypatch.setattr("pserver.server.shard_service.Staging", CountedStaging)
    monkeypatch.setattr("pserver.server.shard_service.StateStaging", CountedStateStaging)


@pytest.fixture(scope="session")
def worlds() -> Iterator[dict[str, World]]:
    """Worlds that tests may share, by transport."""
    running: dict[str, World] = {}
    yield running
    gc.unfreeze()
    for world in running.values():
        world.__exit__()


@pytest.fixture(params=TRANSPORTS)
def world(request: pytest.FixtureRequest, worlds: dict[str, World]) -> Iterator[World]:
    """A server with a victim on it, which must train to the bit at the end, with nothing left of anybody else."""
    if request.param not in worlds:
        worlds[request.param] = World(request.param).__enter__()
        # What is there now stays: looking for garbage among it again and again would take most of the time.
        gc.collect()
        gc.freeze()
    shared = worlds[request.param]
    yield shared
    try:
        shared.check_at_rest()
    except BaseException:
        worlds.pop(request.param).__exit__()
        raise


@pytest.fixture(params=TRANSPORTS)
def own_world(request: pytest.FixtureRequest) -> Iterator[World]:
    """As `world`, for one test alone: strange servers may be given a part of the next model."""
    with World(request.param) as running:
        yield running
        running.check_at_rest()
