"""Core's values <-> messages of the protocol."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from pserver.core import messages as core
from pserver.core.messages import CommitInfo
from pserver.core.rules import GradientRules, NonFinite
from pserver.core.state_staging import StateChunk
from pserver.errors import InvalidRequest
from pserver.transport.gen import coordinator_pb2, shards_pb2, types_pb2
from pserver.types import (
    ClusterStatus,
    GroupOptions,
    ModelStatus,
    PushId,
    ReplicaStatus,
    ServerStatus,
    ShardStatus,
    StepResult,
    TrainerStatus,
)
from pserver.wire.layout import MAX_TENSORS, TensorSpec
from pserver.wire.tensors import dtype_of_code, element_type
from pserver.wire.values import pack_value, unpack_value

#: Most parameter groups of an optimizer: each costs a try of the optimizer when a model is registered.
MAX_GROUPS = 4096
#: Options of up to so many bytes are remembered in case that the same come again.
MAX_REMEMBERED_BYTES = 4096

# Small parts


def push_id_to_proto(push_id: PushId) -> types_pb2.PushId:
    return types_pb2.PushId(
        trainer_id=push_id.trainer_id,
        sequence=push_id.sequence,
        lowest_unacknowledged=push_id.lowest_unacknowledged,
    )


def push_id_from_proto(message: types_pb2.PushId) -> PushId:
    return PushId(message.trainer_id, message.sequence, message.lowest_unacknowledged)


class _Options(tuple[GroupOptions, ...]):
    """Options that came, and the bytes that they came in: most go on to somebody else."""

    data: bytes


def options_to_bytes(options: Sequence[GroupOptions]) -> bytes:
    if isinstance(options, _Options):
        return options.data
    return pack_value([dict(group) for group in options])


def options_from_bytes(data: bytes) -> tuple[GroupOptions, ...]:
    # Most steps have the options of the step before. A few steps' worth is kept, and nothing large.
    return _remembered_options(data) if len(data) <= MAX_REMEMBERED_BYTES else _options(data)


def _options(data: bytes) -> _Options:
    value = unpack_value(data) if data else []
    if not isinstance(value, list) or not all(isinstance(group, dict) for group in value):
        raise InvalidRequest(f"optimizer options must be a list of maps, one per parameter group, got {value!r:.200}")
    if len(value) > MAX_GROUPS:
        raise InvalidRequest(f"an optimizer may have {MAX_GROUPS} parameter groups, but {len(value)} came")
    options = _Options(value)
    options.data = data
    return options


_remembered_options = lru_cache(maxsize=64)(_options)


def _map_from_bytes(data: bytes) -> Mapping[str, object]:
    value = unpack_value(data) if data else {}
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise InvalidRequest(f"expected a map with names as keys, got {value!r:.200}")
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
        buffers=spec.buffers,
        codec=spec.codec,
        codec_arguments=pack_value(dict(spec.codec_arguments)),
        pull_codec=spec.pull_codec,
        replicas=spec.replicas,
    )


def spec_from_proto(message: types_pb2.ModelSpec) -> core.ModelSpec:
    if len(message.tensors) > MAX_TENSORS:
        raise InvalidRequest(f"a model may have {MAX_TENSORS} tensors, but {len(message.tensors)} came")
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
        buffers=message.buffers,
        codec=message.codec,
        codec_arguments=_map_from_bytes(message.codec_arguments) if message.codec_arguments else {},
        pull_codec=message.pull_codec,
        replicas=message.replicas,
    )


def _runs_to_proto(runs: Iterable[range]) -> list[types_pb2.BucketRun]:
    return [types_pb2.BucketRun(first=run.start, last=run.stop) for run in runs]


def _runs_from_proto(messages: Iterable[types_pb2.BucketRun]) -> tuple[range, ...]:
    return tuple(range(each.first, each.last) for each in messages)


def placement_to_proto(placement: Iterable[core.ShardPlacement]) -> list[types_pb2.ShardPlacement]:
    return [_same(types_pb2.ShardPlacement, each, runs=_runs_to_proto(each.runs)) for each in placement]


def placement_from_proto(messages: Iterable[types_pb2.ShardPlacement]) -> tuple[core.ShardPlacement, ...]:
    return tuple(_back(core.ShardPlacement, each, runs=_runs_from_proto(each.runs)) for each in messages)


# Steps


def commit_to_proto(commit: CommitInfo) -> types_pb2.Commit:
    return types_pb2.Commit(
        step=commit.step,
        samples=commit.samples,
        options=options_to_bytes(commit.options),
        base_round=commit.base_round,
        max_norm=commit.rules.max_norm,
        clip_value=commit.rules.clip_value,
        nonfinite=commit.rules.nonfinite,
        overflow=commit.overflow,
    )


def commit_from_proto(message: types_pb2.Commit) -> CommitInfo:
    return CommitInfo(
        step=message.step,
        samples=message.samples,
        options=options_from_bytes(message.options),
        base_round=message.base_round,
        rules=_rules_from_proto(message),
        overflow=message.overflow,
    )


def outcome_to_proto(result: StepResult) -> shards_pb2.Outcome:
    return _same(shards_pb2.Outcome, result, options=options_to_bytes(result.options))  # type: ignore[no-any-return]


def outcome_from_proto(message: shards_pb2.Outcome) -> StepResult:
    return _back(  # type: ignore[no-any-return]
        StepResult,
        message,
        options=options_from_bytes(message.options),
        grad_norm=_optional(message, "grad_norm"),
    )


def decision_to_proto(decision: core.Decision) -> types_pb2.Decision:
    return _same(  # type: ignore[no-any-return]
        types_pb2.Decision,
        decision,
        contributions=[_same(types_pb2.Contribution, each) for each in decision.contributions],
        options=options_to_bytes(decision.options),
    )


def decision_from_proto(message: types_pb2.Decision) -> core.Decision:
    return _back(  # type: ignore[no-any-return]
        core.Decision,
        message,
        contributions=tuple(_back(core.Contribution, each) for each in message.contributions),
        options=options_from_bytes(message.options),
        clip_value=_optional(message, "clip_value"),
        grad_norm=_optional(message, "grad_norm"),
    )


def plan_to_proto(plan: core.Plan) -> types_pb2.Plan:
    return types_pb2.Plan(
        plan=decision_to_proto(plan.plan),
        attempt=plan.attempt,
        rules=_same(types_pb2.GradientRules, plan.rules),
    )


def plan_from_proto(message: types_pb2.Plan) -> core.Plan:
    return core.Plan(
        plan=decision_from_proto(message.plan),
        attempt=message.attempt,
        rules=_rules_from_proto(message.rules),
    )


def _rules_from_proto(message: types_pb2.GradientRules | types_pb2.Commit) -> GradientRules:
    return GradientRules(
        max_norm=_optional(message, "max_norm"),
        clip_value=_optional(message, "clip_value"),
        nonfinite=message.nonfinite,
    )


def nonfinite_to_proto(found: Iterable[NonFinite]) -> list[types_pb2.NonFinite]:
    return [_same(types_pb2.NonFinite, each) for each in found]


def nonfinite_from_proto(messages: Iterable[types_pb2.NonFinite]) -> tuple[NonFinite, ...]:
    return tuple(_back(NonFinite, each) for each in messages)


def _optional(message: Any, field: str) -> Any:
    """A field's value; None if it is absent."""
    return getattr(message, field) if message.HasField(field) else None


