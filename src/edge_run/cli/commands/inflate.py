"""`edge-run inflate`: a small model, grown to a chosen size."""

from __future__ import annotations

from pathlib import Path

import click

from edge_run.cli.shared.growing import grow
from edge_run.cli.shared.setting import PATH, size_option
from edge_run.cli.shared.settings_command import SettingsCommand
from edge_run.cli.shared.terminal import Terminal


@click.command(cls=SettingsCommand, short_help="Grow a small model, to have something to stream.")
@click.argument("source", type=PATH)
@click.argument("target", type=PATH)
@click.option("--size", callback=size_option, required=True, metavar="SIZE", help="How large, as 4G.")
@click.option("--layers", type=int, metavar="N", help="How many layers.  [default: as many as SOURCE has]")
@click.option("--seed", type=click.IntRange(0), metavar="N", default=0, help="Of the noise.  [default: 0]")
@click.option("--force", is_flag=True, help="Replace TARGET where it exists.")
@click.pass_obj
def inflate(
    terminal: Terminal, source: Path, target: Path, size: int, layers: int | None, seed: int, force: bool
) -> None:
    """Grow the GGUF file SOURCE to a size of your choice: what it computes stays the same.

    The neurons and layers that are added cost bytes and multiplications, and add nothing to the result: something to
    stream, for trying and for measuring.
    """
    grow(source, target, size, terminal, layers, seed, is_overwritten=force)
