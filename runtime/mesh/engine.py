"""An engine whose model is spread over the devices of a mesh, this one among them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from edge_run.base.config import ModelConfig
from edge_run.base.mesh import Mesh
from edge_run.base.profile import DeviceProfile
from edge_run.base.results import MeshUse
from edge_run.runtime.fetch.exchange import PieceExchange
from edge_run.runtime.llama.holdings import RESERVE_BYTES
from edge_run.runtime.mesh.coordinator import Spread
from edge_run.runtime.mesh.decoder import MeshDecoder
from edge_run.runtime.slices.engine import SliceEngine
from edge_run.tiers.gguf import GgufModel
from edge_run.tiers.territory import CHUNK_BYTES

logger = logging.getLogger(__name__)


class MeshEngine(SliceEngine):
    """An open model on several devices."""

    least_reserve_bytes = RESERVE_BYTES  # it makes the text

    def __init__(
        self,
        path: Path,
        config: ModelConfig,
        mesh: Mesh,
        *,
        takes_any_numerics: bool = False,
        say: Callable[[str], None] = logger.warning,
        check: Callable[[], None] = lambda: None,
        chunk_bytes: int = CHUNK_BYTES,
        gguf: GgufModel | None = None,
    ) -> None:
        """Open the model and spread it over who is there. say, check: as of `MeshOptions`; gguf: as of `Engine`."""
        self._over_all: MeshDecoder | None = None
        super().__init__(path, config, chunk_bytes, gguf=gguf)
        if config.mesh_states == "compact":
            say("states are rounded where a link is slow: tokens may differ from those of one device")
        try:
            spread = Spread(mesh, self, takes_any_numerics, say, check)
            exchange = PieceExchange(mesh.link)
            self._stack.callback(exchange.close)
            exchange.offer(spread.fingerprint, [shard.path for shard in self.gguf.shards])
            exchange.start()
            self._over_all = MeshDecoder(mesh, self, spread, say)
        except BaseException:
            self.close()
            raise

    def own(self, mesh: Mesh) -> None:
        """Close `mesh` together with the model."""
        self._stack.callback(mesh.close)

    @property
    def front(self) -> MeshDecoder:
        """The decoder that generating goes through."""
        assert self._over_all is not None
        return self._over_all

    @property
    def mesh_use(self) -> MeshUse | None:
        """How the model is spread over devices."""
        return self._over_all.use if self._over_all else None

    def expect(self, profile: DeviceProfile) -> None:
        """Tell progress in shares of the work: what other devices take of it is not known beforehand."""

    def close(self) -> None:
        """Let the other devices go, and free everything. Idempotent."""
        over_all, self._over_all = self._over_all, None
        try:
            if over_all:
                over_all.close()
        finally:
            super().close()
