"""A picture of a run: the ratio of each row, against the line where ours and the peer are level."""

from pathlib import Path

from benchmarks.harness import Figures
from benchmarks.report import machine

_AHEAD = "#2a7f3f"
_BEHIND = "#d62728"
_TICKS = [digit * 10.0**power for power in range(-4, 5) for digit in (1, 2, 5)]
#: Inches.
_WIDTH, _ROW_HEIGHT, _MARGINS = 10.0, 0.62, 1.5


def draw_chart(path: Path, figures: Figures) -> None:
    """Writes a PNG with one bar a row, longer to the right the faster ours is; skipped cases are named below it.

    Raises:
        ModuleNotFoundError: matplotlib is not there; it comes with the package's "examples".
    """
    from matplotlib.figure import Figure  # slow to import, and needed once, at the end

    rows = figures.rows
    figure = Figure(figsize=(_WIDTH, _MARGINS + _ROW_HEIGHT * max(1, len(rows))), layout="constrained")
    axes = figure.subplots()
    # On a logarithmic scale twice as fast and twice as slow are equally far from level.
    axes.set_xscale("log")
    for position, row in enumerate(rows):
        axes.barh(position, row.ratio - 1, left=1, height=0.6, color=_AHEAD if row.ratio >= 1 else _BEHIND)
        text = f"{row.ratio:.2f}   ({_short(row.ours)} {row.unit}, peer {_short(row.theirs)})"
        axes.annotate(
            text,
            (row.ratio, position),
            xytext=(6 if row.ratio >= 1 else -6, 0),
            textcoords="offset points",
            va="center",
            ha="left" if row.ratio >= 1 else "right",
            fontsize=9,
        )
    axes.axvline(1, color="black", linewidth=1)
    lowest, highest = (bound(row.ratio for row in rows) if rows else 1.0 for bound in (min, max))
    # Room for the figures beside the bars.
    margin = max(max(highest, 1) / min(lowest, 1), 2.0) ** 0.9
    left, right = min(lowest, 1) / (margin if lowest < 1 else 1.1), max(highest, 1) * (margin if highest > 1 else 1.1)
    ticks = [tick for tick in _TICKS if left <= tick <= right]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlim(left, right)
    axes.set_yticks(range(len(rows)), [f"{row.case}\nagainst {row.peer}" for row in rows], fontsize=9)
    axes.invert_yaxis()
    axes.set(title=f"{figures.name}: peer / ours, above 1 ours is ahead\n{machine()}", xlabel="ratio")
    axes.title.set_fontsize(10)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    if figures.skipped:
        lines = [f"skipped: {each.case}: {each.reason}" for each in figures.skipped]
        figure.supxlabel("\n".join(lines), fontsize=8)
    figure.savefig(path, dpi=120)


def _short(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"