# Optimizer state


def state_chunk_to_proto(chunk: StateChunk) -> types_pb2.StateChunk:
    return types_pb2.StateChunk(
        bucket=chunk.bucket,
        tensor=chunk.tensor,
        key=chunk.key,
        start=chunk.start,
        shape=chunk.shape,
        dtype=chunk.dtype_code,  # type: ignore[arg-type]
        plain=pack_value(chunk.plain) if chunk.is_plain else None,
        offset_bytes=chunk.offset_bytes,
        data=chunk.data,
    )


def state_chunk_from_proto(message: types_pb2.StateChunk) -> StateChunk:
    is_plain = message.HasField("plain")
    return StateChunk(
        bucket=message.bucket,
        tensor=message.tensor,
        key=message.key,
        start=_optional(message, "start"),
        shape=tuple(message.shape),
        dtype_code=message.dtype,
        is_plain=is_plain,
        plain=unpack_value(message.plain) if is_plain else None,
        offset_bytes=message.offset_bytes,
        data=message.data,
    )


# Parts of commands


def _replicas_to_proto(replicas: Iterable[core.ReplicaAddress]) -> list[coordinator_pb2.ReplicaAddress]:
    return [_same(coordinator_pb2.ReplicaAddress, each) for each in replicas]


def _replicas_from_proto(messages: Iterable[coordinator_pb2.ReplicaAddress]) -> tuple[core.ReplicaAddress, ...]:
    return tuple(_back(core.ReplicaAddress, each) for each in messages)


