"""`edge-run mesh …`: several devices, one model."""

from __future__ import annotations

from edge_run.cli.shared.settings_command import CommandGroup

_COMMANDS = ("init", "join", "status", "doctor", "invite")
_CHANGES = ("members", "remove", "role", "rotate", "hand-on")

mesh = CommandGroup(
    "mesh",
    {name: f"edge_run.cli.mesh.{name}" for name in _COMMANDS} | dict.fromkeys(_CHANGES, "edge_run.cli.mesh.change"),
    help="Let several devices run one model together.",
)
