"""Route traces of two real mixtures of experts through the policies of the expert cache, beside the offline optimum.

Hits of decode look-ups, in per cent, after the prompt has warmed the cache, as `edge-run replay` counts them. Then:
each half of the traces' tokens (the second after the first); random routing of other shapes (Zipf's law, favourites
that drift, tokens that know nothing of each other); the default policy with one parameter changed at a time. The
optimum keeps all that it reads, so that where next to nothing fits, a policy that need not can do better. The time of a
look-up is that of the default policy, replay's own loop included.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any
from unittest import mock

from _box import ROOT, SHARED, need, write_results

from edge_run.base.replay import PolicyReplay
from edge_run.base.units import MIB
from edge_run.prefetch import next_use, resemblance
from edge_run.prefetch.experts import ExpertCache, MoeShape
from edge_run.prefetch.next_use import NextUsePolicy
from edge_run.prefetch.optimum import OptimalPolicy
from edge_run.prefetch.policies import make_policy
from edge_run.prefetch.replay import NAMES, OPTIMUM, Trace, read_trace, run_policy

sys.path.insert(0, str(ROOT / "tests"))

TRACES = {
    "qwen3-30b-a3b": SHARED / "data" / "routes" / "qwen3-30b-a3b-top6.route.csv",
    "gpt-oss-120b": SHARED / "data" / "routes" / "gpt-oss-120b-top2.route.csv",
}
BUDGETS_MIB = {
    "qwen3-30b-a3b": (50, 250, 500, 1000, 2000, 3000, 4000, 6000, 8000),
    "gpt-oss-120b": (50, 250, 750, 1500, 3000, 6000, 12000, 24000),
}
CHECKED = (("qwen3-30b-a3b", 4000), ("qwen3-30b-a3b", 3000), ("qwen3-30b-a3b", 500), ("gpt-oss-120b", 3000),
           ("gpt-oss-120b", 750))  # fmt: skip
FADES = "_FADES"
CHANGES: dict[str, tuple[object, str, object]] = {
    "as it is": (next_use, "DOUBT", next_use.DOUBT),
    "half-lives 64, 8, 1": (next_use, FADES, tuple(0.5 ** (1 / x) for x in (64, 8, 1))),
    "half-lives 256, 32, 2": (next_use, FADES, tuple(0.5 ** (1 / x) for x in (256, 32, 2))),
    "a prompt's token counts 0.1": (next_use, "PROMPT_TOKEN", 0.1),
    "a prompt's token counts 0.4": (next_use, "PROMPT_TOKEN", 0.4),
    "no like tokens": (next_use, "FORECAST_SHARE", 0.0),
    "like tokens 0.3 of p": (next_use, "FORECAST_SHARE", 0.3),
    "like tokens 0.7 of p": (next_use, "FORECAST_SHARE", 0.7),
    "doubt 0.03": (next_use, "DOUBT", 0.03),
    "doubt 0.3": (next_use, "DOUBT", 0.3),
    "4 likest": (resemblance, "LIKEST", 4),
    "16 likest": (resemblance, "LIKEST", 16),
    "matches fade by 0.7": (resemblance, "FADE", 0.7),
    "matches fade by 0.9": (resemblance, "FADE", 0.9),
    "one token after": (resemblance, "FOLLOWING", (1.0,)),
    "four tokens after": (resemblance, "FOLLOWING", (0.25, 0.25, 0.25, 0.25)),
    "chosen anew at each look-up": (resemblance, "REFRESH_LOOK_UPS", 1),
    "chosen anew at each 12th": (resemblance, "REFRESH_LOOK_UPS", 12),
}
SHAPES = {
    "6 layers, 4 of 32": MoeShape(tuple(range(6)), 32, 4),
    "4 layers, 8 of 256": MoeShape(tuple(range(4)), 256, 8),
    "60 layers, 8 of 64": MoeShape(tuple(range(60)), 64, 8),
}


def make(name: str, trace: Trace) -> Any:
    """Return a new policy of this name."""
    return OptimalPolicy(trace.look_ups) if name == OPTIMUM else make_policy(name, trace.moe)


def rows_of(table: str, what: str, trace: Trace, budget_bytes: int, after: int = 0) -> list[dict[str, object]]:
    """Return a row for each policy; with `after`, only look-ups from there on count."""
    rows = []
    for name in NAMES:
        found = run_policy(trace, budget_bytes, name, make(name, trace))
        hits, look_ups = found.hits, found.look_ups
        if after:
            before = run_policy(part(trace, 0, after), budget_bytes, name, make(name, trace))
            hits, look_ups = hits - before.hits, look_ups - before.look_ups
        rows.append({"table": table, "trace": what, **_figures(found, budget_bytes), "hit_rate": hits / look_ups})
    return rows


def _figures(found: PolicyReplay, budget_bytes: int) -> dict[str, object]:
    return {"budget_mib": budget_bytes / MIB, "policy": found.policy, "bytes_per_token": found.bytes_per_token}


def part(trace: Trace, first: int, last: int) -> Trace:
    """Return the look-ups `first` to `last` (excluded) of `trace`."""
    tokens = sum(not one.is_prefill for one in trace.look_ups[first:last]) // len(trace.moe.layers)
    return Trace(trace.look_ups[first:last], trace.expert_bytes, trace.moe, trace.model, trace.prompts, tokens)


def half(trace: Trace) -> int:
    """Return where the second half of the decoded tokens begins."""
    n_layers = len(trace.moe.layers)
    return len(trace.look_ups) - trace.decoded_tokens // 2 * n_layers


def random_trace(moe: MoeShape, tokens: int) -> Trace:
    """Return a trace of random routing, of experts of 1 MiB."""
    from routes import look_ups

    made = tuple(look_ups(moe, tokens, seed=1))
    return Trace(made, dict.fromkeys(moe.layers, MIB), moe, "", 1, tokens)


def seconds_of_a_look_up(trace: Trace, budget_bytes: int) -> tuple[float, int]:
    """Return the least of five, of the default policy, in decoding; and how many experts were resident."""
    least, n_resident = float("inf"), 0
    for _ in range(5):
        cache = ExpertCache(budget_bytes, trace.expert_bytes, NextUsePolicy(trace.moe))
        prompts = [one for one in trace.look_ups if one.is_prefill]
        decoded = [one for one in trace.look_ups if not one.is_prefill]
        for layer, experts, _is_prefill in prompts:
            cache.look_up(layer, experts)
        started = time.perf_counter()
        for layer, experts, _is_prefill in decoded:
            cache.look_up(layer, experts)
        least, n_resident = min(least, (time.perf_counter() - started) / len(decoded)), len(cache)
    return least, n_resident


def table_of(rows: list[dict[str, object]], columns: list[str], column: str) -> list[str]:
    """Return rows as Markdown: a line for each trace and budget, a column for each of `columns`."""
    lines = [f"| trace | MiB | {' | '.join(columns)} |", "|---|---|" + "---|" * len(columns)]
    cells: dict[tuple[object, object], dict[object, float]] = {}
    for row in rows:
        cells.setdefault((row["trace"], row["budget_mib"]), {})[row[column]] = float(str(row["hit_rate"]))
    for (trace, budget), found in cells.items():
        hits = " | ".join(f"{100 * found[name]:.1f}" for name in columns)
        lines.append(f"| {trace} | {float(str(budget)):.0f} | {hits} |")
    return lines


def sensitivity(traces: dict[str, Trace]) -> list[dict[str, object]]:
    """Return the default policy's hits with each of CHANGES."""
    rows: list[dict[str, object]] = []
    for change, (module, name, value) in CHANGES.items():
        with mock.patch.object(module, name, value):
            for what, budget in CHECKED:
                found = run_policy(traces[what], budget * MIB, "default", NextUsePolicy(traces[what].moe))
                figures = {**_figures(found, budget * MIB), "hit_rate": found.hit_rate, "change": change}
                rows.append({"table": "sensitivity", "trace": what, **figures})
    return rows


