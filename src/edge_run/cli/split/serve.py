"""`edge-run split serve`: the server side of a split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from edge_run.base.units import format_count
from edge_run.cli.shared.options import some_settings
from edge_run.cli.shared.setting import PATH
from edge_run.cli.shared.settings_command import SettingsCommand
from edge_run.cli.shared.terminal import Terminal

HOST, PORT = "127.0.0.1", 7447


@click.command(
    cls=SettingsCommand,
    params=[
        click.Argument(["tails"], metavar="TAIL...", nargs=-1, required=True, type=PATH),
        click.Option(
            ["--host"], default=HOST, metavar="HOST", help=f"Where to listen; 0.0.0.0 is everywhere.  [default: {HOST}]"
        ),
        click.Option(
            ["--port"],
            type=click.IntRange(0, 65535),
            default=PORT,
            metavar="N",
            help=f"0: any that is free.  [default: {PORT}]",
        ),
        *some_settings("threads", "verbose"),
    ],
    short_help="Serve the tails of trained splits.",
)
@click.pass_context
def serve(context: click.Context, /, tails: tuple[Path, ...], host: str, port: int, **given: Any) -> None:
    """Serve the networks of each TAIL, a tail.onnx with its code.json and model.onnx beside it, until Ctrl-C.

    Nothing is encrypted, and whoever reaches the port may ask: listen beyond this machine on trusted networks only.
    Needs the `split` extra.
    """
    import anyio

    from edge_run.cli.shared.settings import report
    from edge_run.devices.link.hosts import place_text
    from edge_run.runtime.split.server import SplitServer

    terminal: Terminal = context.obj
    report(context, terminal)
    server = SplitServer(tails, given["threads"])

    def ready(found: int) -> None:
        terminal.write(f"serving {format_count(len(tails), 'tail')} at {place_text(host, found)}\n")

    anyio.run(server.serve, host, port, ready)
