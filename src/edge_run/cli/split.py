"""`edge-run split …`: networks that see, cut between a device and its server."""

from __future__ import annotations

from edge_run.cli.commands import CommandGroup
from edge_run.cli.split_bench import bench
from edge_run.cli.split_inspect import inspect
from edge_run.cli.split_patch import patch
from edge_run.cli.split_run import run
from edge_run.cli.split_serve import serve
from edge_run.cli.split_train import train

split = CommandGroup(
    "split", "Cut an ONNX network between a device and its server.", (inspect, train, serve, run, bench, patch)
)
