"""`edge-run mesh doctor`: finds what is wrong with a mesh, and says what to do about it."""

from __future__ import annotations

from typing import Any

import click

import edge_run
from edge_run.base.files.folders import mesh_folder
from edge_run.cli.mesh.options import OTHER_BROKER
from edge_run.cli.reports.findings import EXIT_CODES, end_with_report
from edge_run.cli.shared.options import some_settings
from edge_run.cli.shared.settings_command import SettingsCommand
from edge_run.cli.shared.terminal import Terminal


@click.command(
    cls=SettingsCommand,
    params=[OTHER_BROKER, *some_settings("json")],
    short_help="Say what is wrong with the mesh, and what to do.",
    epilog=EXIT_CODES,
)
@click.pass_context
def doctor(context: click.Context, /, broker: str | None, **given: Any) -> None:
    """Examine the mesh from this device: the broker, the clocks, the keys, the link to each device.

    Each finding is one line, and then what to do. It listens for 11 seconds. Needs the `mesh` extra.
    """
    from edge_run.devices.mesh.checkup import examine

    terminal: Terminal = context.obj
    terminal.show("listening for 11 seconds")
    report = examine(mesh_folder(), edge_run.__version__, broker)
    terminal.erase()
    end_with_report(context, report, given["json"])
