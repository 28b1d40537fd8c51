"""`edge-run replay`: a route trace, replayed through the policies of the expert cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from edge_run.base.replay import PolicyReplay, Replay
from edge_run.base.units import format_count, format_size
from edge_run.cli.reports import replay_plot
from edge_run.cli.shared.options import some_settings
from edge_run.cli.shared.plot_file import PLOT, PlotFile, draw_plot
from edge_run.cli.shared.setting import PATH, sizes_option
from edge_run.cli.shared.settings_command import SettingsCommand
from edge_run.cli.shared.tables import align
from edge_run.cli.shared.terminal import Terminal

ALL = "all"
_TRACE = click.Argument(["trace"], type=PATH)


@click.command(
    cls=SettingsCommand,
    params=[
        _TRACE,
        click.Option(
            ["--budget", "budgets"], callback=sizes_option, multiple=True, metavar="SIZE",
            help="Memory for experts, as 4000MiB; may be repeated.  "
            "[default: from a 32nd of all experts to all of them]",
        ),
        click.Option(
            ["--policy"], default=ALL, metavar="NAME",
            help="One policy (lru, lfu, layer-lru, layer-lfu, default, or the optimum), or all.  [default: all]",
        ),
        *PLOT,
        *some_settings("json"),
    ],
    short_help="Say how often each cache policy would have had an expert in memory.",
)  # fmt: skip
@click.pass_obj
def replay(
    terminal: Terminal, /, trace: Path, budgets: tuple[int, ...], policy: str, plot: PlotFile | None, **given: Any
) -> None:
    """Replay TRACE, a record of which experts a model's routers chose, through each policy of the expert cache.

    Beside them is the offline optimum: what a policy could do that knew every choice beforehand. Nothing is loaded.
    """
    from edge_run.prefetch.replay import replay as replay_trace

    result = replay_trace(trace, budgets, () if policy == ALL else (policy,), terminal.show)
    terminal.write_result(result, given["json"], describe)
    draw_plot(plot, lambda figure: replay_plot.draw(result, figure), terminal)


def describe(result: Replay) -> str:
    """Return `result` as a table of hits and one of bytes, a budget on a line."""
    tokens = format_count(result.decoded_tokens, "token")
    experts = f"{result.experts_per_token} of {result.experts} experts in each of {result.layers} layers"
    lines = [
        f"{result.trace}: {tokens} decoded, with {experts}; all experts take {format_size(result.expert_bytes)}",
        "",
        "Experts that were in memory when they were needed:",
        *_table(result, lambda one: f"{one.hit_rate:.1%}"),
        "",
        "Read per token:",
        *_table(result, lambda one: format_size(one.bytes_per_token)),
    ]
    return "\n".join(lines) + "\n"


def _table(result: Replay, cell: Callable[[PolicyReplay], str]) -> list[str]:
    rows = [("budget", *result.policies)]
    for budget in result.budgets_bytes:
        rows.append((format_size(budget), *(cell(result.of(policy, budget)) for policy in result.policies)))
    return [f"   {line}" for line in align(rows, str.rjust)]
