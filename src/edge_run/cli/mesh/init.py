"""`edge-run mesh init`: makes a cluster with a list of members, and the line that lets other devices join."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from edge_run.base.errors import ConfigError
from edge_run.base.files.folders import mesh_folder
from edge_run.base.files.whole import file_to_write, writing
from edge_run.cli.mesh.invitation import check_find, show_invitation
from edge_run.cli.mesh.options import (
    AUTHORITY,
    DEVICE_OPTIONS,
    INVITATION_OPTIONS,
    REPLACE,
    broker_option,
    check_free,
    checked_authority,
)
from edge_run.cli.shared.options import some_settings
from edge_run.cli.shared.setting import PATH
from edge_run.cli.shared.settings_command import SettingsCommand
from edge_run.cli.shared.terminal import Terminal


@click.command(
    cls=SettingsCommand,
    params=[
        broker_option("An MQTT broker that is there: mqtt://[USER:PASSWORD@]HOST[:PORT], mqtts:// for TLS."),
        AUTHORITY,
        click.Option(
            ["--acl"], type=PATH, metavar="FILE", help="With --broker: write the access list of a mosquitto to FILE."
        ),
        click.Option(
            ["--serve"],
            metavar="HOST[:PORT]",
            help="Without --broker: where `mesh join` on this device runs one; 0.0.0.0 is for the whole network.  "
            "[default: 127.0.0.1:1883]",
        ),
        *DEVICE_OPTIONS,
        *INVITATION_OPTIONS,
        REPLACE,
        *some_settings("json"),
    ],
    short_help="Make a cluster, and print the line that lets others join.",
)
@click.pass_context
def init(context: click.Context, /, broker: str | None, serve: str | None, **given: Any) -> None:
    """Make a cluster: a list of members that this device signs, a broker, and one line to paste on each other device.

    The line lets devices in while `edge-run mesh join` runs here: treat it as a password. Without --broker this device
    runs one, as long as `mesh join` runs on it. Needs the `mesh` extra.
    """
    from edge_run.devices.link.hosts import parse_place, place_text
    from edge_run.devices.members.cluster import PORT, Cluster, found_cluster
    from edge_run.devices.members.identity import device_key
    from edge_run.devices.members.list_file import keep_cluster
    from edge_run.devices.mesh.opening import EVERYWHERE, check_listen

    terminal: Terminal = context.obj
    if broker is not None and (serve is not None or given["find"]):
        if context.get_parameter_source("broker") is ParameterSource.ENVIRONMENT:
            broker = None  # flags count before the variable
        else:
            raise ConfigError("--broker: names a broker that is there, so --serve and --find go without it")
    acl: Path | None = given["acl"]
    if acl and broker is None:
        raise ConfigError("--acl: is for a mosquitto that is there; name it with --broker")
    if acl and file_to_write(acl, f"--acl {acl}").exists() and acl.stat().st_size:
        raise ConfigError(f"--acl {acl}: exists, and is no empty file; choose another name")
    check_listen(given["listen"], given["port"] or 0)
    folder, authority, serves = mesh_folder(), checked_authority(given), None
    if authority and broker is None:
        raise ConfigError("--authority: is for a TLS broker that is there; name it with --broker")
    check_free(folder, given["replace"])
    own = broker or ""
    if broker is None:
        host, port = parse_place(serve or "127.0.0.1", PORT)
        serves = place_text(host, port)
        own = f"mqtt://{place_text(EVERYWHERE.get(host, host), port)}"
        if given["find"]:
            check_find(serves)
    device = device_key(folder)
    name = given["name"] or socket.gethostname() or device.node
    cluster = found_cluster(device, name, own, serves, authority)
    cluster = dataclasses.replace(cluster, listen=given["listen"], port=given["port"] or 0)

    def founded(_: Cluster | None) -> Cluster:
        check_free(folder, given["replace"])  # another process may have joined one meanwhile
        return cluster

    with _acl_written(acl, own, cluster.id) if acl else contextlib.nullcontext():
        keep_cluster(folder, founded)
    show_invitation(terminal, folder, given, is_new=True)


@contextlib.contextmanager
def _acl_written(path: Path, broker: str, cluster: str) -> Iterator[None]:
    """Write what a mosquitto lets members and guests do; the file is empty where the block fails. Raises TierReadError.

    A file that is there keeps its owner and mode, which may have been prepared for mosquitto.
    """
    from edge_run.devices.broker.access import mosquitto_acl
    from edge_run.devices.members.cluster import parse_broker

    with writing(f"--acl {path}"):
        try:
            path.write_text(mosquitto_acl(cluster, parse_broker(broker).user))
            yield
        except BaseException:
            with contextlib.suppress(OSError):
                path.write_text("")
            raise
