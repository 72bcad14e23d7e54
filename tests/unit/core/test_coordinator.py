import dataclasses
import itertools

import pytest
from core_builders import commit, model_spec, tensor_spec

from pserver.clock import ManualClock
from pserver.core.coordinator import Attachment, Coordinator
from pserver.core.messages import (
    AbandonPlan,
    AdmitTrainer,
    Applied,
    Apply,
    Committed,
    CreateShard,
    DropShard,
    EndTrainer,
    FailModel,
    LivingTrainers,
    ModelReady,
    Prepare,
    Prepared,
    Reject,
    ShardCreated,
    ShardFailed,
    ShardInitialised,
)
from pserver.core.rules import GradientRules
from pserver.errors import (
    ConfigError,
    InvalidRequest,
    LayoutMismatch,
    ModelFailed,
    RankTaken,
    ServerEnded,
    StaleEpoch,
    StalePush,
    TrainerEnded,
    UnknownModel,
)
from pserver.types import PushId

TRAINER_LEASE_S = 8.0
SERVER_LEASE_S = 4.0
SPEC = model_spec()


class Cluster:
    """A coordinator with its servers and trainers as a test plays them; time stands still unless moved."""

    def __init__(self, servers=1, *, min_servers=1, first_trainer_id=1):
        self.clock = ManualClock(100.0)
        self.coordinator = Coordinator(
            trainer_lease_s=TRAINER_LEASE_S,
            server_lease_s=SERVER_LEASE_S,
            min_servers=min_servers,
            first_trainer_id=first_trainer_id,
            now_s=self.clock.now_s(),
        )
        self._sequences = itertools.count(1)
        for number in range(servers):
            self.link(f"s{number}")

    def link(self, server, incarnation=1):
        self.coordinator.server_joined(server, f"{server}:1", incarnation, self.clock.now_s())

    def join(self, nonce, rank=-1):
        return self.coordinator.join(nonce, rank, self.clock.now_s()).trainer_id

    def new_id(self, trainer):
        sequence = next(self._sequences)
        return PushId(trainer, sequence, 1)

    def register(self, trainer, spec=SPEC, **about):
        return self.coordinator.register(self.new_id(trainer), spec, **about)

    def attach(self, trainer, name="m", *, epoch=1):
        return self.coordinator.attach(self.new_id(trainer), name, epoch, self.clock.now_s())

    def leave(self, trainer):
        self.coordinator.leave(self.new_id(trainer), self.clock.now_s())

    def told(self, *, living=False):
        """What servers were told since the last call, by server and in order.

        Args:
            living: whether to count who has joined and who lives.
        """
        told = {}
        for server, command in self.coordinator.take_commands():
            if living or not isinstance(command, AdmitTrainer | LivingTrainers):
                told.setdefault(server, []).append(command)
        return told

    def placed(self, name="m"):
        (model,) = (each for each in self.status().models if each.name == name)
        return [shard.server for shard in model.shards]

    def report(self, report_type, server, *, name="m", shard=None, epoch=1, **fields):
        """By default of the shard that the server is the primary of."""
        shard = self.placed(name).index(server) if shard is None else shard
        report = report_type(model=name, shard=shard, epoch=epoch, **fields)
        self.coordinator.report(server, report, self.clock.now_s())

    def shards_created(self, **about):
        for server in self.placed(about.get("name", "m")):
            self.report(ShardCreated, server, **about)

    def shards_initialised(self, trainer, **about):
        for server in self.placed(about.get("name", "m")):
            self.report(ShardInitialised, server, trainer_id=trainer, **about)

    def ready(self, trainer, spec=SPEC, epoch=1):
        """A model with its initial values from `trainer`, which is attached to it."""
        assert self.register(trainer, spec) is None
        self.shards_created(name=spec.name, epoch=epoch)
        assert self.register(trainer, spec).initialise
        self.shards_initialised(trainer, name=spec.name, epoch=epoch)
        assert not self.register(trainer, spec).initialise
        self.attach(trainer, spec.name, epoch=epoch)
        self.told()

    def commit(self, trainer, step, *, servers=None, name="m", epoch=1, **about):
        """By default on the parameters of the last round."""
        info = commit(step, **{"base_round": self.model(name).round, **about})
        for server in servers or self.placed(name):
            self.report(Committed, server, trainer_id=trainer, commit=info, name=name, epoch=epoch)

    def applied(self, round_number, *, servers=None):
        for server in servers or self.placed():
            self.report(Applied, server, round=round_number, version=round_number)

    def pass_time(self, seconds, *, heard=(), renewed=()):
        """Moves on in small steps, as a coordinator does that is not paused."""
        for _ in range(round(seconds / 0.5)):
            self.clock.advance(0.5)
            for server in heard:
                self.coordinator.server_heard(server, self.clock.now_s())
            for trainer in renewed:
                self.renew(trainer)
            self.coordinator.expire(self.clock.now_s())

    def renew(self, trainer, **figures):
        figures = {"sent_bytes": 0, "received_bytes": 0, "reported": {}, **figures}
        self.coordinator.renew(trainer, now_s=self.clock.now_s(), **figures)

    def status(self):
        return self.coordinator.status(self.clock.now_s())

    def model(self, name="m"):
        (model,) = (each for each in self.status().models if each.name == name)
        return model


def same(first, second):
    """Whether two servers were told the same, each for its own shard."""
    return [dataclasses.replace(each, shard=0) for each in first] == [
        dataclasses.replace(each, shard=0) for each in second
    ]


@pytest.fixture
def cluster():
    """Two servers, both with a part of the model, which is not registered yet."""
    return Cluster(2)


# Trainers


