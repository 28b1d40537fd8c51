"""`edge-run split …`: networks that see, cut between a device and its server."""

from __future__ import annotations

from edge_run.cli.shared.settings_command import CommandGroup
from edge_run.cli.split.bench import bench
from edge_run.cli.split.inspect import inspect
from edge_run.cli.split.patch import patch
from edge_run.cli.split.run import run
from edge_run.cli.split.serve import serve
from edge_run.cli.split.train import train

split = CommandGroup(
    "split", "Cut an ONNX network between a device and its server.", (inspect, train, serve, run, bench, patch)
)
