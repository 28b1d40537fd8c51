"""How a server answered a load, in words: what `edge-run bench --server` writes. Pure: results in, text out."""

from __future__ import annotations

from edge_run.base.bench import LoadSpread, ServerLoad
from edge_run.base.units import format_rate
from edge_run.cli.shared.tables import align

HEADINGS = ("", "median", "p90", "p99")


def describe(load: ServerLoad) -> str:
    """Return all of it."""
    what = f"{load.model} at {load.server}" if load.model else load.server
    clients = "1 client" if load.clients == 1 else f"{load.clients:,} clients at a time"
    spreads = (
        ("time to first token", load.first_token_s),
        ("time between tokens", load.between_tokens_s),
        ("whole answer", load.answer_s),
    )
    lines = [
        f"{what}: {clients}, {load.seconds:.0f} s",
        "",
        *align([HEADINGS, *((name, *_cells(spread)) for name, spread in spreads if spread)]),
        "",
        f"{format_rate(load.tokens_per_s)}: {load.tokens:,} tokens, {load.answers:,} answers, {load.errors:,} errors",
        *(f"  {message}" for message in load.messages),
    ]
    return "\n".join([*lines, ""])


def _cells(spread: LoadSpread) -> tuple[str, ...]:
    return tuple(f"{value:.3f} s" for value in (spread.median, spread.p90, spread.p99))
