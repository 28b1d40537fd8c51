"""What the demo draws: where the model's bytes are, and how fast tokens come beside llama.cpp's mmap. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from edge_run.base.bench import BACKEND_NAMES, MMAP, OURS, Measurement
from edge_run.base.results import Plan
from edge_run.base.units import format_rate, format_size

BAR_COLUMNS = 48
Marks = tuple[str, str, str]
"""Of what is held, of what passes through, and of what is away."""

PLAIN_MARKS: Marks = ("#", "=", ".")
MARKS: Marks = ("\u2588", "\u2592", "\u2591")


def marks_for(encoding: str | None) -> Marks:
    """Return marks that a stream of this encoding can write."""
    try:
        "".join(MARKS).encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return PLAIN_MARKS
    return MARKS


def bar(parts: Sequence[tuple[str, float]], columns: int = BAR_COLUMNS) -> str:
    """Return a bar of `columns` columns: of each mark the share of it, rounded at its end."""
    drawn, ends = "", 0.0
    for mark, share in parts:
        ends += share
        drawn += mark * (round(min(1.0, ends) * columns) - len(drawn))
    return drawn


def describe_places(plan: Plan, marks: Marks) -> str:
    """Return where the bytes of the model are between two tokens, as a bar and a line."""
    held, passing, away = marks
    window_bytes = min(plan.window_bytes, plan.model_bytes - plan.pinned_bytes)
    away_bytes = max(0, plan.model_bytes - plan.pinned_bytes - window_bytes)
    sizes = ((held, plan.pinned_bytes), (passing, window_bytes), (away, away_bytes))
    return (
        f"   {bar([(mark, size / plan.model_bytes) for mark, size in sizes])}\n"
        f"   {held} {format_size(plan.pinned_bytes)} stay, {passing} {format_size(window_bytes)} that the rest passes "
        f"through, {away} {format_size(away_bytes)} on the drive"
    )


def describe_speeds(runs: Sequence[Measurement], marks: Marks) -> str:
    """Return a bar for the speed of each run, and how much faster edge-run was where both are there."""
    speeds = {run.backend: run.decode_tokens_per_s for run in runs}
    lines = list(_speed_lines(runs, max(speeds.values()), marks[0]))
    if OURS in speeds and MMAP in speeds:
        lines.append(f"   edge-run made {speeds[OURS] / speeds[MMAP]:.1f} times the tokens a second.")
    return "\n".join(lines)


def _speed_lines(runs: Sequence[Measurement], fastest: float, mark: str) -> Iterator[str]:
    width = max(map(len, BACKEND_NAMES.values()))
    for run in runs:
        read = "" if run.bytes_per_token is None else f", {format_size(int(run.bytes_per_token))} read for each"
        share = run.decode_tokens_per_s / fastest
        drawn = bar([(mark, share)]) or mark
        yield f"   {BACKEND_NAMES[run.backend]:{width}}  {drawn} {format_rate(run.decode_tokens_per_s)}{read}"
