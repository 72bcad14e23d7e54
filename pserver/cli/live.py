"""What `pserver launch` shows while a run goes on: prefixed output, and how far training has come."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from pserver.cli.status import bytes_text, reported_text, text_table
from pserver.errors import PserverError
from pserver.types import ClusterStatus

_POLL_S = 0.5
_LINE_EVERY_S = 5.0
_NUM_RATE_SAMPLES = 10
_POLLER_END_S = 3.0
_STYLES = ("cyan", "green", "yellow", "magenta", "blue", "bright_red")


@dataclass(frozen=True, slots=True)
class Sample:
    """A status and when it was polled (seconds of a monotonic clock)."""

    at_s: float
    status: ClusterStatus


class History:
    """The statuses polled so far, and the rates over the last few (about 5 s).

    One thread adds, any thread reads. Totals keep what was last seen of a trainer or model that has gone since, so what
    happened between the last poll and its end is missing from them.
    """

    def __init__(self) -> None:
        self._samples: tuple[Sample, ...] = ()
        self._rounds: dict[str, int] = {}
        self._bytes: dict[int, int] = {}
        self._begin_s = 0.0
        self._end_s = 0.0

    def add(self, sample: Sample) -> None:
        """Takes in a status that is newer than all before it."""
        rounds_before = sum(self._rounds.values())
        self._rounds |= {model.name: model.round for model in sample.status.models}
        self._bytes |= {t.trainer_id: t.sent_bytes + t.received_bytes for t in sample.status.trainers}
        rounds = sum(self._rounds.values())
        if not self._samples or rounds == 0:
            self._begin_s = sample.at_s
        if not self._samples or rounds != rounds_before:
            self._end_s = sample.at_s
        self._samples = (*self._samples[1 - _NUM_RATE_SAMPLES :], sample)

    @property
    def latest(self) -> ClusterStatus | None:
        """The status added last, if any."""
        return self._samples[-1].status if self._samples else None

    def rounds_per_s(self, model_name: str) -> float:
        """0 until there are two samples of the model; the same holds for trainers below."""
        return self._rate(lambda status: {model.name: model.round for model in status.models}.get(model_name))

    def sent_bytes_per_s(self, trainer_id: int) -> float:
        """Tensor bytes from the trainer to servers."""
        return self._rate(lambda status: {t.trainer_id: t.sent_bytes for t in status.trainers}.get(trainer_id))

    def received_bytes_per_s(self, trainer_id: int) -> float:
        """Tensor bytes from servers to the trainer."""
        return self._rate(lambda status: {t.trainer_id: t.received_bytes for t in status.trainers}.get(trainer_id))

    def summary(self) -> str:
        """One line: rounds of all models, seconds in which they passed, rounds per second, bytes both ways."""
        rounds, num_bytes = sum(self._rounds.values()), sum(self._bytes.values())
        seconds = self._end_s - self._begin_s
        mean = f"{rounds / seconds:.1f} rounds/s, " if seconds > 0 else ""
        return f"{rounds} rounds in {seconds:.1f} s, {mean}{bytes_text(num_bytes)}"

    def _rate(self, value: Callable[[ClusterStatus], int | None]) -> float:
        points = [(sample.at_s, found) for sample in self._samples if (found := value(sample.status)) is not None]
        if len(points) < 2:
            return 0.0
        (from_s, first), (to_s, last) = points[0], points[-1]
        return (last - first) / (to_s - from_s)


def progress_line(history: History) -> str:
    """One line on how far each model is, the mean of what the trainers report, and the bytes per second both ways.

    For example "mnist: round 240, 31.2 rounds/s, loss 0.214, 12.3 MB/s"; empty while there is no model.
    """
    status = history.latest
    if status is None or not status.models:
        return ""
    models = [f"{m.name}: round {m.round}, {history.rounds_per_s(m.name):.1f} rounds/s" for m in status.models]
    parts = ["; ".join(models)]
    means = _means([trainer.reported for trainer in status.trainers])
    if means:
        parts.append(reported_text(means))
    ids = [trainer.trainer_id for trainer in status.trainers]
    parts.append(f"{bytes_text(sum(history.sent_bytes_per_s(i) + history.received_bytes_per_s(i) for i in ids))}/s")
    return ", ".join(parts)


def progress_tables(history: History) -> Group:
    """A table of models and one of trainers, as the terminal shows them."""
    status = history.latest
    if status is None:
        return Group(Text("waiting for the coordinator", style="dim"))
    models = text_table(
        "models",
        ("name", "state", "round", "rounds/s"),
        [(m.name, m.state, str(m.round), f"{history.rounds_per_s(m.name):.1f}") for m in status.models],
    )
    trainers = text_table(
        "trainers",
        ("rank", "step", "reported", "out", "in", "lease"),
        [
            (
                str(t.rank),
                str(t.step),
                reported_text(t.reported),
                f"{bytes_text(history.sent_bytes_per_s(t.trainer_id))}/s",
                f"{bytes_text(history.received_bytes_per_s(t.trainer_id))}/s",
                f"{t.lease_s:.1f} s",
            )
            for t in sorted(status.trainers, key=lambda trainer: trainer.rank)
        ],
    )
    return Group(models, trainers)


class Screen:
    """Prints the output of children, each line behind the name of its child, and the progress of the run.

    With `live`, tables stay below the output; else a line of progress comes every 5 s. Thread-safe, except that `watch`
    and `close` belong to one thread.
    """

    def __init__(self, console: Console, *, live: bool) -> None:
        self._console = console
        self._history = History()
        self._live = Live(get_renderable=lambda: progress_tables(self._history), console=console) if live else None
        self._styles: dict[str, str] = {}
        self._closing = threading.Event()
        self._poller: threading.Thread | None = None

    def line(self, name: str, text: str) -> None:
        """Prints one line of the child `name`."""
        style = self._styles.setdefault(name, _STYLES[len(self._styles) % len(_STYLES)])
        self._print(name, style, Text.from_ansi(text))

    def note(self, text: str) -> None:
        """Prints one line of the launcher's own."""
        self._print("launch", "bold", Text(text))

    def watch(self, fetch: Callable[[], ClusterStatus]) -> None:
        """Starts to poll `fetch` twice a second; a poll that raises PserverError is left out."""
        self._fetch = fetch
        self._poller = threading.Thread(target=self._poll_until_closed, name="launch-status", daemon=True)
        self._poller.start()
        if self._live is not None:
            self._live.start()

    def close(self, *, last_poll: bool) -> None:
        """Stops polling, after one more poll if the servers still answer, and prints a summary of what was seen."""
        if self._poller is None:
            return
        self._closing.set()
        self._poller.join(_POLLER_END_S)
        if last_poll and not self._poller.is_alive():
            self._poll()
        if self._live is not None:
            self._live.stop()
        if self._history.latest is not None:
            self.note(self._history.summary())

    def _poll_until_closed(self) -> None:
        next_line_s = time.monotonic() + _LINE_EVERY_S
        self._poll()
        while not self._closing.wait(_POLL_S):
            self._poll()
            if self._live is None and time.monotonic() >= next_line_s:
                next_line_s += _LINE_EVERY_S
                if text := progress_line(self._history):
                    self.note(text)

    def _poll(self) -> None:
        with contextlib.suppress(PserverError):
            status = self._fetch()
            self._history.add(Sample(time.monotonic(), status))

    def _print(self, name: str, style: str, text: Text) -> None:
        # Soft wrap: the terminal folds long lines, a file keeps them whole.
        self._console.print(Text.assemble((f"[{name}] ", style), text), soft_wrap=True)


def _means(reports: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names: Iterable[str] = dict.fromkeys(name for report in reports for name in report)
    return {name: fmean(report[name] for report in reports if name in report) for name in names}
