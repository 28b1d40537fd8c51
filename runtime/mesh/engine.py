"""Opens a model that is spread over the devices of a mesh, this device among them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from edge_run.base.config import ModelConfig
from edge_run.base.interrupt import Interrupt
from edge_run.base.mesh import Mesh
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.fetch.exchange import PieceExchange
from edge_run.runtime.llama.holdings import RESERVE_BYTES
from edge_run.runtime.mesh.coordinator import LayerCoordinator
from edge_run.runtime.mesh.decoder import MeshDecoder
from edge_run.runtime.mesh.run import MeshRun
from edge_run.runtime.slices.engine import SliceEngine
from edge_run.tiers.gguf import GgufModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How a run over a mesh goes.

    takes_any_numerics: devices whose kernels may compute other bits take part too.
    say: is told what the user should see.
    interrupt: of the model that is opened; it ends the opening too, which takes long where a device fetches its layers.
    """

    takes_any_numerics: bool = False
    say: Callable[[str], None] = logger.warning
    interrupt: Interrupt = field(default_factory=Interrupt)


def open_mesh_engine(
    path: Path,
    config: ModelConfig,
    mesh: Mesh,
    options: RunOptions | None = None,
    *,
    gguf: GgufModel | None = None,
    after: ExitStack | None = None,
) -> Engine:
    """Open the model and spread it over who is there. Raises as `Engine.open`, and MeshError.

    gguf: as of `Engine.open`.
    after: what is closed after the model, or here where opening it fails.
    """
    options = options or RunOptions()
    started_s = time.monotonic()
    with ExitStack() as stack:
        if after:
            stack.push(after.pop_all())
        # It makes the text, which takes more memory later.
        slices = SliceEngine.open(
            path, config, gguf=gguf, least_reserve_bytes=RESERVE_BYTES, interrupt=options.interrupt
        )
        stack.callback(slices.close)
        if config.mesh_activations == "compact":
            options.say("activations are rounded where a link is slow: tokens may differ from those of one device")
        coordinator = LayerCoordinator(mesh, slices, options.takes_any_numerics, options.say)
        exchange = PieceExchange(mesh.link)
        stack.callback(exchange.close)
        exchange.offer(coordinator.fingerprint, [shard.path for shard in slices.gguf.shards])
        exchange.start()
        decoder = MeshDecoder(mesh, slices, MeshRun(mesh, slices, coordinator, options.say))
        stack.callback(decoder.close)
        return Engine(slices.loaded, slices, slices.passes, stack, started_s, decoder)