def _refusal_to_proto(refusal: core.Refusal) -> coordinator_pb2.Refusal:
    return _same(coordinator_pb2.Refusal, refusal)  # type: ignore[no-any-return]


def _refusal_from_proto(message: coordinator_pb2.Refusal) -> core.Refusal:
    return _back(core.Refusal, message)  # type: ignore[no-any-return]


# The link: commands and reports whose fields are plain travel field by field

_PLAIN_COMMANDS = {
    "model_ready": core.ModelReady,
    "admit_trainer": core.AdmitTrainer,
    "end_trainer": core.EndTrainer,
    "fail_model": core.FailModel,
    "drop_shard": core.DropShard,
    "abandon_plan": core.AbandonPlan,
    "fence_replica": core.FenceReplica,
    "heartbeat_heard": core.HeartbeatHeard,
}
#: Commands of which one field is no plain value: by kind, the class, the field, and how it goes both ways.
_COMMANDS: Mapping[str, tuple[type, str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "apply": (core.Apply, "decision", decision_to_proto, decision_from_proto),
    "prepare": (core.Prepare, "plan", plan_to_proto, plan_from_proto),
    "reject": (core.Reject, "refusal", _refusal_to_proto, _refusal_from_proto),
    "promote": (core.Promote, "replicas", _replicas_to_proto, _replicas_from_proto),
    "set_replicas": (core.SetReplicas, "replicas", _replicas_to_proto, _replicas_from_proto),
    "living_trainers": (core.LivingTrainers, "trainer_ids", list, tuple),
}
_KINDS: Mapping[type, str] = {row[0]: kind for kind, row in _COMMANDS.items()}
_PLAIN_REPORTS = {
    "shard_created": core.ShardCreated,
    "shard_initialised": core.ShardInitialised,
    "applied": core.Applied,
    "shard_failed": core.ShardFailed,
    "replica_fenced": core.ReplicaFenced,
    "shard_promoted": core.ShardPromoted,
    "replica_caught_up": core.ReplicaCaughtUp,
    "replica_failed": core.ReplicaFailed,
    "replica_lag": core.ReplicaLag,
}


def command_to_proto(command: core.Command) -> coordinator_pb2.CoordinatorMessage:
    if isinstance(command, core.CreateShard):
        create = _same(
            coordinator_pb2.CreateShard, command, spec=spec_to_proto(command.spec), runs=_runs_to_proto(command.runs)
        )
        return coordinator_pb2.CoordinatorMessage(create_shard=create)
    if (kind := _KINDS.get(type(command))) is not None:
        cls, field, to_proto, _ = _COMMANDS[kind]
        part_type = getattr(coordinator_pb2, cls.__name__)
        part = _same(part_type, command, **{field: to_proto(getattr(command, field))})
        return coordinator_pb2.CoordinatorMessage(**{kind: part})
    message = coordinator_pb2.CoordinatorMessage()
    _fill(message, _PLAIN_COMMANDS, command)
    return message


def command_from_proto(message: coordinator_pb2.CoordinatorMessage) -> core.Command:
    kind = message.WhichOneof("kind")
    if kind == "create_shard":
        create = message.create_shard
        return _back(  # type: ignore[no-any-return]
            core.CreateShard, create, spec=spec_from_proto(create.spec), runs=_runs_from_proto(create.runs)
        )
    if kind in _COMMANDS:
        cls, field, _, from_proto = _COMMANDS[kind]
        part = getattr(message, kind)
        return _back(cls, part, **{field: from_proto(getattr(part, field))})  # type: ignore[no-any-return]
    command: core.Command = _read(message, _PLAIN_COMMANDS, kind)
    return command


def report_to_proto(report: core.Report) -> coordinator_pb2.ServerMessage:
    message = coordinator_pb2.ServerMessage()
    if isinstance(report, core.Committed):
        message.committed.CopyFrom(_same(coordinator_pb2.Committed, report, commit=commit_to_proto(report.commit)))
    elif isinstance(report, core.Prepared):
        nonfinite = nonfinite_to_proto(report.nonfinite)
        message.prepared.CopyFrom(_same(coordinator_pb2.Prepared, report, nonfinite=nonfinite))
    elif isinstance(report, core.ShardState):
        message.shard_state.CopyFrom(_state_to_proto(report))
    else:
        _fill(message, _PLAIN_REPORTS, report)
    return message


def report_from_proto(message: coordinator_pb2.ServerMessage) -> core.Report:
    kind = message.WhichOneof("kind")
    if kind == "committed":
        return _back(  # type: ignore[no-any-return]
            core.Committed, message.committed, commit=commit_from_proto(message.committed.commit)
        )
    if kind == "prepared":
        return _back(  # type: ignore[no-any-return]
            core.Prepared,
            message.prepared,
            squares=tuple(message.prepared.squares),
            nonfinite=nonfinite_from_proto(message.prepared.nonfinite),
        )
    if kind == "shard_state":
        return _state_from_proto(message.shard_state)
    report: core.Report = _read(message, _PLAIN_REPORTS, kind)
    return report


def _state_to_proto(state: core.ShardState) -> coordinator_pb2.ShardState:
    return _same(  # type: ignore[no-any-return]
        coordinator_pb2.ShardState,
        state,
        decisions=[decision_to_proto(each) for each in state.decisions],
        plan=None if state.plan is None else plan_to_proto(state.plan),
        trainers=[
            _same(
                coordinator_pb2.TrainerProgress,
                each,
                latest=None if each.latest is None else commit_to_proto(each.latest),
                refusal=None if each.refusal is None else _refusal_to_proto(each.refusal),
            )
            for each in state.trainers
        ],
    )


def _state_from_proto(message: coordinator_pb2.ShardState) -> core.ShardState:
    return _back(  # type: ignore[no-any-return]
        core.ShardState,
        message,
        decisions=tuple(decision_from_proto(each) for each in message.decisions),
        plan=plan_from_proto(message.plan) if message.HasField("plan") else None,
        trainers=tuple(
            _back(
                core.TrainerProgress,
                each,
                latest=commit_from_proto(each.latest) if each.HasField("latest") else None,
                refusal=_refusal_from_proto(each.refusal) if each.HasField("refusal") else None,
            )
            for each in message.trainers
        ),
    )


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
                shards=[
                    _same(
                        coordinator_pb2.ShardStatus,
                        shard,
                        replicas=[_same(coordinator_pb2.ReplicaStatus, replica) for replica in shard.replicas],
                    )
                    for shard in each.shards
                ],
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
                staleness=dict(each.staleness),
                shards=tuple(
                    _back(
                        ShardStatus,
                        shard,
                        replicas=tuple(_back(ReplicaStatus, replica) for replica in shard.replicas),
                    )
                    for shard in each.shards
                ),
            )
            for each in message.models
        ),
        trainers=tuple(_back(TrainerStatus, each, reported=dict(each.reported)) for each in message.trainers),
    )


def _same(message_type: Any, value: Any, **replaced: object) -> Any:
    fields = {name: getattr(value, name) for name in type(value).__dataclass_fields__}
    return message_type(**{**fields, **replaced})


def _back(cls: Any, message: Any, **replaced: object) -> Any:
    return cls(**{n: replaced[n] if n in replaced else getattr(message, n) for n in cls.__dataclass_fields__})
