"""One model as the coordinator sees it: creating -> initialising -> ready, or failed."""

from collections.abc import Sequence
from enum import Enum

from pserver.core.messages import ModelSpec, ShardPlacement
from pserver.core.optimizers import check_groups
from pserver.core.placement import place_buckets
from pserver.core.rounds import RoundBook
from pserver.core.sync import make_policy
from pserver.errors import InvalidRequest, LayoutMismatch
from pserver.wire.layout import build_layout, first_difference


class ModelState(Enum):
    """Where a model is in its life."""

    CREATING = "creating"
    INITIALISING = "initialising"
    READY = "ready"
    FAILED = "failed"


class Model:
    """A registered model. Not thread-safe.

    Args:
        spec: as its first trainer sees it.
        servers: (name, address) of the servers to place it on.
        epoch: of this placement.

    Raises:
        UnsupportedModel, UnsupportedOptimizer, InvalidRequest: the model cannot be distributed.
    """

    def __init__(self, spec: ModelSpec, servers: Sequence[tuple[str, str]], epoch: int) -> None:
        if not spec.name or len(spec.name) > 255:
            raise InvalidRequest(f"a model's name must have 1 to 255 characters, got {spec.name!r}")
        if not 1 <= spec.world_size <= 1 << 20:
            raise InvalidRequest(f"world_size must be in 1..2**20, but is {spec.world_size}")
        check_groups(spec.optimizer, spec.optimizer_groups)
        layout = build_layout(spec.tensors, spec.bucket_bytes)
        groups = max(tensor.group for tensor in spec.tensors) + 1
        if groups > len(spec.optimizer_groups):
            raise InvalidRequest(f"tensors name {groups} groups, but {len(spec.optimizer_groups)} were described")
        self.spec = spec
        self.epoch = epoch
        self.state = ModelState.CREATING
        self.failure = ""
        self.initialiser: int | None = None
        self.placement = tuple(
            ShardPlacement(server=name, address=address, first_bucket=run.start, last_bucket=run.stop)
            for (name, address), run in zip(servers, place_buckets(layout, len(servers)), strict=True)
            if run
        )
        policy = make_policy(spec.sync_policy, spec.sync_policy_arguments)
        self.rounds = RoundBook(policy, self.servers, spec.world_size)
        self.versions = dict.fromkeys(self.servers, 0)
        self.shard_rounds = dict.fromkeys(self.servers, 0)
        self.shard_bytes = {
            each.server: sum(bucket.num_master_bytes for bucket in layout.buckets[each.first_bucket : each.last_bucket])
            for each in self.placement
        }
        self._created: set[str] = set()
        self._initialised: set[str] = set()

    @property
    def servers(self) -> tuple[str, ...]:
        """Names of the servers that own a part."""
        return tuple(each.server for each in self.placement)

    def require_same(self, offered: ModelSpec) -> None:
        """Refuses a trainer whose model differs.

        Raises:
            LayoutMismatch: naming the first difference.
        """
        difference = first_difference(self.spec.tensors, offered.tensors)
        if difference is None:
            for field in (
                "optimizer",
                "optimizer_groups",
                "sync_policy",
                "sync_policy_arguments",
                "bucket_bytes",
                "world_size",
            ):
                ours, theirs = getattr(self.spec, field), getattr(offered, field)
                if ours != theirs:
                    difference = f"{field}: expected {ours}, got {theirs}"
                    break
        if difference is not None:
            raise LayoutMismatch(
                f"model {self.spec.name!r} is registered with another description; {difference}. Build the model and "
                "its optimizer in the same way and order on every trainer, or register it under another name"
            )

    def shard_created(self, server: str) -> None:
        """Notes that a shard exists."""
        self._created.add(server)
        if self.state is ModelState.CREATING and self._created >= set(self.servers):
            self.state = ModelState.INITIALISING

    def shard_initialised(self, server: str, trainer_id: int) -> bool:
        """Notes that a shard holds the values of the present initialiser; True if the model has just become ready."""
        if self.state is not ModelState.INITIALISING or trainer_id != self.initialiser:
            return False
        self._initialised.add(server)
        if not self._initialised >= set(self.servers):
            return False
        self.state = ModelState.READY
        return True

    def may_initialise(self, trainer_id: int) -> bool:
        """Whether this trainer is, or now becomes, the one that sends the initial values."""
        if self.state is not ModelState.INITIALISING:
            return False
        if self.initialiser is None:
            self.initialiser = trainer_id
        return self.initialiser == trainer_id

    def trainer_ended(self, trainer_id: int) -> None:
        """Lets another trainer initialise if the initialiser has gone, and expects the trainer in no round."""
        self.rounds.remove(trainer_id)
        if self.initialiser == trainer_id and self.state is ModelState.INITIALISING:
            self.initialiser = None
            self._initialised.clear()

    def fail(self, reason: str) -> None:
        """Ends the model; the first reason is kept."""
        if self.state is not ModelState.FAILED:
            self.state, self.failure = ModelState.FAILED, reason
