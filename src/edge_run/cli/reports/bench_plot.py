"""A comparison as a picture: decode speed and the time to the first token, predicted, measured, and with mmap."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_run.base.bench import Bench, RunSpread
from edge_run.base.files.texts import as_text
from edge_run.base.units import format_count, format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = {"predicted": "#9aa5b1", "measured": "#1f6fb2", "llama.cpp\nmmap": "#d1873a"}
_PANELS = (
    ("decode_tokens_per_s", "Decode (more is better)", "tokens/s"),
    ("start_s", "From opening to the first token (less is better)", "seconds"),
)
_LONGEST_NAME = 60


def draw(bench: Bench, figure: Figure) -> None:
    """Draw `bench` into an empty figure."""
    for axes, (name, title, unit) in zip(figure.subplots(1, len(_PANELS)), _PANELS, strict=True):
        _panel(axes, bench, name, title, unit)
    figure.suptitle(_title(bench), fontsize=12, fontweight="bold", parse_math=False)
    figure.supxlabel(_conditions(bench), fontsize=8, color="#555555", parse_math=False)


def _panel(axes: Axes, bench: Bench, name: str, title: str, unit: str) -> None:
    """Draw one figure as bars: their height is the median, the whisker goes from the least to the most."""
    comparison = bench.comparison(name)
    predicted = comparison.predicted
    spreads = (
        None if predicted is None else RunSpread(predicted, predicted, predicted),
        comparison.measured,
        comparison.mmap,
    )
    bars = [(label, spread) for label, spread in zip(_COLOURS, spreads, strict=True) if spread is not None]
    axes.bar(
        [label for label, _ in bars],
        [spread.median for _, spread in bars],
        color=[_COLOURS[label] for label, _ in bars],
        width=0.6,
    )
    for place, (_, spread) in enumerate(bars):
        if spread.most > spread.least:
            ends = [[spread.median - spread.least], [spread.most - spread.median]]
            axes.errorbar([place], [spread.median], yerr=ends, color="#333333", capsize=5)
        top = place, spread.most
        axes.annotate(f"{spread.median:.3g}", top, xytext=(0, 5), textcoords="offset points", ha="center")
    axes.set_title(title, fontsize=10)
    axes.set_ylabel(unit)
    axes.margins(y=0.15)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def _title(bench: Bench) -> str:
    name = as_text(bench.model)
    if len(name) > _LONGEST_NAME:
        name = f"{name[: _LONGEST_NAME - 1]}…"
    sizes = f"{format_size(bench.plan.model_bytes)} in {format_size(bench.plan.budget_bytes)} of memory"
    return f"{name}: {sizes}"


def _conditions(bench: Bench) -> str:
    mmap = ""
    if bench.comparison("start_s").mmap is not None:
        mmap = "both within the budget" if bench.box.limit_bytes else "mmap with all of the page cache"
        mmap = f"; {mmap}"
    threads, rounds = bench.numerics.threads, bench.rounds
    return (
        f"{bench.cpu}, {format_count(threads, 'thread')}; {bench.library}; {bench.started_at[:10]}\n"
        f"prompt of {bench.prompt_tokens:,} tokens, {bench.predict_tokens:,} decoded; cold, "
        f"{f'{rounds} rounds, whiskers from least to most' if rounds > 1 else '1 round'}{mmap}"
    )
