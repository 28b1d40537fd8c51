"""Shared by the coordinators of the benchmarks of meshes: a place in a mesh whose workers are there."""

from __future__ import annotations

import time
from pathlib import Path

from edge_run.base.mesh import is_worker
from edge_run.devices.mesh.node import LocalNode
from edge_run.devices.mesh.opening import MeshConfig, open_mesh

WITHIN_S = 120


def joined(folder: Path, n_workers: int) -> LocalNode:
    """Take part in the mesh of `folder`, and wait until so many workers are seen there."""
    mesh = open_mesh(MeshConfig(folder=folder, name="here"))
    until = time.monotonic() + WITHIN_S
    while sum(is_worker(member) for member in mesh.members()) < n_workers:
        assert time.monotonic() < until, "workers are missing"
        mesh.wait(timeout_s=0.1)
    return mesh
