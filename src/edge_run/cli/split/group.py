"""`edge-run split …`: networks that see, cut between a device and its server."""

from __future__ import annotations

from edge_run.cli.shared.settings_command import CommandGroup

_COMMANDS = ("inspect", "train", "serve", "run", "bench", "patch")

split = CommandGroup(
    "split",
    {name: f"edge_run.cli.split.{name}" for name in _COMMANDS},
    help="Cut an ONNX network between a device and its server.",
)