def test_a_nonce_that_joins_twice_gets_the_same_id(cluster):
    assert cluster.join("a", 0) == cluster.join("a", 0)


def test_a_rank_that_a_living_trainer_holds_is_taken_until_its_lease_ends(cluster):
    cluster.join("a", 0)
    with pytest.raises(RankTaken, match="rank 0"):
        cluster.join("b", 0)
    cluster.pass_time(TRAINER_LEASE_S, heard=("s0", "s1"))
    cluster.join("b", 0)


def test_ids_are_never_reused():
    cluster = Cluster(first_trainer_id=70)
    seen = []
    for number in range(5):
        seen.append(cluster.join(f"nonce {number}", 0))
        cluster.leave(seen[-1])
    assert seen == [70, 71, 72, 73, 74]


def test_a_trainer_whose_lease_has_ended_is_refused_for_ever(cluster):
    trainer = cluster.join("a")
    cluster.ready(trainer)
    cluster.pass_time(TRAINER_LEASE_S, heard=("s0", "s1"))
    for call in (
        lambda: cluster.renew(trainer),
        lambda: cluster.register(trainer),
        lambda: cluster.attach(trainer),
        lambda: cluster.coordinator.drop_model(cluster.new_id(trainer), "m"),
        lambda: cluster.join("a"),
    ):
        with pytest.raises(TrainerEnded, match=f"trainer {trainer} has ended"):
            call()
    assert cluster.model().state == "ready"


def test_a_trainer_that_renews_lives_on(cluster):
    trainer = cluster.join("a")
    cluster.pass_time(3 * TRAINER_LEASE_S, renewed=[trainer])
    assert [each.trainer_id for each in cluster.status().trainers] == [trainer]


def test_every_server_is_told_once_that_a_trainer_has_ended(cluster):
    trainer = cluster.join("a")
    for _ in range(2):
        cluster.leave(trainer)
    assert cluster.told() == {server: [EndTrainer(trainer_id=trainer)] for server in ("s0", "s1")}


def test_every_server_is_told_who_joins_and_who_lives_when_it_links(cluster):
    first = cluster.join("a")
    told = cluster.told(living=True)
    assert told == {server: [LivingTrainers(trainer_ids=()), AdmitTrainer(trainer_id=first)] for server in ("s0", "s1")}
    second = cluster.join("b")
    cluster.leave(first)
    cluster.told()
    cluster.link("s2")
    assert cluster.told(living=True) == {"s2": [LivingTrainers(trainer_ids=(second,))]}


def test_a_join_that_is_repeated_admits_the_same_trainer_again(cluster):
    trainer = cluster.join("a")
    cluster.told(living=True)
    cluster.join("a")
    assert cluster.told(living=True)["s0"] == [AdmitTrainer(trainer_id=trainer)]


def test_a_trainer_that_was_never_here_may_leave(cluster):
    cluster.leave(99)
    assert cluster.told() == {}


# Registration


def test_a_model_is_placed_when_enough_servers_have_joined():
    cluster = Cluster(1, min_servers=2)
    trainer = cluster.join("a")
    assert cluster.register(trainer) is None
    assert cluster.told() == {}
    assert cluster.coordinator.waiting_for("m") == (
        "servers: 1 have joined; expected 2 or more, and more than there are to be replicas"
    )
    cluster.link("s1")
    assert cluster.register(trainer) is None
    told = cluster.told()
    assert [(server, type(command)) for server, (command,) in told.items()] == [
        ("s0", CreateShard),
        ("s1", CreateShard),
    ]
    (first,), (second,) = [command.runs for (command,) in told.values()]
    assert first.start == 0
    assert first.stop == second.start
    assert [(command.round, command.version) for (command,) in told.values()] == [(0, 0)] * 2
    assert "s0, s1" in cluster.coordinator.waiting_for("m")


def test_servers_whose_lease_has_ended_do_not_count(cluster):
    cluster.pass_time(SERVER_LEASE_S + 0.5, heard=["s0"])
    cluster.register(cluster.join("a"))
    assert list(cluster.told()) == ["s0"]


def test_the_first_trainer_initialises_and_others_wait(cluster):
    first, second = cluster.join("a"), cluster.join("b")
    cluster.register(first)
    cluster.shards_created()
    registration = cluster.register(first)
    assert registration.initialise
    assert [place.server for place in registration.placement] == ["s0", "s1"]
    assert cluster.register(second) is None
    assert cluster.coordinator.waiting_for("m") == f"initial values from trainer {first}"
    cluster.told()
    cluster.report(ShardInitialised, "s0", trainer_id=first)
    assert cluster.told() == {}
    cluster.report(ShardInitialised, "s1", trainer_id=first)
    assert cluster.told() == {
        f"s{shard}": [ModelReady(model="m", shard=shard, epoch=1, initialiser=first)] for shard in (0, 1)
    }
    assert not cluster.register(second).initialise
    assert not cluster.register(first).initialise


def test_when_the_initialiser_s_lease_ends_the_next_trainer_initialises(cluster):
    first = cluster.join("a")
    cluster.register(first)
    cluster.shards_created()
    assert cluster.register(first).initialise
    cluster.report(ShardInitialised, "s0", trainer_id=first)
    second = cluster.join("b")
    cluster.pass_time(TRAINER_LEASE_S, heard=("s0", "s1"), renewed=[second])
    assert cluster.register(second).initialise
    cluster.shards_initialised(first)
    assert cluster.model().state == "initialising"
    cluster.report(ShardInitialised, "s1", trainer_id=second)
    assert cluster.model().state == "initialising"
    cluster.report(ShardInitialised, "s0", trainer_id=second)
    assert cluster.model().state == "ready"


