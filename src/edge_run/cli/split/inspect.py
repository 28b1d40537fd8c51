"""`edge-run split inspect`: where a network can be cut, and what each cut costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from edge_run.base.split import Cut, CutReport
from edge_run.base.units import format_count, format_size
from edge_run.cli.shared.options import MODEL, some_settings
from edge_run.cli.shared.settings_command import SettingsCommand
from edge_run.cli.shared.tables import align
from edge_run.cli.shared.terminal import Terminal


@click.command(
    cls=SettingsCommand,
    params=[MODEL, *some_settings("threads", "json")],
    short_help="Show where a network can be cut, and what each cut costs.",
)
@click.pass_obj
def inspect(terminal: Terminal, /, model_file: Path, **given: Any) -> None:
    """Show every tensor of the ONNX network MODEL at which it can be cut in two, with nothing else between the halves.

    Each cut is made, compared with the uncut network, and timed here. Needs the `split` and `train` extras.
    """
    from edge_run.base.config import ModelConfig
    from edge_run.runtime.split.inspection import inspect_cuts

    threads = ModelConfig(threads=given["threads"]).threads
    report = inspect_cuts(model_file, threads, terminal.show)
    terminal.write_result(report, given["json"], describe)


def describe(report: CutReport) -> str:
    """Return `report` as a table, a cut on a line."""
    head = ("tensor", "shape", "bytes", "head", "head ms", "tail ms", "head memory", "tail memory", "difference")
    lines = [
        f"{report.model}: {report.multiply_adds / 1e6:,.1f} million multiply-adds, {report.whole_s * 1e3:.2f} ms and "
        f"{format_size(report.whole_peak_bytes)} of tensors uncut, "
        f"{format_count(report.threads, 'thread')}; {len(report.cuts)} cuts",
        "",
        *align([head, *map(_row, report.cuts)]),
    ]
    return "\n".join(lines) + "\n"


def _row(cut: Cut) -> tuple[str, ...]:
    return (
        cut.tensor,
        "x".join(map(str, cut.shape)),
        f"{cut.wire_bytes:,}",
        f"{cut.head_share:.1%}",
        f"{cut.head_s * 1e3:.2f}",
        f"{cut.tail_s * 1e3:.2f}",
        format_size(cut.head_peak_bytes),
        format_size(cut.tail_peak_bytes),
        ("exact" if cut.is_exact else "NOT EXACT") + (f", {cut.difference:.0e} optimised" if cut.difference else ""),
    )
