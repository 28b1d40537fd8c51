"""A comparison in words: what `edge-run bench` writes. Pure: results in, text out."""

from __future__ import annotations

from collections.abc import Iterator

from edge_run.base.bench import MMAP, Bench, Comparison, RunSpread
from edge_run.base.units import format_count, format_rate, format_size
from edge_run.cli.shared.figures import describe_decision, describe_plan
from edge_run.cli.shared.tables import align

NAMES = {
    "load_s": "open",
    "first_token_s": "first token",
    "start_s": "open to first token",
    "prefill_tokens_per_s": "prefill",
    "decode_tokens_per_s": "decode",
    "bytes_per_token": "read per token",
    "peak_bytes": "peak memory",
}
HEADINGS = ("", "predicted", "measured", "difference", "llama.cpp mmap", "ratio")
LEAST_SPREAD = 0.005


def describe(bench: Bench, columns: int | None) -> str:
    """Return all of it: a table where it fits `columns`, one line for each figure where it does not (or for None)."""
    table = _table(bench)
    fits = columns is not None and max(map(len, table)) <= columns
    lines = [describe_plan(bench.model, bench.plan), _conditions(bench), ""]
    lines += table if fits else list(_plain_lines(bench))
    return "\n".join([*lines, "", *_notes(bench), ""])


def _conditions(bench: Bench) -> str:
    numerics = bench.numerics
    rounds = "1 round" if bench.rounds == 1 else f"{bench.rounds} rounds"
    return (
        f"{rounds}, cold: a prompt of {bench.prompt_tokens:,} tokens, {bench.predict_tokens:,} decoded; "
        f"{format_count(numerics.threads, 'thread')} of {bench.cpu}; {bench.library}"
    )


def _table(bench: Bench) -> list[str]:
    has_mmap = any(comparison.mmap for comparison in bench.comparisons)
    n_columns = len(HEADINGS) if has_mmap else HEADINGS.index("llama.cpp mmap")
    rows = [HEADINGS[:n_columns], *(_cells(comparison)[:n_columns] for comparison in bench.comparisons)]
    return align(rows)


def _cells(comparison: Comparison) -> tuple[str, ...]:
    name = comparison.name
    return (
        NAMES[name],
        "-" if comparison.predicted is None else amount(name, comparison.predicted),
        _spread(name, comparison.measured),
        "-" if comparison.deviation is None else f"{comparison.deviation:+.0%}",
        _spread(name, comparison.mmap),
        "-" if comparison.ratio is None else f"{comparison.ratio:.2f}",
    )


def _plain_lines(bench: Bench) -> Iterator[str]:
    for comparison in bench.comparisons:
        name, *cells = _cells(comparison)
        told = [f"{heading} {cell}" for heading, cell in zip(HEADINGS[1:], cells, strict=True) if cell != "-"]
        yield f"{name}: {', '.join(told)}"


def _spread(name: str, spread: RunSpread | None) -> str:
    if spread is None:
        return "-"
    text = amount(name, spread.median)
    return f"{text} ±{spread.half_range:.0%}" if spread.half_range >= LEAST_SPREAD else text


def amount(name: str, value: float) -> str:
    """Return a figure of this name with its unit, for a person to read."""
    if name.endswith("_tokens_per_s"):
        return format_rate(value)
    return f"{value:.2f} s" if name.endswith("_s") else format_size(value)


def _notes(bench: Bench) -> Iterator[str]:
    if (forecast := bench.plan.forecast) is not None:
        limit = "reading" if forecast.limit == "disk" else "computing"
        yield f"Predicted from the device's profile of {bench.profiled_at[:10]}: {limit} decides how fast tokens come."
    if bench.profile_problem:
        yield f"{'About that profile' if forecast else 'No times were predicted'}: {bench.profile_problem}."
    if bench.mmap_problem:
        yield f"llama.cpp's mmap was not measured to the end: {bench.mmap_problem}."
    yield from _about_tunables(bench)
    mmap_runs = [run for run in bench.measurements if run.backend == MMAP]
    if mmap_runs:
        yield _about_box(bench)
        read = [run.bytes_read for run in mmap_runs if run.bytes_read is not None]
        if read and min(read) < bench.plan.model_bytes / 2:
            yield (
                f"llama.cpp's mmap read only {format_size(min(read))} from storage: a part of the file was in the page "
                "cache, where another program keeps it, or this file system does not count what is read."
            )
        if bench.has_same_tokens:
            yield f"The tokens were the same in all {len(bench.measurements)} runs."


def _about_tunables(bench: Bench) -> Iterator[str]:
    uses = [run.experts for run in bench.measurements if run.experts is not None]
    if not uses:
        return
    tunables = ", ".join(f"{name} {setting}" for name, setting in uses[-1].tunables.items())
    yield f"Experts came with {tunables}: " + (
        "as compared in these runs."
        if any(use.decisions for use in uses)
        else "nothing else was compared in so few tokens."
    )
    yield from (f"{describe_decision(decision)}." for use in uses for decision in use.decisions)


def _about_box(bench: Bench) -> str:
    read_ahead = f"; read-ahead {format_size(bench.box.read_ahead_bytes)}" if bench.box.read_ahead_bytes else ""
    if bench.box.limit_bytes:
        size = format_size(bench.box.limit_bytes)
        counted = "page cache included, but not libraries that others have loaded"
        return f"Both ran in a memory group of {size}, {counted}{read_ahead}."
    return f"llama.cpp's mmap had all of the page cache: {bench.box.reason}{read_ahead}."