def test_a_repeated_registration_gets_the_recorded_answer(cluster):
    first = cluster.join("a")
    cluster.register(first)
    cluster.shards_created()
    push_id = cluster.new_id(first)
    answer = cluster.coordinator.register(push_id, SPEC)
    cluster.shards_initialised(first)
    assert cluster.coordinator.register(push_id, SPEC) == answer
    assert answer.initialise


def test_a_registration_that_was_acknowledged_is_not_answered_again(cluster):
    first = cluster.join("a")
    cluster.ready(first)
    push_id = PushId(first, 1000, 1)
    cluster.coordinator.register(push_id, SPEC)
    cluster.coordinator.register(PushId(first, 1001, 1001), SPEC)
    with pytest.raises(StalePush):
        cluster.coordinator.register(push_id, SPEC)


def test_parameter_order_that_differs_between_workers_is_refused_and_the_first_difference_named(cluster):
    spec = model_spec(tensors=(tensor_spec("w", 4), tensor_spec("b", 4), tensor_spec("v", 4)))
    cluster.register(cluster.join("a"), spec)
    other = dataclasses.replace(spec, tensors=(spec.tensors[0], spec.tensors[2], spec.tensors[1]))
    with pytest.raises(
        LayoutMismatch, match=r"tensor 1: expected 'b' \[4\] float32 group 0, got 'v' \[4\] float32 group 0"
    ):
        cluster.register(cluster.join("b"), other)


def test_a_second_model_under_a_taken_name_is_refused_and_the_first_one_is_unharmed(cluster):
    trainer = cluster.join("a")
    cluster.ready(trainer)
    with pytest.raises(LayoutMismatch, match="'m' is registered with another description"):
        cluster.register(cluster.join("b"), model_spec(tensors=(tensor_spec("other", 3),)))
    assert cluster.told() == {}
    assert cluster.model().state == "ready"


def test_a_model_that_cannot_be_distributed_leaves_nothing_behind(cluster):
    with pytest.raises(InvalidRequest, match="multiple of 64"):
        cluster.register(cluster.join("a"), model_spec(bucket_bytes=1))
    assert cluster.told() == {}
    assert cluster.status().models == ()


def test_several_models_live_side_by_side(cluster):
    trainer = cluster.join("a")
    cluster.ready(trainer)
    cluster.ready(trainer, model_spec(name="n"), epoch=2)
    cluster.commit(trainer, 1, name="n", epoch=2, servers=cluster.placed("n"))
    assert (cluster.model("m").round, cluster.model("n").round) == (0, 1)


def test_a_trainer_attaches_to_a_model_that_is_registered_only(cluster):
    with pytest.raises(UnknownModel, match="'m' is not registered here"):
        cluster.attach(cluster.join("a"))


# Rounds


def test_a_round_is_decided_when_every_shard_has_everything(cluster):
    trainer = cluster.join("a", 0)
    cluster.ready(trainer)
    cluster.commit(trainer, 1, servers=["s0"])
    assert cluster.told() == {}
    cluster.commit(trainer, 1, servers=["s1"])
    told = cluster.told()
    assert same(told["s0"], told["s1"])
    (apply,) = told["s0"]
    assert (apply.model, apply.epoch, apply.decision.round) == ("m", 1, 1)


def test_a_repeated_report_decides_nothing_twice(cluster):
    trainer = cluster.join("a")
    cluster.ready(trainer)
    cluster.commit(trainer, 1)
    cluster.told()
    cluster.commit(trainer, 1)
    cluster.shards_created()
    cluster.shards_initialised(trainer)
    cluster.applied(1)
    cluster.applied(1)
    assert cluster.told() == {}
    assert cluster.model().round == 1


def test_a_trainer_that_dies_between_its_commits_is_in_no_round_and_the_others_go_on(cluster):
    first, second = cluster.join("a", 0), cluster.join("b", 1)
    cluster.ready(first)
    cluster.attach(second)
    cluster.commit(second, 1, servers=["s0"])
    cluster.commit(first, 1)
    assert cluster.told() == {}
    cluster.pass_time(TRAINER_LEASE_S, heard=("s0", "s1"), renewed=[first])
    told = cluster.told()["s0"]
    assert [type(command) for command in told] == [EndTrainer, Apply]
    assert [each.trainer_id for each in told[1].decision.contributions] == [first]
    cluster.commit(second, 1)
    assert cluster.told() == {}


def test_a_repeated_attach_answers_the_same_and_counts_once(cluster):
    spec = model_spec(world_size=2)
    trainer = cluster.join("a")
    cluster.ready(trainer, spec)
    push_id = cluster.new_id(trainer)
    now_s = cluster.clock.now_s()
    first = cluster.coordinator.attach(push_id, "m", 1, now_s)
    assert cluster.coordinator.attach(push_id, "m", 1, now_s) == first == Attachment(round=0, step=0)
    assert cluster.model().missing_trainers == 1


def test_an_attach_that_completes_the_world_lets_the_first_round_be_decided():
    cluster = Cluster(1)
    first, second = cluster.join("a", 0), cluster.join("b", 1)
    cluster.ready(first, model_spec(world_size=2))
    cluster.commit(first, 1)
    assert cluster.told() == {}
    cluster.attach(second)
    cluster.commit(second, 1)
    assert len(cluster.told()["s0"][0].decision.contributions) == 2


def test_a_round_that_a_server_cannot_apply_fails_the_model_by_name(cluster):
    trainer = cluster.join("a")
    cluster.ready(trainer)
    cluster.commit(trainer, 1)
    cluster.told()
    cluster.report(ShardFailed, "s1", failure="apply round 1: RuntimeError: boom")
    assert cluster.model().state == "failed"
    assert "server s1 could not apply round 1: RuntimeError: boom" in cluster.model().failure
    assert {type(command) for commands in cluster.told().values() for command in commands} == {FailModel}
    cluster.commit(trainer, 2)
    assert cluster.told() == {}


