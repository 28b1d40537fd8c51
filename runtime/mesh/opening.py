"""Opens a model over the mesh of this device, or on this device alone where no other device is there."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from edge_run.base.config import ModelConfig
from edge_run.base.errors import ConfigError
from edge_run.base.folders import mesh_folder
from edge_run.base.mesh import Mesh, is_worker
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.mesh.engine import RunOptions, open_mesh_engine
from edge_run.tiers.gguf import read_gguf

MEET_S = 3.0  # to hear who is there


@dataclass(frozen=True, slots=True)
class MeshOptions:
    """How a run uses a mesh.

    mesh: an open one, which stays open, or the address of its broker; an empty one is what this device joined with.
    folder: where this device's key and cluster are kept; None is where `edge-run mesh` keeps them.
    run: how the run goes.
    """

    mesh: Mesh | str
    folder: Path | None = None
    run: RunOptions = field(default_factory=RunOptions)


def open_over(path: Path, config: ModelConfig, options: MeshOptions) -> Engine:
    """Return the open model at `path`, spread over the mesh. Raises as `Engine`, and MeshError, NotTrusted."""
    if config.backend == "llama.cpp":
        raise ConfigError("mesh: excludes --backend llama.cpp, which computes whole models only")
    gguf = read_gguf(path)  # what is wrong with the file is said before others are asked for anything
    mesh = _connect(options) if isinstance(options.mesh, str) else options.mesh
    with ExitStack() as stack:
        if mesh is not options.mesh:
            stack.callback(mesh.close)
        if not _meet(mesh, options.run.interrupt.check):
            options.run.say("nobody else is in the mesh: this device runs the model alone")
            return Engine.open(path, config, gguf=gguf, interrupt=options.run.interrupt)
        return open_mesh_engine(path, config, mesh, options.run, gguf=gguf, after=stack)


def _meet(mesh: Mesh, check: Callable[[], None]) -> bool:
    """Return whether there is another device that computes, having waited a little for it."""
    until = time.monotonic() + MEET_S
    while True:
        check()
        if any(is_worker(member) for member in mesh.members() if member.node != mesh.node):
            return True
        left = until - time.monotonic()
        if left <= 0:
            return False
        mesh.wait(timeout_s=min(left, 0.1))


def _connect(options: MeshOptions) -> Mesh:
    from edge_run.devices.mesh.opening import MeshConfig, open_mesh

    return open_mesh(MeshConfig(folder=options.folder or mesh_folder(), broker=str(options.mesh) or None))