def main() -> None:
    """Replay and write the results."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    need(*TRACES.values())
    traces = {name: read_trace(path) for name, path in TRACES.items()}
    hits, halves, shapes = list[dict[str, object]](), list[dict[str, object]](), list[dict[str, object]]()
    times = []
    for name, trace in traces.items():
        for budget in BUDGETS_MIB[name]:
            hits += rows_of("hits", name, trace, budget * MIB)
            seconds, n_resident = seconds_of_a_look_up(trace, budget * MIB)
            times.append((name, budget, 1e6 * seconds, n_resident))
    for name, budget in CHECKED:
        trace = traces[name]
        halves += rows_of("halves", f"{name}, first half", part(trace, 0, half(trace)), budget * MIB)
        halves += rows_of("halves", f"{name}, second half", trace, budget * MIB, after=half(trace))
    for shape, moe in SHAPES.items():
        trace = random_trace(moe, 150)
        for share in (0.02, 0.05, 0.1, 0.25, 0.5):
            shapes += rows_of("shapes", shape, trace, int(trace.all_bytes * share))
    changed = sensitivity(traces)
    lines = [__doc__ or "", *table_of(hits, list(NAMES), "policy"), ""]
    lines += ["Halves:", "", *table_of(halves, list(NAMES), "policy"), ""]
    lines += ["Random routing:", "", *table_of(shapes, list(NAMES), "policy"), ""]
    lines += ["One parameter of the default policy changed:", "", *_changes(changed), ""]
    wide = random_trace(MoeShape(tuple(range(48)), 128, 8), 60)
    seconds, n_resident = seconds_of_a_look_up(wide, 1500 * MIB)
    times.append(("random, 48 layers, 8 of 128", 1500, 1e6 * seconds, n_resident))
    lines += ["A look-up of the default policy:", ""]
    lines += [f"* {name} @ {budget} MiB: {us:.0f} µs, {n} experts resident." for name, budget, us, n in times]
    write_results("replay", [*hits, *halves, *shapes, *changed], "\n".join(lines))


def _changes(rows: list[dict[str, object]]) -> list[str]:
    lines = [f"| | {' | '.join(f'{name} @ {budget}' for name, budget in CHECKED)} |", "|---|" + "---|" * len(CHECKED)]
    for change in CHANGES:
        found = [float(str(row["hit_rate"])) for row in rows if row["change"] == change]
        lines.append(f"| {change} | {' | '.join(f'{100 * one:.1f}' for one in found)} |")
    return lines


if __name__ == "__main__":
    main()