def test_a_shard_that_cannot_be_made_fails_the_model_by_name(cluster):
    trainer = cluster.join("a")
    cluster.register(trainer)
    cluster.report(ShardFailed, "s1", failure="make its shard: MemoryError: no")
    with pytest.raises(ModelFailed, match="server s1 could not make its shard: MemoryError: no"):
        cluster.register(trainer)


# Gradients that are refused, prepared rounds, deadlines


def two_trainers(cluster, **arguments):
    """A ready model under Bsp with these arguments, and two trainers that are attached to it."""
    first, second = cluster.join("a", 0), cluster.join("b", 1)
    cluster.ready(first, model_spec(sync_policy_arguments=arguments, world_size=2))
    cluster.attach(second)
    return first, second


def test_a_late_gradient_is_refused_on_every_shard(cluster):
    first, second = two_trainers(cluster, backup_workers=1)
    cluster.commit(first, 1)
    cluster.commit(second, 1, base_round=0)
    told = cluster.told()
    assert same(told["s0"], told["s1"])
    apply, reject = told["s0"]
    assert (apply.decision.round, reject.refusal.trainer_id, reject.refusal.step) == (1, second, 1)
    assert (cluster.model().num_accepted, cluster.model().num_rejected) == (1, 1)


def test_a_server_that_links_again_is_told_of_refusals_that_it_may_have_missed(cluster):
    first, second = two_trainers(cluster, backup_workers=1)
    cluster.commit(first, 1)
    cluster.commit(second, 1, base_round=0)
    cluster.applied(1)
    missed = cluster.told()["s1"][-1]
    assert isinstance(missed, Reject)
    cluster.coordinator.server_unlinked("s1", 1)
    cluster.link("s1")
    again = cluster.told()["s1"]
    assert [type(each) for each in again[-2:]] == [Reject, AbandonPlan]  # it may have missed that a plan was given up
    assert again[-2] == missed


def test_a_round_is_prepared_on_every_shard_and_decided_when_all_have_answered(cluster):
    trainer = cluster.join("a")
    cluster.ready(trainer)
    cluster.commit(trainer, 1, rules=GradientRules(max_norm=1.0))
    told = cluster.told()
    assert same(told["s0"], told["s1"])
    ((prepare,), _) = told.values()
    assert isinstance(prepare, Prepare)
    cluster.report(Prepared, "s0", round=1, attempt=1, squares=(9.0,), nonfinite=())
    assert cluster.told() == {}
    cluster.coordinator.server_unlinked("s1", 1)
    cluster.link("s1")
    assert cluster.told()["s1"][-1] == dataclasses.replace(prepare, shard=1)
    cluster.report(Prepared, "s1", round=1, attempt=1, squares=(16.0,), nonfinite=())
    told = cluster.told()
    assert same(told["s0"], told["s1"])
    assert [(type(each), each.decision.grad_norm) for each in told["s0"]] == [(Apply, 5.0)]


def test_a_server_that_links_again_hears_of_the_dead_after_the_round_in_preparation(cluster):
    trainer = cluster.join("a")
    cluster.ready(trainer)
    cluster.coordinator.server_unlinked("s1", 1)
    cluster.commit(trainer, 1, rules=GradientRules(max_norm=1.0))
    cluster.leave(trainer)
    cluster.told()
    cluster.link("s1")
    assert [type(each) for each in cluster.told(living=True)["s1"]] == [
        CreateShard,
        ModelReady,
        Prepare,
        LivingTrainers,
    ]


def test_nothing_is_decided_after_a_model_has_failed(cluster):
    trainer = cluster.join("a")
    cluster.ready(trainer)
    cluster.commit(trainer, 1, rules=GradientRules(max_norm=1.0))
    cluster.report(ShardFailed, "s0", failure="prepare round 1: boom")
    cluster.told()
    for server in ("s0", "s1"):
        cluster.report(Prepared, server, round=1, attempt=1, squares=(), nonfinite=())
    assert cluster.told() == {}


def test_a_round_whose_deadline_has_passed_is_decided_though_nobody_reports(cluster):
    first, second = two_trainers(cluster, deadline=2.0)
    cluster.commit(first, 1)
    cluster.pass_time(1.5, heard=("s0", "s1"), renewed=[first, second])
    assert cluster.told() == {}
    assert cluster.model().waiting_for_ranks == (1,)
    cluster.clock.advance(0.5)
    assert cluster.coordinator.expire(cluster.clock.now_s())
    (apply,) = cluster.told()["s0"]
    assert [each.trainer_id for each in apply.decision.contributions] == [first]


def test_a_pause_of_the_coordinator_itself_ends_no_round(cluster):
    """Nobody could report meanwhile. What has come since counts from when it came, and not from the future."""
    first, _ = two_trainers(cluster, deadline=2.0)
    cluster.pass_time(0.5)
    cluster.clock.advance(1000.0)
    cluster.commit(first, 1)
    cluster.coordinator.expire(cluster.clock.now_s())
    cluster.pass_time(1.5)
    assert cluster.told() == {}
    cluster.pass_time(0.5)
    assert [type(each) for each in cluster.told()["s0"]] == [Apply]


def test_a_pause_while_a_gradient_waits_moves_the_deadline(cluster):
    first, _ = two_trainers(cluster, deadline=2.0)
    cluster.commit(first, 1)
    cluster.pass_time(1.0)
    cluster.clock.advance(1000.0)
    cluster.coordinator.expire(cluster.clock.now_s())
    cluster.pass_time(0.5)
    assert cluster.told() == {}
    cluster.pass_time(0.5)
    assert [type(each) for each in cluster.told()["s0"]] == [Apply]


