"""One trainer and any number of servers give the bits of torch in one process."""

from collections.abc import Callable

import pytest
import torch

from pserver.testing.local_cluster import LocalCluster
from tests.numerics.training import (
    IMPLEMENTATIONS,
    RECIPES,
    WAYS,
    assert_same_bits,
    make_batches,
    make_module,
    of_rank,
    train_locally,
)
from tests.routes import Route


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_one_trainer_gets_the_bits_of_torch(
    recipe: str, way: str, servers: int, cluster_of: Callable[[int], LocalCluster], name: str
) -> None:
    check(recipe, way, "default", cluster_of(servers), name)


@pytest.mark.parametrize("implementation", ["single", "foreach"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_chosen_implementation_is_the_one_that_servers_use(
    recipe: str, implementation: str, cluster: LocalCluster, name: str
) -> None:
    check(recipe, "remote optimizer", implementation, cluster, name)


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_trainer_gets_the_bits_of_torch_whatever_route_its_steps_take(
    recipe: str, route: Route, cluster: LocalCluster, name: str
) -> None:
    check(recipe, "contexts", "default", cluster, name, route.transport)


def check(
    recipe: str, way: str, implementation: str, cluster: LocalCluster, name: str, transport: str | None = None
) -> None:
    remote, local = IMPLEMENTATIONS[implementation]
    batches = of_rank(make_batches([8]), 0)
    losses, expected = train_locally(make_module(), RECIPES[recipe], batches, local)

    ((found_losses, found),) = cluster.train(
        1,
        lambda session: WAYS[way](session, make_module(), RECIPES[recipe], batches, remote, name=name),
        transport=transport,
    )

    assert_same_bits(found, expected)
    assert torch.equal(torch.stack(found_losses), torch.stack(losses))
