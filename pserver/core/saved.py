"""What a coordinator keeps for the next one, as small values by key. Nothing of it changes with a round.

What it does not keep, shards know: rounds, commits, outcomes (see `ShardState`).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pserver.core.groups import Replica, ReplicaState, ShardGroup
from pserver.core.membership import Member
from pserver.core.messages import ModelSpec
from pserver.core.models import Model, ModelSaved, ModelState
from pserver.core.rounds import RoundsSaved
from pserver.core.server_table import Server
from pserver.errors import ConfigError
from pserver.wire.layout import TensorSpec
from pserver.wire.tensors import dtype_of_code, element_type
from pserver.wire.values import pack_value, unpack_value

COUNTERS = "counters"
TRAINER, SERVER, MODEL = "trainers/", "servers/", "models/"

#: Form of what is kept; another one is refused.
FORM = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Numbers that are never given twice: the last of epochs and replicas; the first and the next of trainers."""

    last_number: int
    first_trainer_id: int
    next_trainer_id: int


def pack_counters(counters: Counters) -> bytes:
    return pack_value({"form": FORM, **asdict(counters)})


def unpack_counters(data: bytes) -> Counters:
    """Raises ConfigError for what another version has kept."""
    value = _map(data)
    if value.pop("form", None) != FORM:
        raise ConfigError(
            f"what an earlier coordinator kept is of another form than {FORM}; use the version of pserver that wrote "
            "it, or begin with an empty place"
        )
    return Counters(**value)


def pack_member(member: Member) -> bytes:
    return pack_value({"rank": member.rank, "nonce": member.nonce})


def unpack_member(trainer_id: int, data: bytes, lease_ends_s: float) -> Member:
    return Member(trainer_id=trainer_id, lease_ends_s=lease_ends_s, **_map(data))


def pack_server(server: Server) -> bytes:
    return pack_value({"address": server.address, "incarnation": server.incarnation, "arithmetic": server.arithmetic})


def unpack_server(name: str, data: bytes, now_s: float) -> Server:
    return Server(name=name, heard_s=now_s, linked=False, **_map(data))


def pack_model(model: Model) -> bytes:
    saved = model.saved()
    return pack_value(
        {
            "spec": _spec_to_value(model.spec),
            "epoch": saved.epoch,
            "state": saved.state.value,
            "failure": saved.failure,
            "initialiser": saved.initialiser,
            "placement_version": saved.placement_version,
            "first_round": saved.first_round,
            "first_version": saved.first_version,
            "replicated": saved.replicated,
            "replaces": saved.replaces,
            "groups": [_group_to_value(each) for each in saved.groups],
            "started": saved.rounds.started,
            "trainers": [[key, *about] for key, about in saved.rounds.trainers.items()],
        }
    )


def unpack_model(data: bytes) -> Model:
    value = _map(data)
    rounds = RoundsSaved(
        started=value.pop("started"), trainers={key: tuple(about) for key, *about in value.pop("trainers")}
    )
    spec = _spec_from_value(value.pop("spec"))
    state = ModelState(value.pop("state"))
    groups = tuple(_group_from_value(each) for each in value.pop("groups"))
    return Model.restored(spec, ModelSaved(state=state, groups=groups, rounds=rounds, **value))


def _map(data: bytes) -> dict[str, Any]:
    value = unpack_value(data)
    if not isinstance(value, dict):
        raise ConfigError(f"what an earlier coordinator kept is damaged: expected a map, got {value!r:.80}")
    return value


def _group_to_value(group: ShardGroup) -> dict[str, object]:
    return {
        "shard": group.shard,
        "runs": [[run.start, run.stop] for run in group.runs],
        "epoch": group.epoch,
        "placed_on": group.placed_on,
        "placed_epoch": group.placed_epoch,
        "primary": group.primary,
        "created": group.created,
        "replicas": [[each.number, each.server, each.state.value] for each in group.replicas.values()],
        "electing": group.electing,
    }


def _group_from_value(value: Mapping[str, Any]) -> ShardGroup:
    replicas = {
        server: Replica(number=number, server=server, state=ReplicaState(state))
        for number, server, state in value["replicas"]
    }
    return ShardGroup(
        shard=value["shard"],
        runs=tuple(range(start, stop) for start, stop in value["runs"]),
        epoch=value["epoch"],
        placed_on=value["placed_on"],
        placed_epoch=value["placed_epoch"],
        primary=value["primary"],
        created=value["created"],
        replicas=replicas,
        positions=dict.fromkeys(replicas) if value["electing"] else {},
    )


def _spec_to_value(spec: ModelSpec) -> dict[str, object]:
    value: dict[str, object] = {name: getattr(spec, name) for name in ModelSpec.__dataclass_fields__}
    value["tensors"] = [
        [each.name, list(each.shape), element_type(each.dtype).code, each.group] for each in spec.tensors
    ]
    value["optimizer_groups"] = [dict(each) for each in spec.optimizer_groups]
    for name in ("sync_policy_arguments", "codec_arguments"):
        value[name] = dict(getattr(spec, name))
    return value


def _spec_from_value(value: Mapping[str, Any]) -> ModelSpec:
    tensors = tuple(
        TensorSpec(name=name, shape=tuple(shape), dtype=dtype_of_code(code), group=group)
        for name, shape, code, group in value["tensors"]
    )
    return ModelSpec(**{**value, "tensors": tensors, "optimizer_groups": tuple(value["optimizer_groups"])})