def test_a_trainer_that_attaches_hears_the_round_and_the_last_step_that_anybody_has_seen(cluster):
    trainer = cluster.join("a")
    cluster.ready(trainer)
    cluster.commit(trainer, 4)
    cluster.commit(trainer, 5, servers=["s1"])
    assert cluster.attach(trainer) == Attachment(round=1, step=5)
    assert cluster.attach(cluster.join("b")) == Attachment(round=1, step=0)


# Another description in the place of a model


LARGER = model_spec(tensors=(tensor_spec("w", 24), tensor_spec("b", 4), tensor_spec("v", 80)), world_size=2)


def at_the_barrier(cluster):
    """Two trainers that have done two rounds; nobody has given the model up yet."""
    first, second = two_trainers(cluster)
    for step in (1, 2):
        for trainer in (first, second):
            cluster.commit(trainer, step)
        cluster.applied(step)
    cluster.told()
    return first, second


def give_up(cluster, trainer, spec=LARGER, *, epoch=1, **about):
    return cluster.register(trainer, spec, replaces=epoch, **about)


def test_a_model_goes_on_with_another_description_once_every_attached_trainer_asks_for_it(cluster):
    first, second = at_the_barrier(cluster)
    assert give_up(cluster, second) is None
    assert cluster.told() == {}
    assert cluster.coordinator.waiting_for("m") == "the ranks [0] to change the model in the same way"
    assert give_up(cluster, first) is None
    told = cluster.told()
    assert told.keys() == {"s0", "s1"}
    for drop, create in told.values():
        assert drop == DropShard(model="m", shard=create.shard, epoch=1)
        assert (create.epoch, create.spec, create.round, create.version) == (2, LARGER, 2, 2)
    assert give_up(cluster, first) is None
    cluster.shards_created(epoch=2)
    assert give_up(cluster, second) is None
    registration = give_up(cluster, first)
    assert (registration.initialise, registration.epoch) == (True, 2)
    cluster.shards_initialised(first, epoch=2)
    assert not give_up(cluster, first, initialised=2).initialise
    assert not give_up(cluster, second).initialise
    assert cluster.told()["s0"] == [ModelReady(model="m", shard=0, epoch=2, initialiser=first)]
    for trainer in (first, second):
        assert cluster.attach(trainer, epoch=2) == Attachment(round=2, step=2)
        cluster.commit(trainer, 3, epoch=2)
    (apply,) = cluster.told()["s1"]
    assert (apply.epoch, apply.decision.round, len(apply.decision.contributions)) == (2, 3, 2)


def test_a_trainer_that_steps_on_has_given_up_asking(cluster):
    """Its call ran into its deadline. The model must not be taken from under it when the others ask at last."""
    first, second = at_the_barrier(cluster)
    give_up(cluster, first)
    for trainer in (first, second):
        cluster.commit(trainer, 3)
    assert cluster.model().round == 3
    cluster.told()
    assert give_up(cluster, second) is None
    assert cluster.told() == {}
    assert give_up(cluster, first) is None
    assert [type(each) for each in cluster.told()["s0"]] == [DropShard, CreateShard]


def test_a_trainer_that_waits_no_longer_has_given_up_asking(cluster):
    first, second = at_the_barrier(cluster)
    give_up(cluster, first)
    cluster.coordinator.withdraw(first, "m")
    cluster.coordinator.withdraw(first, "another")
    assert give_up(cluster, second) is None
    assert cluster.told() == {}
    assert cluster.coordinator.waiting_for("m") == "the ranks [0] to change the model in the same way"


def test_old_reports_that_are_repeated_take_no_request_back(cluster):
    first, second = at_the_barrier(cluster)
    give_up(cluster, first)
    cluster.commit(first, 2)
    give_up(cluster, second)
    assert [type(each) for each in cluster.told()["s0"]] == [DropShard, CreateShard]


def test_a_repeated_request_for_another_description_gets_the_recorded_answer(cluster):
    first, second = at_the_barrier(cluster)
    give_up(cluster, second)
    give_up(cluster, first)
    cluster.shards_created(epoch=2)
    push_id = cluster.new_id(first)
    answer = cluster.coordinator.register(push_id, LARGER, replaces=1)
    assert answer.initialise
    cluster.shards_initialised(first, epoch=2)
    cluster.told()
    assert cluster.coordinator.register(push_id, LARGER, replaces=1) == answer
    assert cluster.told() == {}


def test_a_trainer_that_dies_at_the_barrier_holds_up_nobody(cluster):
    first, second = at_the_barrier(cluster)
    assert give_up(cluster, second) is None
    cluster.leave(first)
    assert give_up(cluster, second) is None
    assert [type(each) for each in cluster.told()["s0"]] == [EndTrainer, DropShard, CreateShard]
    cluster.shards_created(epoch=2)
    assert give_up(cluster, second).initialise


def test_what_a_dead_trainer_asked_for_counts_no_more(cluster):
    first, second = at_the_barrier(cluster)
    give_up(cluster, first, model_spec(bucket_bytes=128, world_size=2))
    with pytest.raises(LayoutMismatch, match="is being changed by other trainers in another way"):
        give_up(cluster, second)
    cluster.leave(first)
    give_up(cluster, second)
    assert cluster.told()["s0"][-1].spec == LARGER


