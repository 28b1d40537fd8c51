"""`edge-run split …`: networks that see, cut between a device and its server."""

from __future__ import annotations

import click

from edge_run.base.errors import ConfigError
from edge_run.cli.split_bench import bench
from edge_run.cli.split_inspect import inspect
from edge_run.cli.split_patch import patch
from edge_run.cli.split_run import run
from edge_run.cli.split_serve import serve
from edge_run.cli.split_train import train

COMMANDS = (inspect, train, serve, run, bench, patch)

_HELP = """Cut an ONNX network between a device and its server."""


class Commands(click.Group):
    """The commands; without a word, help."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Give help where no command is named."""
        if not args:
            ctx.obj.say(self.get_help(ctx))
            ctx.exit(ConfigError.exit_code)
        return super().parse_args(ctx, args)


@click.group(cls=Commands, commands={str(command.name): command for command in COMMANDS}, help=_HELP, short_help=_HELP)
def split() -> None:
    """Give the commands a common name; each does its own work."""
