"""Several trainers equal one process: to the bit if it averages as servers do, nearly if it sees the joined batch."""

from collections.abc import Callable

import pytest
import torch

from pserver.testing.local_cluster import LocalCluster
from tests.numerics.training import (
    IMPLEMENTATIONS,
    RECIPES,
    WAYS,
    Run,
    assert_close,
    assert_same_bits,
    joined,
    make_batches,
    make_module,
    of_rank,
    train_locally,
    train_on_averages,
)
from tests.routes import Route

#: How far a parameter may be from one process on the joined batch after three steps, absolutely: a few roundings, since
#: the orders of summation differ.
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-14}

#: Recipe, servers, trainers, way: every recipe twice, and two recipes in all topologies.
CASES = [(recipe, 2, 3, "remote optimizer") for recipe in RECIPES] + [(recipe, 3, 2, "contexts") for recipe in RECIPES]
CASES += [
    (recipe, servers, trainers, way)
    for recipe in ("sgd-momentum", "adamw-groups")
    for servers, trainers, way in [
        (1, 2, "contexts"),
        (2, 2, "remote optimizer"),
        (1, 3, "remote optimizer"),
        (3, 3, "contexts"),
    ]
]

REMOTE, LOCAL = IMPLEMENTATIONS["default"]


def train(
    cluster: LocalCluster,
    way: str,
    recipe: str,
    rows: list[int],
    name: str,
    *,
    dtype: torch.dtype = torch.float32,
    weighted: bool = False,
    transport: str | None = None,
) -> list[Run]:
    """One run for each trainer; the one with rank r has batches of `rows[r]`."""
    batches = make_batches(rows, dtype=dtype)
    return cluster.train(
        len(rows),
        lambda session: WAYS[way](
            session,
            make_module(dtype=dtype),
            RECIPES[recipe],
            of_rank(batches, session.rank),
            REMOTE,
            name=name,
            weighted=weighted,
        ),
        transport=transport,
    )


@pytest.mark.parametrize(("recipe", "servers", "trainers", "way"), CASES)
def test_several_trainers_get_the_bits_of_averaging_in_order_of_rank(
    recipe: str, servers: int, trainers: int, way: str, cluster_of: Callable[[int], LocalCluster], name: str
) -> None:
    rows = [8] * trainers
    expected = train_on_averages(make_module(), RECIPES[recipe], make_batches(rows), LOCAL)

    for _, found in train(cluster_of(servers), way, recipe, rows, name):
        assert_same_bits(found, expected)


@pytest.mark.parametrize("recipe", ["sgd-momentum", "adamw-groups"])
def test_several_trainers_get_those_bits_whatever_route_their_steps_take(
    recipe: str, route: Route, cluster: LocalCluster, name: str
) -> None:
    rows = [8, 8, 8]
    expected = train_on_averages(make_module(), RECIPES[recipe], make_batches(rows), LOCAL)

    for _, found in train(cluster, "remote optimizer", recipe, rows, name, transport=route.transport):
        assert_same_bits(found, expected)


@pytest.mark.parametrize(
    ("trainers", "dtype"), [(2, torch.float32), pytest.param(3, torch.float64, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_several_trainers_equal_one_process_on_the_joined_batch(
    recipe: str, trainers: int, dtype: torch.dtype, cluster: LocalCluster, name: str
) -> None:
    rows = [8] * trainers
    together = joined(make_batches(rows, dtype=dtype))
    _, expected = train_locally(make_module(dtype=dtype), RECIPES[recipe], together, LOCAL)

    for _, found in train(cluster, "remote optimizer", recipe, rows, name, dtype=dtype):
        assert_close(found, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("way", WAYS)
def test_uneven_batches_weighted_by_their_samples_equal_the_joined_batch(
    way: str, cluster: LocalCluster, name: str
) -> None:
    rows = [4, 10, 6]
    expected_bits = train_on_averages(make_module(), RECIPES["adam"], make_batches(rows), LOCAL, weights=[2, 5, 3])
    _, expected = train_locally(make_module(), RECIPES["adam"], joined(make_batches(rows)), LOCAL)

    for _, found in train(cluster, way, "adam", rows, name, weighted=True):
        assert_same_bits(found, expected_bits)
        assert_close(found, expected, TOLERANCE[torch.float32])


def test_uneven_batches_in_double_precision_equal_the_joined_batch_closely(cluster: LocalCluster, name: str) -> None:
    rows, dtype = [1, 7, 5], torch.float64
    together = joined(make_batches(rows, dtype=dtype))
    _, expected = train_locally(make_module(dtype=dtype), RECIPES["sgd-momentum"], together, LOCAL)

    for _, found in train(cluster, "contexts", "sgd-momentum", rows, name, dtype=dtype, weighted=True):
        assert_close(found, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("recipe", ["sgd-momentum", "adamw-amsgrad"])
def test_the_same_run_twice_gives_the_same_bits(
    recipe: str, cluster_of: Callable[[int], LocalCluster], name: str
) -> None:
    rows = [5, 3, 9]
    first, *others = (
        train(cluster_of(servers), "remote optimizer", recipe, rows, f"{name}-{number}", weighted=True)
        for number, servers in enumerate((3, 3, 2))
    )

    for other in others:
        for (losses, found), (losses_again, found_again) in zip(first, other, strict=True):
            assert_same_bits(found, found_again)
            assert_same_bits([losses], [losses_again])