@pytest.mark.parametrize("created", [False, True], ids=["shards not made yet", "shards made"])
def test_when_the_trainer_whose_values_count_dies_another_one_s_do(cluster, created):
    first, second = at_the_barrier(cluster)
    give_up(cluster, second)
    give_up(cluster, first)
    if created:
        cluster.shards_created(epoch=2)
    cluster.leave(first)
    cluster.shards_created(epoch=2)
    assert give_up(cluster, second).initialise
    cluster.shards_initialised(second, epoch=2)
    assert cluster.told()["s0"][-1] == ModelReady(model="m", shard=0, epoch=2, initialiser=second)


def test_a_newcomer_never_initialises_a_model_that_others_have_trained(cluster):
    first, second = at_the_barrier(cluster)
    give_up(cluster, second)
    give_up(cluster, first)
    newcomer = cluster.join("c", 5)
    cluster.leave(first)
    cluster.shards_created(epoch=2)
    assert cluster.register(newcomer, LARGER) is None
    assert give_up(cluster, second).initialise


def test_a_model_that_everybody_left_while_it_was_changed_has_failed(cluster):
    first, second = at_the_barrier(cluster)
    give_up(cluster, second)
    give_up(cluster, first)
    cluster.leave(second)
    assert cluster.model().state == "creating"
    cluster.leave(first)
    assert "every trainer ended while its description was being changed" in cluster.model().failure
    assert isinstance(cluster.told()["s0"][-1], FailModel)
    with pytest.raises(ModelFailed, match="every trainer ended"):
        cluster.register(cluster.join("c"), LARGER)


def test_a_model_whose_trainers_left_before_it_was_changed_goes_on_as_it_is(cluster):
    first, second = at_the_barrier(cluster)
    give_up(cluster, first)
    cluster.leave(first)
    cluster.leave(second)
    assert cluster.model().state == "ready"


def test_a_server_that_links_again_while_a_model_is_changed_makes_the_new_shard(cluster):
    first, second = at_the_barrier(cluster)
    cluster.coordinator.server_unlinked("s1", 1)
    give_up(cluster, second)
    give_up(cluster, first)
    assert list(cluster.told()) == ["s0"]
    cluster.link("s1")
    (create,) = cluster.told()["s1"]
    assert (create.epoch, create.round) == (2, 2)
    cluster.report(ShardCreated, "s1", epoch=1)
    assert cluster.told() == {"s1": [DropShard(model="m", shard=1, epoch=1)]}


def test_a_newcomer_whose_description_was_replaced_before_it_attached_must_register_again(cluster):
    """It would take part with shards that it does not know."""
    first, second = at_the_barrier(cluster)
    newcomer = cluster.join("c")
    assert not cluster.register(newcomer, model_spec(world_size=2)).initialise
    give_up(cluster, second)
    give_up(cluster, first)
    with pytest.raises(StaleEpoch, match="'m' is of epoch 2 now, not 1; register it again"):
        cluster.attach(newcomer, epoch=1)
    assert cluster.coordinator.waiting_for("m") == "shards to be made on s0, s1"
    cluster.shards_created(epoch=2)
    assert give_up(cluster, first).initialise


def test_only_who_takes_part_may_change_a_model(cluster):
    at_the_barrier(cluster)
    with pytest.raises(InvalidRequest, match="trainer 3 is not attached to model 'm'; attach first"):
        give_up(cluster, cluster.join("c"))
    with pytest.raises(UnknownModel):
        give_up(cluster, cluster.join("d"), model_spec(name="other"))


def test_a_description_that_cannot_be_distributed_changes_nothing(cluster):
    first, second = at_the_barrier(cluster)
    impossible = model_spec(bucket_bytes=1, world_size=2)
    give_up(cluster, first, impossible)
    with pytest.raises(InvalidRequest, match="multiple of 64"):
        give_up(cluster, second, impossible)
    assert cluster.told() == {}
    assert cluster.model().state == "ready"


def test_a_model_can_be_changed_again_and_the_old_epochs_are_history(cluster):
    first, second = at_the_barrier(cluster)
    for epoch, spec in ((1, LARGER), (2, model_spec(world_size=2))):
        give_up(cluster, second, spec, epoch=epoch)
        give_up(cluster, first, spec, epoch=epoch)
        cluster.shards_created(epoch=epoch + 1)
        assert give_up(cluster, first, spec, epoch=epoch).initialise
        cluster.shards_initialised(first, epoch=epoch + 1)
    with pytest.raises(LayoutMismatch, match="registered with another description"):
        give_up(cluster, second, LARGER, epoch=1)


# Servers


def test_a_lost_server_fails_its_models_by_name_and_the_other_servers_are_told(cluster):
    trainer = cluster.join("a")
    cluster.ready(trainer)
    assert cluster.coordinator.expire(cluster.clock.now_s()) is False
    cluster.pass_time(SERVER_LEASE_S + 0.5, heard=["s0"], renewed=[trainer])
    told = cluster.told()
    assert list(told) == ["s0"]
    ((failed,),) = told.values()
    assert isinstance(failed, FailModel)
    assert "'m'" in failed.reason
    assert "server s1 at s1:1 was lost: nothing was heard from it for 4 s" in failed.reason
    for call in (lambda: cluster.register(trainer), lambda: cluster.attach(trainer)):
        with pytest.raises(ModelFailed, match="server s1 at s1:1 was lost"):
            call()


def test_a_lost_server_without_a_part_of_a_model_does_not_harm_it():
    cluster = Cluster(5)
    trainer = cluster.join("a")
    cluster.ready(trainer)
    idle = sorted({f"s{number}" for number in range(5)} - set(cluster.placed()))
    assert idle
    cluster.pass_time(SERVER_LEASE_S + 0.5, heard=cluster.placed(), renewed=[trainer])
    assert cluster.model().state == "ready"
    assert [server.name for server in cluster.status().servers if not server.alive] == idle


