"""`edge-run mesh init`: a cluster with a secret, and the line that lets others join."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from edge_run.base.errors import ConfigError
from edge_run.base.mesh_status import MeshJoin
from edge_run.base.results import to_json
from edge_run.cli.commands import SettingsCommand
from edge_run.cli.mesh_options import (
    authority_option,
    broker_option,
    check_free,
    checked_authority,
    listen_option,
    mesh_folder,
    port_option,
    replace_option,
)
from edge_run.cli.options import some_settings
from edge_run.cli.terminal import Terminal


@click.command(
    cls=SettingsCommand,
    params=[
        broker_option("An MQTT broker that is there: mqtt://[USER:PASSWORD@]HOST[:PORT], mqtts:// for TLS."),
        authority_option(),
        click.Option(
            ["--serve"],
            metavar="HOST[:PORT]",
            help="Without --broker: where `mesh join` on this device runs one; 0.0.0.0 is for the whole network.  "
            "[default: 127.0.0.1:1883]",
        ),
        click.Option(["--find"], is_flag=True, help="No address in the join line: devices look for the broker."),
        listen_option(),
        port_option(),
        replace_option(),
        click.Option(["--show-line"], is_flag=True, help="The join line, a secret, also with --json."),
        *some_settings("json"),
    ],
    short_help="Make a cluster, and print the line that lets others join.",
)
@click.pass_obj
def init(terminal: Terminal, /, broker: str | None, serve: str | None, find: bool, **given: Any) -> None:
    """Make a cluster: a secret, a broker, and one line to paste on each other device.

    Whoever has the line is a member: treat it as a password. Without --broker this device runs one, as long as
    `edge-run mesh join` runs on it. Needs the `mesh` extra.
    """
    from edge_run.devices.mesh import EVERYWHERE, check_listen, own_addresses
    from edge_run.devices.mesh_cluster import FIND_BROKER, PORT, join_line, new_cluster, parse_broker, write_cluster
    from edge_run.devices.mesh_embedded import parse_place

    if broker is not None and (serve is not None or find):
        raise ConfigError("--broker: names a broker that is there, so --serve and --find go without it")
    check_listen(given["listen"])
    folder, authority, serves = mesh_folder(), checked_authority(given), None
    check_free(folder, "", given["replace"])
    shown = own = broker or ""
    if broker is None:
        host, port = parse_place(serve or "127.0.0.1", PORT)
        serves = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        reached = next(iter(own_addresses(host)), host) if host in EVERYWHERE else host
        own = f"mqtt://127.0.0.1:{port}" if host in EVERYWHERE else f"mqtt://{serves}"
        shown = f"mqtt://[{reached}]:{port}" if ":" in reached else f"mqtt://{reached}:{port}"
    own_link = {"listen": given["listen"], "port": given["port"] or 0}
    cluster = dataclasses.replace(new_cluster(own, serves, authority), **own_link)
    write_cluster(folder, cluster)
    line = join_line(dataclasses.replace(cluster, broker=FIND_BROKER if find else shown))
    place = parse_broker(shown).place
    if given["json"]:
        shown_line = line if given["show_line"] else ""
        terminal.write_json(to_json(MeshJoin(cluster.id, place, str(folder), shown_line)))
        return
    terminal.say(f"Cluster {cluster.id}, broker {place}{', which this device runs' if serves else ''}.")
    is_local = place.startswith(("127.", "localhost", "::1"))
    listen = "" if is_local else " --listen 0.0.0.0"
    if serves:
        terminal.say(f"On this device, first:  edge-run mesh join{'' if given['listen'] else listen}")
        if is_local:
            terminal.say("Only this device reaches it: for others, --serve 0.0.0.0 --replace, or --broker.")
    terminal.say(
        "On each other device, with --models FOLDER or --fetch SIZE where it is to compute; the line is a secret:"
    )
    terminal.write(f"edge-run mesh join {line}{listen}\n")
