"""Schedules are data that a seed gives."""

from tests.chaos.schedule import ETCD, FAULTY_TRAINER, SCENARIOS, SERVERS, FaultKind, make_schedule, scenario_of

SEEDS = range(200)


def test_a_seed_gives_the_same_faults_every_time() -> None:
    for seed in SEEDS:
        scenario = scenario_of(seed)
        assert make_schedule(seed, scenario, 5) == make_schedule(seed, scenario, 5)


def test_seeds_give_every_fault_that_a_scenario_has() -> None:
    for scenario in SCENARIOS:
        found = {(each.kind, each.target) for seed in SEEDS for each in make_schedule(seed, scenario, 5)}
        targets = {*SERVERS, FAULTY_TRAINER, *([ETCD] if scenario.etcd else [])}
        expected = {(kind, target) for kind in (FaultKind.KILL, FaultKind.STOP) for target in targets}
        if scenario.partitions:
            expected |= {(FaultKind.PARTITION, server) for server in SERVERS}
        assert found == expected


def test_servers_come_back_always() -> None:
    for seed in SEEDS:
        assert all(each.returns or each.target == FAULTY_TRAINER for each in make_schedule(seed, scenario_of(seed), 5))
