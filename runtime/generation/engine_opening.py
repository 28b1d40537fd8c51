"""Opens the engine of a model: on this device, or over the devices of a mesh."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from edge_run.base.config import ModelConfig
from edge_run.base.interrupt import Interrupt
from edge_run.base.mesh import Mesh, MeshOptions
from edge_run.runtime.engine.engine import Engine


def open_engine(
    path: Path, config: ModelConfig, mesh: MeshOptions | Mesh | str | None, interrupt: Interrupt | None
) -> Engine:
    """Open the model at `path`. interrupt: ends that, and what is computed. Raises as `Engine.open`."""
    if mesh is None:
        return Engine.open(path, config, interrupt=interrupt)
    options = mesh if isinstance(mesh, MeshOptions) else MeshOptions(mesh)
    from edge_run.runtime.mesh.engine import open_over

    return open_over(path, config, replace(options, interrupt=interrupt or options.interrupt))
