"""Options that several commands of `edge-run mesh` have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from edge_run.base.errors import ConfigError
from edge_run.cli.shared.setting import BROKER_VARIABLE, PATH

MOST_DAYS, MOST_DIGITS = 365, 9


def duration_option(context: click.Context, parameter: click.Parameter, text: str) -> int:
    """Return the seconds that a time means, as people write it: a click callback."""
    number, unit = text[:-1], {"s": 1, "m": 60, "h": 3600, "d": 86_400}.get(text[-1:])
    if (
        unit is None
        or not number.isascii()
        or not number.isdigit()
        or len(number) > MOST_DIGITS
        or not 0 < int(number) * unit <= MOST_DAYS * 86_400
    ):
        raise click.BadParameter(f"{text!r}: must be 1s to {MOST_DAYS}d, as 30m, 24h or 7d", context, parameter)
    return int(number) * unit


ROLES = click.Choice(["compute", "use", "lead"])


def broker_option(help_text: str) -> click.Option:
    """Return the option of a broker's address, whose password is for a variable: others see flags."""
    return click.Option(
        ["--broker"],
        metavar="URL",
        envvar=BROKER_VARIABLE,
        help=f"{help_text}  With a password, set {BROKER_VARIABLE} instead.",
    )


OTHER_BROKER = broker_option("Another address of the broker than the join line's.")
DEVICE_OPTIONS = (
    click.Option(["--name"], metavar="TEXT", help="What people call this device.  [default: its host name]"),
    click.Option(
        ["--listen"], multiple=True, metavar="ADDRESS",
        help="For data links, also of runs on this device; 0.0.0.0 is every network card; may be repeated; is "
        "remembered.  [default: 127.0.0.1]",
    ),
    click.Option(
        ["--port"], type=click.IntRange(0, 65534), metavar="N",
        help="Port of the data link; a run takes the next one. 0: any that is free; is remembered.  [default: 0]",
    ),
)  # fmt: skip
AUTHORITY = click.Option(
    ["--authority"],
    type=PATH,
    metavar="FILE",
    help="PEM file of who vouches for a TLS broker that the system does not know.",
)
REPLACE = click.Option(["--replace"], is_flag=True, help="Leave the cluster that this device belongs to.")
INVITATION_OPTIONS = (
    click.Option(
        ["--role"], type=ROLES, default="use",
        help="What whoever comes in may do. compute: compute for others; use: run models on the mesh, too; lead: "
        "invite and remove, too.  [default: use]",
    ),
    click.Option(
        ["--uses"], type=click.IntRange(1, 256), default=16, metavar="N",
        help="How many devices may come in with the line.  [default: 16]",
    ),
    click.Option(
        ["--expires"], callback=duration_option, default="24h", metavar="TIME",
        help="How long the line is good for, as 30m, 24h or 7d.  [default: 24h]",
    ),
    click.Option(["--find"], is_flag=True, help="No address in the join line: devices look for the broker."),
    click.Option(["--show-line"], is_flag=True, help="The join line, a secret, also with --json."),
)  # fmt: skip


def checked_authority(given: dict[str, Any]) -> str | None:
    """Return the absolute path of --authority, which can be used. Raises ConfigError."""
    from edge_run.devices.mesh.channel import check_authority

    path = str(given["authority"].absolute()) if given["authority"] else None
    check_authority(path)
    return path


def check_free(folder: Path, is_replaced: bool, cluster: str = "", founder: bytes = b"") -> None:
    """Raise ConfigError where this device belongs to another cluster already than `cluster`, which `founder` made."""
    from edge_run.devices.members.cluster import usable_cluster

    known = None if is_replaced else usable_cluster(folder)
    if known is not None and (known.id, known.founder) != (cluster, founder):
        raise ConfigError(f"mesh: this device belongs to cluster {known.id} already; leave it with --replace")
