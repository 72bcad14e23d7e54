"""Registering a model: the first trainer initialises its shards, everybody attaches and reads their values."""

from pserver.client.cluster import Cluster
from pserver.client.optimizer_state import TensorStates, cut_state
from pserver.client.replica import Replica
from pserver.client.shards import Shards
from pserver.client.step_counts import StepCounts
from pserver.core.sync import SyncPolicy
from pserver.errors import StaleEpoch
from pserver.transport.convert import placement_from_proto, push_id_to_proto, spec_to_proto
from pserver.transport.deadline import Deadline
from pserver.transport.gen import coordinator_pb2 as pb


class Registration:
    """Registers one model; may be asked again to put another description in its place. One thread at a time.

    Args:
        cluster: started session.
        sync: the model's policy.
        counts: where its shards count mixed pulls.
    """

    def __init__(self, cluster: Cluster, sync: SyncPolicy, counts: StepCounts) -> None:
        self._cluster = cluster
        self._sync = sync
        self._counts = counts

    def register(self, replica: Replica, state: TensorStates, *, replaces: int) -> tuple[Shards, int, int]:
        """Registers, attaches and writes the model's values into the replica's tensors.

        Args:
            replica: whose values count if this trainer is the first.
            state: optimizer state to begin with, likewise.
            replaces: epoch of the placement that this model replaces; 0: none.

        Returns:
            The shards, the round of the values read, and this trainer's last step that any shard has seen.

        Raises:
            LayoutMismatch: another trainer registered it differently; names the first difference.
            DeadlineExceeded: it was not ready in time; says what is missing.
        """
        deadline = Deadline(self._cluster.settings.timeout_s)
        while True:
            try:
                return self._register(replica, state, replaces)
            except StaleEpoch:
                # Others have replaced the model meanwhile.
                if not deadline.remaining_s():
                    raise

    def _register(self, replica: Replica, state: TensorStates, replaces: int) -> tuple[Shards, int, int]:
        initialised = 0
        while (reply := self._ask(replica, initialised, replaces)).initialise:
            pieces = list(cut_state(replica.layout, state))
            shards = self._shards(replica, reply)
            shards.start()
            with self._cluster.push_ids.one() as push_id:
                shards.initialise(push_id, replica.tensors, pieces)
            shards.stop()
            initialised = reply.epoch
        shards = self._shards(replica, reply)
        with self._cluster.push_ids.one() as push_id:
            attached = self._cluster.call_coordinator(
                "Attach",
                pb.AttachRequest(push_id=push_id_to_proto(push_id), model=replica.spec.name, epoch=reply.epoch),
                pb.AttachReply,
                what=f"attaching to model {replica.spec.name!r}",
            )
        shards.start()
        shards.share_memory()
        replica.writing(replica.tensors)
        round_number = shards.pull_(attached.round, replica.tensors)
        replica.written(replica.tensors)
        return shards, round_number, attached.step

    def _ask(self, replica: Replica, initialised: int, replaces: int) -> pb.RegisterModelReply:
        timeout_s = self._cluster.settings.timeout_s
        with self._cluster.push_ids.one() as push_id:
            request = pb.RegisterModelRequest(
                push_id=push_id_to_proto(push_id),
                spec=spec_to_proto(replica.spec),
                wait_s=timeout_s,
                initialised=initialised,
                replaces=replaces,
            )
            return self._cluster.call_coordinator(
                "RegisterModel",
                request,
                pb.RegisterModelReply,
                what=f"registering model {replica.spec.name!r}",
                timeout_s=timeout_s + 1.0,
            )

    def _shards(self, replica: Replica, reply: pb.RegisterModelReply) -> Shards:
        return Shards(
            self._cluster,
            model=replica.spec.name,
            layout=replica.layout,
            coding=replica.coding,
            device=replica.device,
            placement=placement_from_proto(reply.placement),
            epoch=reply.epoch,
            replicated=replica.spec.replicas > 0,
            mixed_rounds=self._sync.mixed_rounds,
            steady=self._sync.mixed_rounds or self._sync.waits_for_everybody,
            counts=self._counts,
        )
