"""`edge-run split patch`: a network whose first layers run patch by patch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from edge_run.base.errors import ConfigError
from edge_run.base.split import PatchReport
from edge_run.base.units import KIB
from edge_run.cli.shared.options import MODEL, some_settings
from edge_run.cli.shared.setting import PATH
from edge_run.cli.shared.settings_command import SettingsCommand
from edge_run.cli.shared.terminal import Terminal
from edge_run.cli.split.numbers import numbers


@click.command(
    cls=SettingsCommand,
    params=[
        MODEL,
        click.Option(
            ["--out"], type=PATH, required=True, metavar="FILE",
            help="The network that is written.",
        ),
        click.Option(["--force"], is_flag=True, help="Replace FILE where it exists."),
        click.Option(
            ["--tiles"], type=click.IntRange(2, 64), metavar="N",
            help="N x N patches.  [default: what takes the least memory, computing at most 25 % again]",
        ),
        click.Option(["--mean"], metavar="X", help="Take bytes: the mean of pixels from 0 to 1.  [default: as MODEL]"),
        click.Option(["--std"], metavar="X", help="Their deviation.  [default: 1, with --mean]"),
        *some_settings("json"),
    ],
    short_help="Run a network's first layers in patches: less memory, the same answers.",
)  # fmt: skip
@click.pass_obj
def patch(terminal: Terminal, /, model_file: Path, out: Path, tiles: int | None, **given: Any) -> None:
    """Write the ONNX network MODEL anew, its first layers in patches, so that none of their tensors is ever whole.

    Works for networks that begin with a chain of convolutions and poolings; the answers are compared before anything
    is written. Needs the `split` and `train` extras.
    """
    from edge_run.runtime.split.patches import patch_network

    if given["std"] is not None and given["mean"] is None:
        raise ConfigError("--std: needs --mean beside it")
    pixels = None
    if given["mean"] is not None:
        pixels = (numbers("--mean", given["mean"]), numbers("--std", given["std"] or "1"))
    result = patch_network(model_file, out, tiles, pixels, is_overwritten=given["force"])
    terminal.write_result(result, given["json"], describe)


def describe(result: PatchReport) -> str:
    """Return what patches give, in lines."""
    rows = (
        ("first layers", result.prefix_peak_bytes, result.patched_prefix_peak_bytes),
        ("whole network", result.whole_peak_bytes, result.patched_peak_bytes),
    )
    lines = [
        f"{result.model}: {result.patches} patches up to {result.last}, {result.extra_share:.1%} computed again, "
        f"answers differ by {result.difference:.0e} at most",
        *(
            f"  {name}: {before / KIB:,.0f} KiB of tensors at once, in patches {after / KIB:,.0f} KiB, "
            f"{before / after:.1f} times less"
            for name, before, after in rows
        ),
    ]
    return "\n".join(lines) + "\n"
