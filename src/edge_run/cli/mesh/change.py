"""`edge-run mesh members`, `remove`, `role`, `rotate` and `hand-on`: the list of members, and changes to it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from edge_run.base.errors import ConfigError
from edge_run.base.files.folders import mesh_folder
from edge_run.base.mesh_status import ClusterMember, ClusterMembers, OpenInvitation
from edge_run.cli.mesh.options import ROLES
from edge_run.cli.shared.options import some_settings
from edge_run.cli.shared.settings_command import SettingsCommand
from edge_run.cli.shared.tables import align
from edge_run.cli.shared.terminal import Terminal

if TYPE_CHECKING:
    from edge_run.devices.members.list_changes import ListEditor
    from edge_run.devices.members.member_list import MemberList

_NODE = click.Argument(["node"], metavar="NODE")
_WITH_BROKER = click.Option(
    ["--with-broker"], is_flag=True, help="Also a device that runs the cluster's broker, which ends with it."
)


@click.command(cls=SettingsCommand, params=[*some_settings("json")], short_help="Show who is a member, in which role.")
@click.pass_obj
def members(terminal: Terminal, /, **given: Any) -> None:
    """Show the list of members as this device knows it: who may take part, in which role, and open invitations."""
    from edge_run.devices.mesh.opening import known_cluster

    listed = known_cluster(mesh_folder()).listed
    found = ClusterMembers(
        listed.charter.cluster,
        listed.version[:3],
        tuple(
            ClusterMember(one.node, one.name, "founder" if one.key == listed.charter.founder else one.role)
            for one in listed.roll.members
        ),
        listed.roll.removed,
        tuple(
            OpenInvitation(one.role, one.uses, one.expires_s)
            for one in listed.roll.invitations
            if one.is_open(time.time())
        ),
    )
    terminal.write_result(found, given["json"], describe)


def describe(found: ClusterMembers) -> str:
    """Return the members as a table, and the open invitations below, each on a line."""
    rows = [(one.name, one.node, one.role) for one in found.members]
    lines = [f"cluster {found.cluster}", "", *align([("device", "id", "role"), *rows])]
    lines += [
        f"invitation for {one.uses} more, role {one.role}, until "
        f"{time.strftime('%d %b %H:%M', time.localtime(one.expires_s))}"
        for one in found.invitations
    ]
    return "\n".join(lines) + "\n"


@click.command(cls=SettingsCommand, params=[_NODE, _WITH_BROKER], short_help="Send a device away, for good.")
@click.pass_obj
def remove(terminal: Terminal, /, node: str, with_broker: bool) -> None:
    """Send the device NODE (its id, or its name) away: all others refuse its key from now on, and cut its links.

    What it fetched stays with it. Lines that are out let nobody in any more: it may know them. Only on a device that
    leads; a device that leads is removed on the founder's.
    """

    def change(editor: ListEditor, member: str) -> MemberList:
        listed = editor.listed
        if not _has(listed, member):
            return listed
        changed, found = editor.remove(member), listed.find(member)
        if found.seal_key == listed.charter.broker_key and not with_broker:
            raise ConfigError(
                f"{found.name}: runs the broker of this cluster, which ends with it, and then devices no longer find "
                "each other; first give each of the others another broker (`edge-run mesh join --broker mqtt://HOST`), "
                "then remove this one with --with-broker"
            )
        return changed

    gone = _change(terminal, change, lambda listed, member: not _has(listed, member), must_have=node)
    terminal.say(f"{gone} is no member any more. Lines given out before let nobody in now: `edge-run mesh invite`.")


@click.command(
    cls=SettingsCommand,
    params=[_NODE, click.Argument(["role"], type=ROLES)],
    short_help="Say what a device may do.",
)
@click.pass_obj
def role(terminal: Terminal, /, node: str, role: Any) -> None:
    """Let the device NODE compute for others (compute), run models on them, too (use), or invite and remove (lead).

    Only on a device that leads; whether a device leads is said on the founder's.
    """
    name = _change(
        terminal,
        lambda editor, member: editor.change_role(member, role),
        lambda listed, member: listed.find(member).role == role,
        must_have=node,
    )
    terminal.say(f"{name} has the role {role}.")


@click.command(cls=SettingsCommand, params=[], short_help="Give the cluster another secret.")
@click.pass_obj
def rotate(terminal: Terminal, /) -> None:
    """Give the cluster another secret. Members have it at once, or when they are next there; nobody need be visited."""
    fresh = secrets.token_bytes(32)
    before: list[int] = []

    def change(editor: ListEditor, _: str) -> MemberList:
        before.append(editor.listed.roll.generation)
        return editor.rotate(fresh)

    _change(terminal, change, lambda listed, _: listed.roll.generation != before[-1])
    terminal.say("The cluster has another secret.")


@click.command("hand-on", cls=SettingsCommand, params=[_NODE], short_help="Make another device the founder.")
@click.pass_obj
def hand_on(terminal: Terminal, /, node: str) -> None:
    """Make the device NODE the founder, as soon as `edge-run mesh join` runs there. Only on the founder's device.

    This cannot be taken back, not by removing NODE either: hand the cluster on to a device that is in good hands.
    """
    name = _change(
        terminal,
        lambda editor, member: editor.hand_on(member),
        lambda listed, member: listed.find(member).key in (listed.charter.heir, listed.charter.founder),
        must_have=node,
    )
    terminal.say(f"The cluster is handed on to {name}, which is the founder as soon as it is there.")


def _change(
    terminal: Terminal,
    change: Callable[[ListEditor, str], MemberList],
    is_made: Callable[[MemberList, str], bool],
    must_have: str = "",
) -> str:
    """Make a change, and return in words whom it is about. Raises NotTrusted, MeshError.

    must_have: the id or the name of the member that it is about, whose id `change` and `is_made` are given.
    """
    from edge_run.devices.mesh.changes import make_change
    from edge_run.devices.mesh.opening import known_cluster

    folder = mesh_folder()
    name = node = ""
    if must_have:
        member = known_cluster(folder).listed.find(must_have)
        name, node = f"{member.name} ({member.node})", member.node
    terminal.show("telling the others")
    _, untold = make_change(folder, lambda editor: change(editor, node), lambda listed: is_made(listed, node))
    if untold:
        terminal.say(f"Nobody was told yet ({untold}): the others hear of it once `edge-run mesh join` runs here.")
    return name


def _has(listed: MemberList, node: str) -> bool:
    return any(one.node == node for one in listed.roll.members)
