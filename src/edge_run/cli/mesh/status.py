"""`edge-run mesh status`: shows the devices, what each has, the layers that it holds, and the measured links."""

from __future__ import annotations

from typing import Any

import click

from edge_run.base.fields import MOST_RATE, Document, JsonValue, is_number
from edge_run.base.files.folders import mesh_folder
from edge_run.base.mesh import names_apart
from edge_run.base.mesh_status import MeshMember, MeshStatus
from edge_run.base.units import format_count, format_size
from edge_run.cli.mesh.options import OTHER_BROKER
from edge_run.cli.shared.options import some_settings
from edge_run.cli.shared.printable import one_line
from edge_run.cli.shared.settings_command import SettingsCommand
from edge_run.cli.shared.tables import align
from edge_run.cli.shared.terminal import Terminal


@click.command(
    cls=SettingsCommand,
    params=[OTHER_BROKER, *some_settings("json")],
    short_help="Show who is there, what each has, and what it does.",
)
@click.pass_obj
def status(terminal: Terminal, /, broker: str | None, **given: Any) -> None:
    """Show the devices of the mesh: what each has, the layers it holds, how fast the links between them are.

    Takes two seconds: whoever is present answers. Needs the `mesh` extra.
    """
    from edge_run.devices.mesh.opening import MeshConfig, known_cluster, open_mesh
    from edge_run.devices.mesh.watch import look

    folder = mesh_folder()
    cluster = known_cluster(folder)
    terminal.show("looking who is there")
    node = open_mesh(MeshConfig(folder, broker, is_watching=True))
    try:
        found = look(node, cluster)
    finally:
        node.close()
    terminal.write_result(found, given["json"], describe)


def describe(found: MeshStatus) -> str:
    """Return `found` as text: a device on a line, then the links."""
    names = names_apart(found.members)
    count = len(found.members)
    lines = [f"cluster {found.cluster}, broker {found.broker}: {format_count(count, 'device')}"]
    if found.coordinator:
        model = found.plan.get("model", "a model")
        lines[0] += f"; {names.get(found.coordinator, found.coordinator)} runs {model}"
    lines[0] = one_line(lines[0])
    if found.members:
        head = ("device", "id", "has", "layers", "does")
        lines += ["", *align([head, *map(_row, found.members)])]
    links = [
        (
            f"{names[member.node]} to {names.get(link.node, link.node)}",
            link.place.removeprefix("tcp://"),
            f"{link.round_trip_s * 1e3:.2f} ms",
            f"{link.bytes_per_s / 1e6:,.3g} MB/s",
        )
        for member in found.members
        for link in member.links
    ]
    if links:
        lines += ["", *align([("link", "address", "there and back", "bulk"), *links])]
    return "\n".join(lines) + "\n"


def _row(member: MeshMember) -> tuple[str, ...]:
    layers = ", ".join(f"{first}-{last}" if first != last else f"{first}" for first, last in member.layers)
    has = ", ".join(_words(member.capabilities))
    does = ", ".join(_words(member.load)) or "-"
    star = " *" if member.is_coordinator else ""
    return (member.name + star, member.node, has or "-", layers or "-", does)


def _words(document: Document) -> list[str]:
    """Return the simple values of a document in words, as many as are worth a line."""
    return [f"{key.removesuffix('_bytes')} {_word(key, value)}" for key, value in sorted(document.items())][:6]


def _word(key: str, value: JsonValue) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if not is_number(value, -MOST_RATE, MOST_RATE):
            return "?"
        is_size = key.endswith("_bytes") and isinstance(value, int)
        return format_size(value) if is_size else f"{value:.3g}" if isinstance(value, float) else str(value)
    if isinstance(value, (dict, list, tuple)):
        return str(len(value))
    return str(value)
