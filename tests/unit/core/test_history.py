from core_builders import OPTIONS, commit

from pserver.core.history import History
from pserver.core.messages import Contribution, Decision, Refusal


def decision(round_number, *, settled=0, **steps):
    """A round with these steps, by "t<trainer>"; each trainer's clock is its step."""
    contributions = tuple(
        Contribution(trainer_id=int(name[1:]), rank=0, step=step, weight=1, clock=step) for name, step in steps.items()
    )
    return Decision(round=round_number, contributions=contributions, divisor=1, options=OPTIONS, settled=settled)


def refusal(trainer, step, round_number):
    return Refusal(trainer_id=trainer, step=step, round=round_number, staleness=1, reason="late", error="")


def test_decisions_are_kept_until_a_later_one_says_that_all_have_them():
    history = History()
    for number, settled in ((1, 0), (2, 0), (3, 1), (4, 3)):
        history.decided(decision(number, settled=settled))
    assert [each.round for each in history.decisions] == [4]
    history = History([decision(1), decision(2), decision(3, settled=1)])
    assert [each.round for each in history.decisions] == [2, 3]


def test_progress_is_that_of_the_last_step_whether_it_was_counted_or_refused():
    history = History()
    history.committed(7, commit(1))
    history.decided(decision(1, t7=1))
    history.committed(7, commit(2))
    history.refused(refusal(7, 2, 5))
    (progress,) = history.trainers
    assert (progress.settled_step, progress.told_round, progress.clock) == (2, 5, 1)
    assert progress.latest == commit(2)
    assert progress.refusal == refusal(7, 2, 5)
    history.decided(decision(6, t7=3))
    (progress,) = history.trainers
    assert (progress.settled_step, progress.told_round, progress.clock, progress.refusal) == (3, 6, 3, None)


def test_a_commit_that_waits_settles_nothing():
    history = History()
    history.committed(7, commit(4))
    (progress,) = history.trainers
    assert (progress.settled_step, progress.latest) == (0, commit(4))


def test_nothing_is_left_of_a_trainer_that_has_ended():
    history = History([decision(1, t7=1, t8=1)])
    history.forget_trainer(7)
    assert [each.trainer_id for each in history.trainers] == [8]