def test_a_server_that_is_heard_of_lives_on(cluster):
    cluster.pass_time(3 * SERVER_LEASE_S, heard=("s0", "s1"))
    assert all(server.alive for server in cluster.status().servers)


def test_a_second_server_under_the_name_of_a_linked_one_is_refused(cluster):
    with pytest.raises(ConfigError, match="'s0' is linked already, from s0:1"):
        cluster.link("s0", incarnation=2)
    assert cluster.status().servers[0].alive


def test_a_server_restarted_under_its_name_fails_its_models_and_serves_new_ones(cluster):
    trainer = cluster.join("a")
    cluster.ready(trainer)
    cluster.coordinator.server_unlinked("s1", 1)
    cluster.link("s1", incarnation=2)
    assert cluster.model().state == "failed"
    assert "server s1 at s1:1 was lost: it was restarted" in cluster.model().failure
    assert [type(command) for command in cluster.told()["s0"]] == [FailModel]
    assert all(server.alive for server in cluster.status().servers)
    cluster.ready(trainer, model_spec(name="n"), epoch=2)
    assert cluster.placed("n") == ["s0", "s1"]


def test_a_server_whose_lease_has_ended_does_not_come_back_as_it_was(cluster):
    cluster.coordinator.server_unlinked("s1", 1)
    cluster.pass_time(SERVER_LEASE_S + 0.5, heard=["s0"])
    with pytest.raises(ServerEnded, match="lease of server 's1' has ended"):
        cluster.link("s1", incarnation=1)
    cluster.link("s1", incarnation=2)


def test_a_server_that_links_again_within_its_lease_is_told_everything_again(cluster):
    trainer, gone = cluster.join("a", 0), cluster.join("b", 1)
    cluster.ready(trainer)
    cluster.commit(trainer, 1)
    cluster.commit(trainer, 2)
    cluster.applied(1)
    first_told = cluster.told()
    cluster.coordinator.server_unlinked("s1", 1)
    cluster.leave(gone)
    cluster.commit(trainer, 3)
    assert list(cluster.told()) == ["s0"]
    cluster.link("s1", incarnation=1)
    told = cluster.told(living=True)
    assert list(told) == ["s1"]
    create, ready, second, third, abandon, living = told["s1"]
    assert (create.epoch, create.spec) == (1, SPEC)
    assert (type(ready), ready.epoch) == (ModelReady, 1)
    assert second == first_told["s1"][1]
    assert third.decision.round == 3
    assert type(abandon) is AbandonPlan
    assert living == LivingTrainers(trainer_ids=(trainer,))
    assert cluster.model().state == "ready"


def test_a_server_that_links_again_hears_of_the_dead_after_the_rounds_that_count_them(cluster):
    """It frees what the dead have left, and would lack it in those rounds."""
    first, second = cluster.join("a", 0), cluster.join("b", 1)
    cluster.ready(first)
    cluster.attach(second)
    cluster.coordinator.server_unlinked("s1", 1)
    for trainer in (first, second):
        cluster.commit(trainer, 1)
    cluster.leave(second)
    cluster.told()
    cluster.link("s1", incarnation=1)
    told = cluster.told(living=True)["s1"]
    assert [type(each) for each in told] == [CreateShard, ModelReady, Apply, AbandonPlan, LivingTrainers]
    assert [each.trainer_id for each in told[2].decision.contributions] == [first, second]
    assert told[4].trainer_ids == (first,)


def test_a_server_that_links_again_while_its_model_is_not_ready_is_told_to_make_its_shard(cluster):
    cluster.register(cluster.join("a"))
    first_told = cluster.told()
    cluster.coordinator.server_unlinked("s1", 1)
    cluster.link("s1", incarnation=1)
    assert cluster.told() == {"s1": first_told["s1"]}


def test_a_server_that_links_again_is_told_that_its_model_has_failed(cluster):
    cluster.ready(cluster.join("a"))
    cluster.coordinator.server_unlinked("s1", 1)
    cluster.report(ShardFailed, "s0", failure="apply round 1: boom")
    assert "s1" not in cluster.told()
    cluster.link("s1", incarnation=1)
    (failed,) = cluster.told()["s1"]
    assert isinstance(failed, FailModel)
    assert "boom" in failed.reason


def test_the_end_of_an_older_process_s_link_does_not_unlink_its_successor(cluster):
    cluster.coordinator.server_unlinked("s1", 1)
    cluster.link("s1", incarnation=2)
    cluster.coordinator.server_unlinked("s1", 1)
    cluster.register(cluster.join("a"))
    assert "s1" in cluster.told()


def test_what_is_unknown_about_servers_changes_nothing(cluster):
    cluster.coordinator.server_heard("s9", cluster.clock.now_s())
    cluster.coordinator.server_unlinked("s9", 1)
    assert [server.name for server in cluster.status().servers] == ["s0", "s1"]


# Dropped models and orphans


def test_a_dropped_model_frees_its_shards_and_its_name(cluster):
    trainer = cluster.join("a")
    cluster.ready(trainer)
    push_id = cluster.new_id(trainer)
    cluster.coordinator.drop_model(push_id, "m")
    assert cluster.told() == {f"s{shard}": [DropShard(model="m", shard=shard, epoch=1)] for shard in (0, 1)}
    with pytest.raises(UnknownModel):
        cluster.attach(trainer)
    cluster.ready(trainer, model_spec(tensors=(tensor_spec("other", 32),)), epoch=2)
    cluster.coordinator.drop_model(push_id, "m")
    assert cluster.model().state == "ready"
    assert cluster.told() == {}


def test_dropping_a_model_that_does_not_exist_is_no_error(cluster):
    cluster.coordinator.drop_model(cluster.new_id(cluster.join("a")), "m")
    assert cluster.told() == {}


