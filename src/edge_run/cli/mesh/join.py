"""`edge-run mesh join`: this device takes part, until Ctrl-C."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edge_run.base.errors import ConfigError, MeshError
from edge_run.base.files.folders import mesh_folder
from edge_run.base.interrupt import Interrupt
from edge_run.base.mesh import Joined, Lost, MeshEvent
from edge_run.cli.mesh.options import AUTHORITY, DEVICE_OPTIONS, REPLACE, broker_option, check_free, checked_authority
from edge_run.cli.shared.options import some_settings
from edge_run.cli.shared.process import cleaned_up
from edge_run.cli.shared.setting import PATH, size_option
from edge_run.cli.shared.settings_command import SettingsCommand
from edge_run.cli.shared.terminal import Terminal

if TYPE_CHECKING:
    from edge_run.devices.members.cluster import Cluster, Invited
    from edge_run.devices.mesh.node import LocalNode

MEASURE_S, COME_IN_S, LAST_WORD_S = 10.0, 30.0, 1.0
INVITED_S = 60.0  # after which the broker is told anew whose invitations have ended
MOST_LETTERS = 1 << 16


@click.command(
    cls=SettingsCommand,
    params=[
        click.Argument(["line"], metavar="[LINE]", required=False),
        click.Option(
            ["--models"], multiple=True, type=PATH, metavar="PATH",
            help="A GGUF file, or a folder of them, that this device may run; may be repeated.",
        ),
        click.Option(
            ["--fetch"], callback=size_option, metavar="SIZE",
            help="Disk for layers of models that it lacks: it fetches those that it computes from the others.  "
            "[default: none]",
        ),
        *DEVICE_OPTIONS,
        broker_option("Another address of the broker than the join line's; is remembered."),
        AUTHORITY,
        click.Option(["--home-assistant"], is_flag=True, help="Show it to Home Assistant, by the same broker."),
        REPLACE,
        *some_settings("memory", "cache_dir", "kv_spill", "verbose"),
    ],
    short_help="Take part, until Ctrl-C; LINE is what `mesh init` or `mesh invite` printed.",
)  # fmt: skip
@click.pass_context
def join(context: click.Context, /, line: str | None, models: tuple[Path, ...], **given: Any) -> None:
    """Take part in a mesh, until Ctrl-C. LINE is needed once; `-` reads it from standard input.

    On the device that runs the broker, the broker runs as long as this does. Needs the `mesh` extra.
    """
    from edge_run.cli.shared.settings import model_config, report
    from edge_run.devices.broker.access import HOME
    from edge_run.devices.members.identity import device_key
    from edge_run.devices.mesh.opening import MeshConfig, check_listen, open_mesh
    from edge_run.devices.mesh.serving import access_of, home_password, serving

    terminal: Terminal = context.obj
    config = model_config(context, given)
    report(context, terminal, config)
    check_listen(given["listen"], given["port"] or 0)
    for path in models:
        if not path.exists():
            raise ConfigError(f"--models {path}: is not there")
    folder = mesh_folder()
    cluster = _cluster(line, folder, given, terminal)
    device = device_key(folder)
    with contextlib.ExitStack() as stack:
        broker = stack.enter_context(serving(cluster, device))
        settings = MeshConfig(folder, name=given["name"] or "", port=cluster.port)
        node = open_mesh(settings)
        stack.callback(node.close)
        stack.enter_context(cleaned_up(node.close))
        if given["home_assistant"]:
            node.show_to_home_assistant()
            if cluster.serves:
                password = home_password(cluster, device)
                terminal.say(f"Home Assistant connects to this device's broker as user {HOME}, password {password}")
        fetch_bytes = given["fetch"] or 0
        if models or fetch_bytes:
            from edge_run.runtime.worker.worker import Worker

            worker = Worker(node, models, config, fetch_bytes=fetch_bytes)
            stack.callback(worker.close)
            worker.start()

        def let_in(cluster: Cluster) -> None:
            """Let the broker go by the list of `cluster`; who was removed hears of that, and is cut off then."""
            if broker is not None and (access := access_of(cluster, device)) != broker.access:
                broker.set_access(access.widened(broker.access))
                node.wait_list_heard(timeout_s=LAST_WORD_S)
                broker.set_access(access)

        interrupt = Interrupt()
        with interrupt.hearing_signals():
            places = ", ".join(str(place).removeprefix("tcp://") for place in node.places)
            terminal.write(f"joined cluster {cluster.id} as node {node.node}; data link at {places}; Ctrl-C leaves\n")
            if not models and not fetch_bytes:
                terminal.say("No --models and no --fetch: this device is seen, and computes nothing for others.")
            _take_part(node, terminal, cluster, let_in, interrupt.check)


def _cluster(line: str | None, folder: Path, given: dict[str, Any], terminal: Terminal) -> Cluster:
    """Return the cluster to join, and keep it: that of `line`, or the one that is known already, with what is new."""
    from edge_run.devices.members.cluster import parse_join_line
    from edge_run.devices.members.list_file import keep_cluster
    from edge_run.devices.mesh.opening import known_cluster

    if line is None:
        cluster = known_cluster(folder)
    else:
        pasted = line
        if line == "-":
            pasted = sys.stdin.readline(MOST_LETTERS) if sys.stdin is not None else ""
        invited = parse_join_line(pasted)
        check_free(folder, given["replace"], invited.cluster, invited.founder)
        cluster = _come_in(invited, folder, given, terminal)
    new: dict[str, Any] = {name: given[name] for name in ("broker", "listen") if given[name]}
    if given["authority"]:
        new["authority"] = checked_authority(given)
    if given["port"] is not None:
        new["port"] = given["port"]

    def with_new(known: Cluster | None) -> Cluster:
        """Return the cluster with what is new; what only this device knows stays, and so does a list that is newer."""
        if known is None or (known.id, known.founder) != (cluster.id, cluster.founder):
            # Another process may have joined one meanwhile.
            check_free(folder, given["replace"], cluster.id, cluster.founder)
            return dataclasses.replace(cluster, **new)
        newest = known if known.listed.order > cluster.listed.order else cluster
        broker = known.broker if known.serves else cluster.broker
        kept = dataclasses.replace(known, secret=newest.secret, broker=broker, listed=newest.listed)
        return dataclasses.replace(kept, **new)

    return keep_cluster(folder, with_new)


def _come_in(invited: Invited, folder: Path, given: dict[str, Any], terminal: Terminal) -> Cluster:
    """Return the cluster that an invitation lets this device into; it may be a member already."""
    from edge_run.devices.members.cluster import usable_cluster
    from edge_run.devices.members.identity import device_key
    from edge_run.devices.mesh.entry import come_in

    known = usable_cluster(folder)
    is_known = known is not None and (known.id, known.founder) == (invited.cluster, invited.founder)
    if known is not None and is_known and known.admits(device_key(folder).public_key):
        return dataclasses.replace(known, broker=given["broker"] or invited.broker)
    if given["broker"]:
        invited = dataclasses.replace(invited, broker=given["broker"])
    terminal.show(f"asking cluster {invited.cluster} to let this device in")
    try:
        name = given["name"] or socket.gethostname()
        return come_in(folder, invited, name, timeout_s=COME_IN_S, authority=checked_authority(given))
    finally:
        terminal.erase()


def _take_part(
    node: LocalNode,
    terminal: Terminal,
    cluster: Cluster,
    let_in: Callable[[Cluster], None],
    check: Callable[[], None],
) -> None:
    """Say what happens, and measure the link to whoever comes, until `check` raises. Raises NotTrusted when sent away.

    cluster: with the list of members that others were let in by so far.
    """
    names: dict[str, str] = {}
    was_connected, told_s = True, time.monotonic()
    while True:
        for event in node.wait(timeout_s=1.0, check=check) or [None]:
            # Before each measurement, which takes seconds.
            if node.cluster.version != cluster.version or time.monotonic() - told_s > INVITED_S:
                cluster, told_s = node.cluster, time.monotonic()
                let_in(cluster)
                node.check_member()
            _tell(event, names, terminal)
            if isinstance(event, Joined):
                with contextlib.suppress(MeshError):  # the doctor's business
                    node.link.measure(event.member.node, timeout_s=MEASURE_S, check=check)
                node.report_links()
        if node.is_connected != was_connected:
            was_connected = node.is_connected
            terminal.say("the broker is back" if was_connected else f"{node.problem}; trying again")


def _tell(event: MeshEvent | None, names: dict[str, str], terminal: Terminal) -> None:
    if isinstance(event, Joined) and event.member.node not in names:
        names[event.member.node] = f"{event.member.name} ({event.member.node})"  # a host's name may be others' as well
        terminal.say(f"+ {names[event.member.node]}")
    elif isinstance(event, Lost) and event.node in names:
        terminal.say(f"- {names.pop(event.node)}: {event.why}")
