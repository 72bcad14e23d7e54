"""How a trainer's process ends when nobody closes its session in order."""

import signal
import time

import pytest

from tests.cluster.processes import Cluster, Pool

EXIT_S = 10.0


@pytest.mark.parametrize(("opening", "ending", "code"), [("join", ("exit", 3), 3), ("start", ("end",), 0)])
def test_interpreter_exits_without_close(
    pool: Pool, cluster: Cluster, opening: str, ending: tuple[object, ...], code: int
) -> None:
    """`sys.exit` inside the `with` block, and a session that was started and forgotten."""
    with pool.trainers(1) as (trainer,):
        said_before = trainer.stderr
        trainer.ask(opening, cluster.address, 0, 1, 10)
        trainer.ask("model", f"exit-{code}")
        trainer.ask("steps", 3)
        begin_s = time.monotonic()
        trainer.tell(*ending)
        assert trainer.wait() == code
        assert time.monotonic() - begin_s < EXIT_S
        assert trainer.stderr == said_before
    assert not cluster.status().trainers


def test_control_c_interrupts_a_trainer_that_waits_in_step(pool: Pool, cluster: Cluster) -> None:
    with pool.trainers(2) as (interrupted, other):
        for rank, trainer in enumerate((interrupted, other)):
            trainer.join(cluster.address, rank=rank, world_size=2)
            trainer.ask("model", "interrupted")
        interrupted.tell("steps", 1)
        cluster.wait_for_round("interrupted", 0, waiting_for=(1,))
        begin_s = time.monotonic()
        interrupted.send(signal.SIGINT)
        assert interrupted.wait() == -signal.SIGINT
        assert time.monotonic() - begin_s < EXIT_S
        assert interrupted.stderr.rstrip().endswith("KeyboardInterrupt")

        # It has left on its way out: nobody waits for its lease to end.
        assert [each.rank for each in cluster.status().trainers] == [1]
        assert other.ask("steps", 1)["round"] == 1
        other.ask("leave")