def test_a_failed_model_can_be_dropped_and_registered_again(cluster):
    trainer = cluster.join("a")
    cluster.ready(trainer)
    cluster.report(ShardFailed, "s0", failure="apply round 1: boom")
    cluster.coordinator.drop_model(cluster.new_id(trainer), "m")
    cluster.told()
    cluster.ready(trainer, epoch=2)


@pytest.mark.parametrize(
    "report",
    [
        ShardCreated(model="m", shard=0, epoch=1),
        ShardInitialised(model="m", shard=0, epoch=1, trainer_id=1),
        Committed(model="m", shard=0, epoch=1, trainer_id=1, commit=commit(1)),
        Prepared(model="m", shard=0, epoch=1, round=1, attempt=1, squares=(), nonfinite=()),
        Applied(model="m", shard=0, epoch=1, round=1, version=1),
        ShardFailed(model="m", shard=0, epoch=1, failure="boom"),
    ],
    ids=lambda report: type(report).__name__,
)
@pytest.mark.parametrize("successor", [False, True], ids=["dropped", "replaced"])
def test_a_shard_of_a_model_that_is_gone_is_told_to_go(cluster, report, successor):
    trainer = cluster.join("a")
    cluster.ready(trainer)
    cluster.coordinator.drop_model(cluster.new_id(trainer), "m")
    if successor:
        cluster.ready(trainer, epoch=2)
    cluster.told()
    cluster.coordinator.report("s0", report, cluster.clock.now_s())
    assert cluster.told() == {"s0": [DropShard(model="m", shard=0, epoch=1)]}
    assert [model.state for model in cluster.status().models] == ["ready"] * successor


def test_a_shard_on_a_server_that_owns_nothing_of_the_model_is_told_to_go():
    cluster = Cluster(5)
    cluster.ready(cluster.join("a"))
    (idle, *_) = {f"s{number}" for number in range(5)} - set(cluster.placed())
    cluster.report(ShardCreated, idle, shard=0)
    assert cluster.told() == {idle: [DropShard(model="m", shard=0, epoch=1)]}


def test_commands_are_taken_once(cluster):
    cluster.register(cluster.join("a"))
    assert cluster.told()
    assert cluster.told() == {}


# Time


def test_a_pause_of_the_coordinator_itself_ends_no_lease(cluster):
    trainer = cluster.join("a")
    cluster.ready(trainer)
    cluster.pass_time(1.0, heard=("s0", "s1"), renewed=[trainer])
    cluster.clock.advance(1000.0)
    assert cluster.coordinator.expire(cluster.clock.now_s()) is False
    assert cluster.model().state == "ready"
    assert all(server.alive for server in cluster.status().servers)
    assert len(cluster.status().trainers) == 1


def test_after_a_pause_leases_end_when_their_rest_has_passed(cluster):
    trainer = cluster.join("a")
    cluster.pass_time(2.0)
    cluster.clock.advance(1000.0)
    cluster.coordinator.expire(cluster.clock.now_s())
    cluster.pass_time(SERVER_LEASE_S - 2.0)
    assert all(server.alive for server in cluster.status().servers)
    cluster.pass_time(0.5)
    assert not any(server.alive for server in cluster.status().servers)
    assert [each.trainer_id for each in cluster.status().trainers] == [trainer]
    cluster.pass_time(TRAINER_LEASE_S - SERVER_LEASE_S)
    assert cluster.status().trainers == ()


def test_what_arrives_after_a_pause_but_before_leases_are_judged_is_not_dated_into_the_future(cluster):
    trainer = cluster.join("a")
    cluster.clock.advance(1000.0)
    cluster.coordinator.server_heard("s0", cluster.clock.now_s())
    cluster.renew(trainer)
    cluster.coordinator.expire(cluster.clock.now_s())
    assert cluster.status().servers[0].silent_s == 0
    assert cluster.status().trainers[0].lease_s == TRAINER_LEASE_S


# Status


def test_status_shows_what_the_cluster_looks_like(cluster):
    second, first = cluster.join("b", 1), cluster.join("a", 0)
    cluster.ready(first, model_spec(world_size=3))
    cluster.attach(second)
    cluster.renew(first, sent_bytes=10, received_bytes=20, reported={"loss": 0.5})
    cluster.commit(first, 4, servers=["s0"])
    cluster.clock.advance(1.0)
    status = cluster.status()
    assert [(each.name, each.address, each.alive, each.silent_s) for each in status.servers] == [
        ("s0", "s0:1", True, 1.0),
        ("s1", "s1:1", True, 1.0),
    ]
    (model,) = status.models
    assert (model.name, model.state, model.failure, model.optimizer) == ("m", "ready", "", "SGD")
    assert (model.round, model.waiting_for_ranks, model.missing_trainers) == (0, (0, 1), 1)
    assert [shard.server for shard in model.shards] == ["s0", "s1"]
    assert [(each.trainer_id, each.rank, each.step) for each in status.trainers] == [(first, 0, 4), (second, 1, 0)]
    assert status.trainers[0].lease_s == TRAINER_LEASE_S - 1.0
    assert (status.trainers[0].sent_bytes, status.trainers[0].received_bytes) == (10, 20)
    assert status.trainers[0].reported == {"loss": 0.5}


def test_status_shows_the_round_of_each_shard(cluster):
    trainer = cluster.join("a")
    cluster.ready(trainer)
    cluster.commit(trainer, 1)
    cluster.applied(1, servers=["s1"])
    assert [(shard.server, shard.round, shard.version) for shard in cluster.model().shards] == [
        ("s0", 0, 0),
        ("s1", 1, 1),
    ]
    assert cluster.model().round == 1
