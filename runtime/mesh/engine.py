"""Opens a model over the mesh of this device, or on this device alone where no other device is there."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from edge_run.base.config import ModelConfig
from edge_run.base.errors import ConfigError, option
from edge_run.base.files.folders import mesh_folder
from edge_run.base.mesh import Mesh, MeshOptions, is_worker
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.fetch.exchange import PieceExchange
from edge_run.runtime.llama.holdings import COORDINATOR_RESERVE_BYTES
from edge_run.runtime.mesh.coordinator import LayerCoordinator
from edge_run.runtime.mesh.decoder import MeshDecoder
from edge_run.runtime.mesh.offers import check_width
from edge_run.runtime.mesh.run import MeshRun
from edge_run.runtime.slices.engine import SliceEngine
from edge_run.tiers.gguf import GgufModel, read_gguf

MEET_S = 3.0  # to hear who is there


def open_over(path: Path, config: ModelConfig, options: MeshOptions) -> Engine:
    """Return the open model at `path`, spread over the mesh. Raises as `Engine`, and MeshError, NotTrusted."""
    if config.backend == "llama.cpp":
        raise ConfigError(f"mesh: excludes {option('backend', 'llama.cpp')}, which computes whole models only")
    gguf = read_gguf(path)  # what is wrong with the file is said before others are asked for anything
    mesh = _connect(options) if isinstance(options.mesh, str) else options.mesh
    with ExitStack() as stack:
        if mesh is not options.mesh:
            stack.callback(mesh.close)
        if not _meet(mesh, options.interrupt.check):
            options.say("nobody else is in the mesh: this device runs the model alone until it is opened again")
            return Engine.open(path, config, gguf=gguf, interrupt=options.interrupt)
        return open_mesh_engine(path, config, mesh, options, gguf=gguf, after=stack)


def open_mesh_engine(
    path: Path,
    config: ModelConfig,
    mesh: Mesh,
    options: MeshOptions | None = None,
    *,
    gguf: GgufModel | None = None,
    after: ExitStack | None = None,
) -> Engine:
    """Open the model and spread it over who is in `mesh`. Raises as `Engine.open`, and MeshError.

    gguf: as of `Engine.open`.
    after: what is closed after the model, or here where opening it fails.
    """
    options = options or MeshOptions()
    started_s = time.monotonic()
    with ExitStack() as stack:
        if after:
            stack.push(after.pop_all())
        # It makes the text, which takes more memory later.
        slices = SliceEngine.open(
            path, config, gguf=gguf, least_reserve_bytes=COORDINATOR_RESERVE_BYTES, interrupt=options.interrupt
        )
        stack.callback(slices.close)
        check_width(slices)
        if config.gpu_memory != 0:
            options.say(f"devices of a mesh compute on their processors: {option('gpu_memory')} has no effect")
        if config.packed_file:
            packed = option("packed", str(config.packed_file))
            options.say(f"devices of a mesh read the model itself: {packed} has no effect")
        if config.mesh_activations == "compact":
            options.say("activations are rounded where a link is slow: tokens may differ from those of one device")
        coordinator = LayerCoordinator(mesh, slices, options.takes_any_numerics, options.say)
        exchange = PieceExchange(mesh.link)
        stack.callback(exchange.close)
        exchange.offer(coordinator.fingerprint, [shard.path for shard in slices.gguf.shards])
        exchange.start()
        tail_cells = slices.config.sequences if coordinator.most_in_flight > 1 else 0
        decoder = MeshDecoder(mesh, slices.decoder, MeshRun(mesh, slices, coordinator, options.say), tail_cells)
        stack.callback(decoder.close)
        return Engine(slices.loaded, slices, slices.passes, stack, started_s, decoder)


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

    config = MeshConfig(folder=options.folder or mesh_folder(), broker=str(options.mesh) or None)
    return open_mesh(config, options.interrupt.check)
