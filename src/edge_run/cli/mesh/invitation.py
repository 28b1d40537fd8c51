"""Makes and shows an invitation, for `edge-run mesh init` and `edge-run mesh invite`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from edge_run.base.errors import ConfigError
from edge_run.base.mesh_status import MeshJoin
from edge_run.base.strict_json import to_json
from edge_run.cli.shared.terminal import Terminal


def check_find(serves: str | None) -> None:
    """Raise ConfigError where nobody could find the broker that this device runs. serves: as of `Cluster`."""
    from edge_run.devices.link.hosts import is_loopback, parse_place
    from edge_run.devices.members.cluster import PORT

    if serves is not None and is_loopback(parse_place(serves, PORT)[0]):
        raise ConfigError(
            f"--find: a broker that only this device reaches ({serves}) is not announced; make the cluster with "
            "--serve 0.0.0.0, or leave out --find"
        )


def show_invitation(terminal: Terminal, folder: Path, given: dict[str, Any], *, is_new: bool) -> None:
    """Make an invitation, and print its line. is_new: the cluster is, so that nobody is there who could be told."""
    from edge_run.devices.link.hosts import is_loopback, place_text
    from edge_run.devices.members.cluster import FIND_BROKER, invitation_line, parse_broker
    from edge_run.devices.members.list_file import change_list
    from edge_run.devices.mesh.changes import invited_to, make_change, new_invitation
    from edge_run.devices.mesh.opening import known_cluster, shown_broker

    known = known_cluster(folder)
    if given["find"] and not known.listed.charter.broker_key:
        raise ConfigError("--find: only edge-run's own broker is found so, and this cluster has another; leave it out")
    if given["find"]:
        check_find(known.serves)
    expires_s = int(time.time()) + given["expires"]
    invitation, seed = new_invitation(given["role"], given["uses"], expires_s)
    if is_new:
        cluster, untold = change_list(folder, lambda editor: editor.invite(invitation, time.time())), ""
    else:
        cluster, untold = make_change(
            folder,
            lambda editor: editor.invite(invitation, time.time()),
            lambda listed: listed.invitation(invitation.key) is not None,
        )
    shown = shown_broker(cluster)
    line = invitation_line(invited_to(cluster, FIND_BROKER if given["find"] else shown, seed))
    address = None if shown == FIND_BROKER else parse_broker(shown)
    place = place_text(address.host, address.port) if address else "found on the network"
    if given["json"]:
        shown_line = line if given["show_line"] else ""
        made = MeshJoin(cluster.id, place, str(folder), shown_line, given["role"], given["uses"], expires_s)
        terminal.write_json(to_json(made))
        return
    is_local = address is not None and is_loopback(address.host)
    listen = "" if is_local else " --listen 0.0.0.0"
    if is_new:
        terminal.say(f"Cluster {cluster.id}, broker {place}{', which this device runs' if cluster.serves else ''}.")
        until = "the mesh is used, as the broker runs in it" if cluster.serves else "others come in"
        terminal.say(f"On this device, first, and as long as {until}:  edge-run mesh join{listen}")
        if is_local:
            other = (
                "--serve 0.0.0.0 --replace, or --broker"
                if cluster.serves
                else "--broker with its name there, and --replace"
            )
            terminal.say(f"Only this device reaches it: for others, {other}.")
    elif untold:
        terminal.say(f"Nobody was told ({untold}): devices come in once `edge-run mesh join` runs here.")
    many = f"{given['uses']} devices come" if given["uses"] > 1 else "one device comes"
    terminal.say(
        f"With this line, a secret, {many} in until {time.strftime('%d %b %H:%M', time.localtime(expires_s))}, "
    )
    terminal.say(f"with the role {given['role']}; with --models FOLDER or --fetch SIZE where one is to compute:")
    terminal.write(f"edge-run mesh join {line}{listen}\n")
