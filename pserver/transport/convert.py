"""Core's values <-> messages of the protocol."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pserver.core import messages as core
from pserver.core.contexts import CommitInfo
from pserver.errors import InvalidRequest
from pserver.transport.gen import coordinator_pb2, shards_pb2, types_pb2
from pserver.types import (
    ClusterStatus,
    GroupOptions,
    ModelStatus,
    PushId,
    ServerStatus,
    ShardStatus,
    StepResult,
    TrainerStatus,
)
from pserver.wire.layout import TensorSpec
from pserver.wire.tensors import dtype_of_code, element_type
from pserver.wire.values import pack_value, unpack_value

# Small parts


def push_id_to_proto(push_id: PushId) -> types_pb2.PushId:
    return types_pb2.PushId(
        trainer_id=push_id.trainer_id,
        sequence=push_id.sequence,
        lowest_unacknowledged=push_id.lowest_unacknowledged,
    )


def push_id_from_proto(message: types_pb2.PushId) -> PushId:
    return PushId(message.trainer_id, message.sequence, message.lowest_unacknowledged)


def options_to_bytes(options: Sequence[GroupOptions]) -> bytes:
    return pack_value([dict(group) for group in options])


def options_from_bytes(data: bytes) -> tuple[GroupOptions, ...]:
    value = unpack_value(data) if data else []
    if not isinstance(value, list) or not all(isinstance(group, dict) for group in value):
        raise InvalidRequest(f"optimizer options must be a list of maps, one per parameter group, got {value!r}")
    return tuple(value)


def _map_from_bytes(data: bytes) -> Mapping[str, object]:
    value = unpack_value(data) if data else {}
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise InvalidRequest(f"expected a map with names as keys, got {value!r}")
    return value


def _tensor_to_proto(spec: TensorSpec) -> types_pb2.TensorSpec:
    return types_pb2.TensorSpec(
        name=spec.name,
        shape=spec.shape,
        dtype=element_type(spec.dtype).code,  # type: ignore[arg-type]
        group=spec.group,
    )


# Models


def spec_to_proto(spec: core.ModelSpec) -> types_pb2.ModelSpec:
    return types_pb2.ModelSpec(
        name=spec.name,
        tensors=[_tensor_to_proto(each) for each in spec.tensors],
        bucket_bytes=spec.bucket_bytes,
        optimizer=spec.optimizer,
        optimizer_groups=options_to_bytes(spec.optimizer_groups),
        sync_policy=spec.sync_policy,
        sync_policy_arguments=pack_value(dict(spec.sync_policy_arguments)),
        world_size=spec.world_size,
    )


def spec_from_proto(message: types_pb2.ModelSpec) -> core.ModelSpec:
    return core.ModelSpec(
        name=message.name,
        tensors=tuple(
            TensorSpec(name=each.name, shape=tuple(each.shape), dtype=dtype_of_code(each.dtype), group=each.group)
            for each in message.tensors
        ),
        bucket_bytes=message.bucket_bytes,
        optimizer=message.optimizer,
        optimizer_groups=options_from_bytes(message.optimizer_groups),
        sync_policy=message.sync_policy,
        sync_policy_arguments=_map_from_bytes(message.sync_policy_arguments),
        world_size=message.world_size,
    )


def placement_to_proto(placement: Iterable[core.ShardPlacement]) -> list[types_pb2.ShardPlacement]:
    return [
        types_pb2.ShardPlacement(
            server=each.server, address=each.address, first_bucket=each.first_bucket, last_bucket=each.last_bucket
        )
        for each in placement
    ]


def placement_from_proto(messages: Iterable[types_pb2.ShardPlacement]) -> tuple[core.ShardPlacement, ...]:
    return tuple(
        core.ShardPlacement(
            server=each.server, address=each.address, first_bucket=each.first_bucket, last_bucket=each.last_bucket
        )
        for each in messages
    )


# Steps


def commit_to_proto(commit: CommitInfo, wait_s: float) -> shards_pb2.Commit:
    return shards_pb2.Commit(
        step=commit.step,
        samples=commit.samples,
        options=options_to_bytes(commit.options),
        wait_s=wait_s,
    )


def commit_from_proto(message: shards_pb2.Commit) -> CommitInfo:
    return CommitInfo(
        step=message.step,
        samples=message.samples,
        options=options_from_bytes(message.options),
    )


def outcome_to_proto(result: StepResult) -> shards_pb2.Outcome:
    return shards_pb2.Outcome(
        round=result.round,
        accepted=result.accepted,
        reason=result.reason,
        num_contributions=result.num_trainers,
        options=options_to_bytes(result.options),
    )


def outcome_from_proto(message: shards_pb2.Outcome) -> StepResult:
    return StepResult(
        round=message.round,
        accepted=message.accepted,
        reason=message.reason,
        num_trainers=message.num_contributions,
        options=options_from_bytes(message.options),
    )


def _decision_to_proto(decision: core.Decision) -> types_pb2.Decision:
    return types_pb2.Decision(
        round=decision.round,
        contributions=[
            types_pb2.Contribution(trainer_id=each.trainer_id, rank=each.rank, step=each.step, weight=each.weight)
            for each in decision.contributions
        ],
        divisor=decision.divisor,
        options=options_to_bytes(decision.options),
    )


def _decision_from_proto(message: types_pb2.Decision) -> core.Decision:
    return core.Decision(
        round=message.round,
        contributions=tuple(
            core.Contribution(trainer_id=each.trainer_id, rank=each.rank, step=each.step, weight=each.weight)
            for each in message.contributions
        ),
        divisor=message.divisor,
        options=options_from_bytes(message.options),
    )


# The link: commands and reports whose fields are plain travel field by field

_PLAIN_COMMANDS = {
    "model_ready": core.ModelReady,
    "end_trainer": core.EndTrainer,
    "fail_model": core.FailModel,
    "drop_shard": core.DropShard,
}
_PLAIN_REPORTS = {
    "shard_created": core.ShardCreated,
    "shard_initialised": core.ShardInitialised,
    "applied": core.Applied,
    "shard_failed": core.ShardFailed,
}


def command_to_proto(command: core.Command) -> coordinator_pb2.CoordinatorMessage:
    message = coordinator_pb2.CoordinatorMessage()
    if isinstance(command, core.CreateShard):
        message.create_shard.spec.CopyFrom(spec_to_proto(command.spec))
        message.create_shard.epoch = command.epoch
        message.create_shard.first_bucket = command.first_bucket
        message.create_shard.last_bucket = command.last_bucket
    elif isinstance(command, core.Apply):
        message.apply.model, message.apply.epoch = command.model, command.epoch
        message.apply.decision.CopyFrom(_decision_to_proto(command.decision))
    else:
        _fill(message, _PLAIN_COMMANDS, command)
    return message


def command_from_proto(message: coordinator_pb2.CoordinatorMessage) -> core.Command:
    kind = message.WhichOneof("kind")
    if kind == "create_shard":
        create = message.create_shard
        return core.CreateShard(
            spec=spec_from_proto(create.spec),
            epoch=create.epoch,
            first_bucket=create.first_bucket,
            last_bucket=create.last_bucket,
        )
    if kind == "apply":
        apply = message.apply
        return core.Apply(model=apply.model, epoch=apply.epoch, decision=_decision_from_proto(apply.decision))
    command: core.Command = _read(message, _PLAIN_COMMANDS, kind)
    return command


def report_to_proto(report: core.Report) -> coordinator_pb2.ServerMessage:
    message = coordinator_pb2.ServerMessage()
    if isinstance(report, core.Committed):
        message.committed.model, message.committed.epoch = report.model, report.epoch
        message.committed.trainer_id, message.committed.step = report.trainer_id, report.step
        message.committed.samples = report.samples
        message.committed.options = options_to_bytes(report.options)
    else:
        _fill(message, _PLAIN_REPORTS, report)
    return message


def report_from_proto(message: coordinator_pb2.ServerMessage) -> core.Report:
    kind = message.WhichOneof("kind")
    if kind == "committed":
        committed = message.committed
        return core.Committed(
            model=committed.model,
            epoch=committed.epoch,
            trainer_id=committed.trainer_id,
            step=committed.step,
            samples=committed.samples,
            options=options_from_bytes(committed.options),
        )
    report: core.Report = _read(message, _PLAIN_REPORTS, kind)
    return report


def _fill(message: Any, kinds: Mapping[str, type], value: object) -> None:
    kind = next(name for name, cls in kinds.items() if cls is type(value))
    part = getattr(message, kind)
    part.SetInParent()
    for field in kinds[kind].__dataclass_fields__:  # type: ignore[attr-defined]
        setattr(part, field, getattr(value, field))


def _read(message: Any, kinds: Mapping[str, Callable[..., Any]], kind: str | None) -> Any:
    if kind is None or kind not in kinds:
        raise InvalidRequest(f"a message of kind {kind!r} came over a link; expected one of {sorted(kinds)}")
    part = getattr(message, kind)
    return kinds[kind](**{field: getattr(part, field) for field in kinds[kind].__dataclass_fields__})  # type: ignore[attr-defined]


# Status


def status_to_proto(status: ClusterStatus) -> coordinator_pb2.StatusReply:
    return coordinator_pb2.StatusReply(
        servers=[_same(coordinator_pb2.ServerStatus, each) for each in status.servers],
        models=[
            _same(
                coordinator_pb2.ModelStatus,
                each,
                shards=[_same(coordinator_pb2.ShardStatus, shard) for shard in each.shards],
            )
            for each in status.models
        ],
        trainers=[_same(coordinator_pb2.TrainerStatus, each) for each in status.trainers],
    )


def status_from_proto(message: coordinator_pb2.StatusReply) -> ClusterStatus:
    return ClusterStatus(
        servers=tuple(_back(ServerStatus, each) for each in message.servers),
        models=tuple(
            _back(
                ModelStatus,
                each,
                waiting_for_ranks=tuple(each.waiting_for_ranks),
                shards=tuple(_back(ShardStatus, shard) for shard in each.shards),
            )
            for each in message.models
        ),
        trainers=tuple(_back(TrainerStatus, each, reported=dict(each.reported)) for each in message.trainers),
    )


def _same(message_type: Any, value: Any, **replaced: object) -> Any:
    fields = {name: getattr(value, name) for name in type(value).__dataclass_fields__}
    return message_type(**{**fields, **replaced})


def _back(cls: Any, message: Any, **replaced: object) -> Any:
    return cls(**{name: replaced.get(name, getattr(message, name)) for name in cls.__dataclass_fields__})
