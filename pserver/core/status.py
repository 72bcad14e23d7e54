"""What whoever looks at a coordinator sees."""

from collections.abc import Collection, Iterable

from pserver.core.membership import Member
from pserver.core.models import Model
from pserver.core.server_table import Server
from pserver.core.sync import describe_policy
from pserver.types import ClusterStatus, ModelStatus, ReplicaStatus, ServerStatus, ShardStatus, TrainerStatus


def cluster_status(
    servers: Iterable[Server], models: Collection[Model], members: Iterable[Member], now_s: float
) -> ClusterStatus:
    """The status of these servers, models and trainers, by rank."""
    return ClusterStatus(
        servers=tuple(
            ServerStatus(name=each.name, address=each.address, alive=each.alive, silent_s=now_s - each.heard_s)
            for each in servers
        ),
        models=tuple(_model_status(model, now_s) for model in models),
        trainers=tuple(
            TrainerStatus(
                trainer_id=member.trainer_id,
                rank=member.rank,
                step=max((each.rounds.step_of(member.trainer_id) for each in models), default=0),
                lease_s=member.lease_ends_s - now_s,
                lag_rounds=max((each.rounds.lag_of(member.trainer_id) for each in models), default=0),
                sent_bytes=member.sent_bytes,
                received_bytes=member.received_bytes,
                reported=member.reported,
            )
            for member in sorted(members, key=lambda each: each.rank)
        ),
    )


def _model_status(model: Model, now_s: float) -> ModelStatus:
    counts = model.rounds.statistics()
    return ModelStatus(
        name=model.spec.name,
        state=model.state.value,
        failure=model.failure,
        sync_policy=describe_policy(model.rounds.policy),
        optimizer=model.spec.optimizer,
        round=model.rounds.round,
        waiting_for_ranks=tuple(model.rounds.waiting_for(now_s)),
        missing_trainers=model.rounds.missing_trainers,
        num_accepted=counts.num_accepted,
        num_rejected=counts.num_rejected,
        num_skipped=counts.num_skipped,
        staleness=counts.staleness,
        shards=tuple(
            ShardStatus(
                shard=group.shard,
                server=group.primary,
                epoch=group.epoch,
                num_bytes=model.shard_bytes[group.shard],
                round=model.shard_rounds[group.shard],
                version=model.versions[group.shard],
                replicas=tuple(
                    ReplicaStatus(server=each.server, state=each.state.value, lag=each.lag)
                    for each in group.replicas.values()
                ),
                num_missing_replicas=model.spec.replicas - len(group.in_sync),
                electing=group.electing,
            )
            for group in model.groups
        ),
    )
