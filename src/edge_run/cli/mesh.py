"""`edge-run mesh …`: several devices, one model."""

from __future__ import annotations

import click

from edge_run.base.errors import ConfigError
from edge_run.cli.mesh_doctor import doctor
from edge_run.cli.mesh_init import init
from edge_run.cli.mesh_join import join
from edge_run.cli.mesh_status import status

COMMANDS = (init, join, status, doctor)

_HELP = """Let several devices run one model together."""


class Commands(click.Group):
    """The commands; without a word, help."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Give help where no command is named."""
        if not args:
            ctx.obj.say(self.get_help(ctx))
            ctx.exit(ConfigError.exit_code)
        return super().parse_args(ctx, args)


@click.group(cls=Commands, commands={str(command.name): command for command in COMMANDS}, help=_HELP, short_help=_HELP)
def mesh() -> None:
    """Give the commands a common name; each does its own work."""
