"""`edge-run mesh invite`: a line that lets other devices come in, for a while."""

from __future__ import annotations

from typing import Any

import click

from edge_run.base.files.folders import mesh_folder
from edge_run.cli.mesh.invitation import show_invitation
from edge_run.cli.mesh.options import INVITATION_OPTIONS
from edge_run.cli.shared.options import some_settings
from edge_run.cli.shared.settings_command import SettingsCommand
from edge_run.cli.shared.terminal import Terminal


@click.command(
    cls=SettingsCommand,
    params=[*INVITATION_OPTIONS, *some_settings("json")],
    short_help="Print a line that lets other devices join.",
)
@click.pass_obj
def invite(terminal: Terminal, /, **given: Any) -> None:
    """Print a line that lets other devices join, as many and as long as it says: treat it as a password.

    Only on a device that leads; only the founder's gives away the role lead. Needs the `mesh` extra.
    """
    show_invitation(terminal, mesh_folder(), given, is_new=False)
