"""Opens the engine of a model: on this device, or over the devices of a mesh."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from edge_run.base.config import ModelConfig
from edge_run.base.interrupt import Interrupt
from edge_run.base.mesh import Mesh
from edge_run.runtime.engine.engine import Engine

if TYPE_CHECKING:
    from edge_run.runtime.mesh.engine import MeshOptions


def open_engine(
    path: Path, config: ModelConfig, mesh: MeshOptions | Mesh | str | None, interrupt: Interrupt | None
) -> Engine:
    """Open the model at `path`. interrupt: ends that, and what is computed. Raises as `Engine.open`."""
    if mesh is None:
        return Engine.open(path, config, interrupt=interrupt)
    from edge_run.runtime.mesh.engine import MeshOptions, open_over

    options = mesh if isinstance(mesh, MeshOptions) else MeshOptions(mesh)
    return open_over(path, config, replace(options, interrupt=interrupt or options.interrupt))
