"""Training goes on where a server was lost, to the bit."""

import re

import pytest
import torch

import pserver
from pserver.core.sync import Async, Bsp
from pserver.errors import PserverError
from pserver.optim import DistributedOptimizer, RemoteOptimizer
from pserver.testing.local_cluster import LocalCluster

STEPS = 8
SERVERS = 3
LEASE_S = 0.6


def make_model():
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.BatchNorm1d(30), torch.nn.Linear(30, 4))
    generator = torch.Generator().manual_seed(0)  # torch's own is shared by the trainers, which are threads here
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(generator=generator)
    return model


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(6, 40, generator=generator)


def train(optimizer_class, options, *, lose, trainers=2, sync=None, transport=None, **about):
    """Trains, and loses a server half-way; the parameters and optimizer state of rank 0 in the end."""
    with LocalCluster(SERVERS, server_lease_s=LEASE_S) as cluster:

        def program(session):
            model = make_model()
            optimizer = RemoteOptimizer(
                optimizer_class,
                model,
                **options,
                replicas=1,
                bucket_bytes=1024,
                sync=sync or Bsp(),
                cluster=session,
                **about,
            )
            for step in range(STEPS):
                optimizer.zero_grad()
                model(batch(session.rank, step)).square().mean().backward()
                optimizer.step()
                if step == STEPS // 2 and session.rank == 0 and lose is not None:
                    cluster.kill(lose)
            if hasattr(optimizer, "wait"):
                optimizer.wait()
            state = optimizer.state_dict() if session.rank == 0 else None
            return [each.detach().clone() for each in model.state_dict().values()], state

        return cluster.train(trainers, program, transport=transport)[0]


def assert_same(ours, theirs):
    for one, other in zip(ours[0], theirs[0], strict=True):
        assert torch.equal(one, other)
    assert repr(ours[1]) == repr(theirs[1])


@pytest.mark.parametrize("transport", ["auto", "grpc"])
@pytest.mark.parametrize(
    ("optimizer_class", "options"),
    [(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), (torch.optim.Adam, {"lr": 0.01})],
    ids=["SGD", "Adam"],
)
def test_a_run_that_loses_a_server_ends_with_the_bits_of_one_that_does_not(optimizer_class, options, transport):
    undisturbed = train(optimizer_class, options, lose=None, transport=transport)
    for lost in (1, 2):
        assert_same(train(optimizer_class, options, lose=lost, transport=transport), undisturbed)


@pytest.mark.parametrize("rules", [{"max_norm": 0.05}, {"clip_value": 0.001}, {"nonfinite": "raise"}], ids=str)
def test_so_does_one_whose_rounds_follow_from_what_shards_find(rules):
    options = {"lr": 0.1}
    assert_same(train(torch.optim.SGD, options, lose=2, **rules), train(torch.optim.SGD, options, lose=None, **rules))


@pytest.mark.parametrize("overlap", [{"early_push": True}, {"late_pull": True}], ids=str)
def test_so_does_one_that_pushes_early_or_pulls_late(overlap):
    options = {"lr": 0.1}
    assert_same(train(torch.optim.SGD, options, lose=1, **overlap), train(torch.optim.SGD, options, lose=None))


def test_an_asynchronous_run_goes_on():
    parameters, _ = train(torch.optim.SGD, {"lr": 0.01}, lose=1, sync=Async())
    assert all(each.isfinite().all() for each in parameters)


def test_what_was_pushed_into_a_context_before_the_loss_is_in_the_step_after_it():
    def run(*, lose):
        with LocalCluster(SERVERS, server_lease_s=LEASE_S) as cluster, cluster.connect() as session:
            model = make_model()
            refs = pserver.distribute(model, replicas=1, bucket_bytes=1024, cluster=session).parameter_refs()
            optimizer = DistributedOptimizer(torch.optim.SGD, refs, lr=0.1)
            with pserver.autograd.context() as context_id:
                for step in range(2):
                    loss = model(batch(0, step)).square().mean()
                    pserver.autograd.backward(context_id, [loss])
                    optimizer.push(context_id)
                if lose is not None:
                    cluster.kill(lose)
                optimizer.step(context_id)
            return [each.detach().clone() for each in model.parameters()]

    for one, other in zip(run(lose=2), run(lose=None), strict=True):
        assert torch.equal(one, other)


def test_a_model_without_replicas_fails_by_name_and_so_does_one_that_has_lost_all_copies():
    for replicas, lost in ((0, [2]), (1, [1, 2])):
        with LocalCluster(SERVERS, server_lease_s=LEASE_S, timeout_s=8.0) as cluster, cluster.connect() as session:
            model = make_model()
            optimizer = RemoteOptimizer(
                torch.optim.SGD, model, lr=0.1, replicas=replicas, bucket_bytes=1024, cluster=session
            )
            for server in lost:
                cluster.kill(server)
            model(batch(0, 0)).sum().backward()
            with pytest.raises(PserverError) as caught:
                optimizer.step()
            assert re.search(r"server s[12] at local:[23] was lost", str(caught.value))
