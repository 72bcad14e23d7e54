"""A process of several trainers, each of which stops at a point of its own while it talks to the servers.

Usage: held_trainer.py COORDINATOR ADDRESSES TRAINERS, the last two as JSON: servers in the order of their shards, and a
list of {"rank", "model", "policy", "transport", "point"}. Points, by what has been done when a trainer stops for good:

    half_written    every other element of the gradient has been written to one mailbox, over the one of before
    written         the gradient has been written to all mailboxes, and no bucket is said to be of the push
    half_stamped    half the buckets in one mailbox are said to be of the push
    asked           both shards have been called, and neither has a byte; mailboxes are complete
    first_message   the first message of several has gone to one shard
    one_shard       one shard has everything, the other one nothing
    one_and_a_bit   one shard has everything, the other one the first message
    both            both have everything; nobody hears their replies
    replied         the step has returned
    pushed          three contexts were pushed, none committed
    initialising    the first message of the initial values has gone to one shard

It says "ready MODEL" once the trainer is attached and, after a line came on stdin, "held MODEL" once it has stopped.
"""

import asyncio
import json
import sys
import threading

import torch

import pserver
from pserver.client.cluster import Cluster
from pserver.client.mapped_shard import NO_PUSH
from pserver.config import TrainerSettings
from pserver.core.sync import make_policy
from pserver.transport import chunks
from pserver.transport.grpc_channel import GrpcChannel

ALL = 1 << 30
#: Where a trainer with mailboxes stops before it has anything to say to a server.
IN_MEMORY = ("half_written", "written", "half_stamped")
#: Request messages that each shard may have.
LIMITS = {
    "asked": (0, 0),
    "first_message": (1, 0),
    "one_shard": (ALL, 0),
    "one_and_a_bit": (ALL, 1),
    "both": (ALL, ALL),
    "initialising": (2, 0),  # the first one has no values
}
NUM_ELEMENTS = 160_000


class Hold:
    """Lets so many messages to each server through, then says so and waits for ever."""

    def __init__(self, model, addresses, transport, point):
        self._model = model
        self._limits = dict(zip(addresses, LIMITS.get(point, (ALL, ALL)), strict=True))
        steps = "StepOnce" if transport == "shm" else "Step"
        self._method = "Initialise" if point == "initialising" else steps
        self._holds_replies = point == "both"
        self._num_waiting = 0
        self.armed = point == "initialising"

    def concerns(self, method):
        return self.armed and method.name == self._method

    async def requests(self, method, address, requests):
        number = 0
        async for request in requests:
            if number == self._limits[address]:
                await self.wait_for_ever()
            if not method.client_streaming:
                self._count_sent()  # nobody asks for what comes after the one request
            yield request
            number += 1
        self._count_sent()

    async def replies(self, replies):
        async for reply in replies:
            if self._holds_replies:
                await self.wait_for_ever()
            yield reply

    async def wait_for_ever(self):
        self._count()
        await asyncio.get_running_loop().create_future()

    def _count_sent(self):
        if not self._holds_replies:
            # The other shard's call is the one that stops.
            self._count()

    def _count(self):
        self._num_waiting += 1
        if self._num_waiting == len(self._limits):
            say("held", self._model)


class HeldChannel:
    """A channel whose calls obey a hold."""

    def __init__(self, address, hold):
        self._inner = GrpcChannel(address)
        self._hold = hold

    @property
    def address(self):
        return self._inner.address

    async def call(self, method, requests, *, timeout_s, place=None):
        if not self._hold.concerns(method):
            async for reply in self._inner.call(method, requests, timeout_s=timeout_s, place=place):
                yield reply
            return
        held = self._hold.requests(method, self.address, requests)
        async for reply in self._hold.replies(self._inner.call(method, held, timeout_s=timeout_s, place=place)):
            yield reply

    async def close(self):
        await self._inner.close()


def say(*words):
    sys.stdout.write(" ".join(words) + "\n")  # in one go: several threads speak
    sys.stdout.flush()


def gradient(rank, step):
    """Every sum and mean of these is exact, and tells who is in it."""
    return (torch.arange(NUM_ELEMENTS) % 7 + 1).float() * 12 * 10 ** min(rank, 2) * step


class HeldTrainer:
    """One of them."""

    def __init__(self, coordinator, addresses, rank, model, policy, transport, point):
        self._hold = Hold(model, addresses, transport, point)
        self._rank, self._name, self._policy, self._point = rank, model, policy, point
        settings = TrainerSettings.resolve(coordinator, rank=rank, world_size=1, timeout_s=60.0, transport=transport)
        self._session = Cluster(settings, connect_channel=lambda address: HeldChannel(address, self._hold))
        self.go_on = threading.Event()

    def run(self):
        self._session.start()
        weight = torch.nn.Parameter(torch.full((NUM_ELEMENTS,), float(self._point == "initialising")))
        optimizer = pserver.optim.RemoteOptimizer(
            torch.optim.SGD,
            [("weight", weight)],
            lr=1.0,
            name=self._name,
            sync=make_policy(*self._policy),
            cluster=self._session,
        )
        weight.grad = gradient(self._rank, 1)
        say("ready", self._name)
        optimizer.step()
        self.go_on.wait()
        self._hold.armed = True
        weight.grad = gradient(self._rank, 2)
        if self._point == "pushed":
            for number in range(3):
                optimizer._model.push(1000 + number, [weight.grad])
        else:
            if self._point in IN_MEMORY:
                self._stop_in(optimizer._model._shards._clients[0].writable)
            optimizer.step()
        say("held", self._name)

    def _stop_in(self, shard):
        """Makes the next step stop while it writes to the memory of this shard."""
        gather, stamp = shard.outgoing.gather, shard.stamp

        def write_half(tensors, buckets):
            before, even = gradient(self._rank, 1), torch.arange(NUM_ELEMENTS) % 2 == 0
            gather({index: torch.where(even, tensor, before) for index, tensor in tensors.items()}, buckets)
            self._stop()

        def stamp_half(sequence):
            if sequence == NO_PUSH:
                stamp(sequence)
                return
            buckets = shard._mailbox.offsets.buckets
            for bucket in buckets[: len(buckets) // 2] if self._point == "half_stamped" else ():
                shard._mailbox.set_word(bucket.index, sequence)
            self._stop()

        if self._point == "half_written":
            shard.outgoing.gather = write_half
        else:
            shard.stamp = stamp_half

    def _stop(self):
        say("held", self._name)
        threading.Event().wait()


def main():
    # Several messages for every shard, without moving many bytes.
    chunks.MESSAGE_BYTES = 64 << 10
    coordinator, addresses, trainers = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    held = [HeldTrainer(coordinator, addresses, **each) for each in trainers]
    for each in held:
        threading.Thread(target=each.run, daemon=True).start()
    for _ in sys.stdin:
        for each in held:
            each.go_on.set()


if __name__ == "__main__":
    main()
