import io
import threading

import pytest
from rich.console import Console

from pserver.cli.live import History, Sample, Screen, progress_line, progress_tables
from pserver.errors import ServerUnavailable


def test_rates_are_the_difference_over_the_last_samples(make_status):
    history = History()
    history.add(Sample(10.0, make_status(round=100, sent_bytes=1_000_000)))
    history.add(Sample(12.0, make_status(round=160, sent_bytes=5_000_000)))
    assert history.rounds_per_s("mnist") == pytest.approx(30.0)
    assert history.sent_bytes_per_s(70) == pytest.approx(2_000_000)
    assert history.received_bytes_per_s(70) == pytest.approx(4_000_000)


def test_rates_forget_old_samples(make_status):
    history = History()
    for second in range(20):
        history.add(Sample(float(second), make_status(round=0)))
    for second in range(20, 40):
        history.add(Sample(float(second), make_status(round=8 * second)))
    assert history.rounds_per_s("mnist") == pytest.approx(8.0)


def test_rates_are_zero_for_one_sample_and_for_unknown_names(make_status):
    history = History()
    history.add(Sample(1.0, make_status()))
    assert history.rounds_per_s("mnist") == 0.0
    assert history.rounds_per_s("other") == 0.0
    assert history.sent_bytes_per_s(1) == 0.0


def test_progress_line_has_round_rate_mean_of_reports_and_traffic(make_status):
    history = History()
    history.add(Sample(0.0, make_status(round=0)))
    history.add(Sample(2.0, make_status(round=60, sent_bytes=1_000_000, reported=({"loss": 0.2}, {"loss": 0.4}))))
    history.add(Sample(4.0, make_status(round=120, sent_bytes=4_000_000, reported=({"loss": 0.2}, {"loss": 0.4}))))
    assert progress_line(history) == "mnist: round 120, 30.0 rounds/s, loss 0.3, 7.5 MB/s"


def test_progress_line_is_empty_before_there_is_a_model():
    assert progress_line(History()) == ""


def test_summary_does_not_count_the_time_before_the_first_round_and_after_the_last(make_status):
    history = History()
    for at_s, round_, sent_bytes in (
        (0.0, 0, 0),
        (5.0, 0, 0),
        (7.0, 40, 10),
        (9.0, 80, 1_000_000),
        (30.0, 80, 1_000_000),
    ):
        history.add(Sample(at_s, make_status(round=round_, sent_bytes=sent_bytes)))
    assert history.summary() == "80 rounds in 4.0 s, 20.0 rounds/s, 3.0 MB"


def test_tables_show_each_trainer(make_status):
    history = History()
    history.add(Sample(0.0, make_status(reported=({"loss": 0.25}, {"accuracy": 0.5}))))
    console = Console(file=io.StringIO(), width=120)
    console.print(progress_tables(history))
    text = console.file.getvalue()
    assert "mnist" in text
    assert "loss 0.25" in text
    assert "accuracy 0.5" in text


def test_lines_carry_the_name_of_their_child_and_stay_whole():
    console = Console(file=io.StringIO(), width=40)
    screen = Screen(console, live=False)
    screen.line("t1", "[bold]" + "x" * 100)
    assert console.file.getvalue() == "[t1] [bold]" + "x" * 100 + "\n"


def test_polls_that_fail_are_left_out_and_the_rest_is_summed_up(make_status):
    polled_twice = threading.Event()
    polls = []

    def fetch():
        polls.append(None)
        if len(polls) == 1:
            raise ServerUnavailable("not yet")
        polled_twice.set()
        return make_status(round=7)

    console = Console(file=io.StringIO())
    screen = Screen(console, live=False)
    screen.watch(fetch)
    assert polled_twice.wait(10.0)
    screen.close(last_poll=False)
    assert console.file.getvalue().startswith("[launch] 7 rounds in ")


def test_the_last_poll_counts(make_status):
    first_poll = threading.Event()

    def fetch():
        round_ = 9 if first_poll.is_set() else 0
        first_poll.set()
        return make_status(round=round_)

    console = Console(file=io.StringIO())
    screen = Screen(console, live=False)
    screen.watch(fetch)
    assert first_poll.wait(10.0)
    screen.close(last_poll=True)
    assert console.file.getvalue().startswith("[launch] 9 rounds in ")
