"""The graphs of a model's passes, by shape, and the units that they are cut into, to be spread over devices."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence

from edge_run.base.errors import NotSupported
from edge_run.base.protocols import BatchToken
from edge_run.partition.plan import frames_in_use
from edge_run.runtime.decoding.decoder import LocalDecoder
from edge_run.runtime.decoding.driver import ONE_TOKEN, Driver, PassShape
from edge_run.runtime.graph.nodes import GraphMap
from edge_run.runtime.graph.segments import chunks_of, cut_into_segments
from edge_run.runtime.graph.units import Layout, lay_out
from edge_run.runtime.slices.pieces import pieces_read
from edge_run.runtime.slices.slice import Share, own_part
from edge_run.tiers.address_space import AddressSpace
from edge_run.tiers.pieces import Pieces

MOST_MAPS = 32  # graphs of passes of different shapes; a model has a handful


class SliceMaps:
    """The maps of graphs, made with a decoder that computes nothing meanwhile; the first one is of one token."""

    def __init__(self, decoder: LocalDecoder, driver: Driver, address_space: AddressSpace) -> None:
        self._decoder, self._driver, self._address_space = decoder, driver, address_space
        self._width = decoder.capabilities.micro_batch_tokens
        graph = decoder.map_graph(ONE_TOKEN)
        self.layout = lay_out(graph, driver.take_flow())
        self._maps: dict[PassShape, tuple[GraphMap, Layout]] = {ONE_TOKEN: (graph, self.layout)}

    def __iter__(self) -> Iterator[PassShape]:
        return iter(tuple(self._maps))

    def __contains__(self, shape: object) -> bool:
        return shape in self._maps

    def __getitem__(self, shape: PassShape) -> tuple[GraphMap, Layout]:
        return self._maps[shape]

    def can_split_tail(self) -> bool:
        """Return whether the tail can have a pass of its own: it keeps nothing, and has the rows of logits only."""
        unit, shape = self.layout.units[-1], PassShape(2, 1)
        if unit.blocks or unit.kept_bytes or self._width < shape.tokens:
            return False
        if shape not in self._maps:
            with contextlib.suppress(NotSupported):
                self.learn(shape)
        return shape in self._maps and self._maps[shape][1].units[-1].entry_bytes == unit.entry_bytes

    @property
    def pair_chunks(self) -> int:
        """The frames that streaming takes besides those to read ahead through, where nearly everything streams."""
        graph, _ = self._maps[ONE_TOKEN]
        segments = cut_into_segments(graph, lambda read: chunks_of(read, self._address_space, ()))
        return frames_in_use([segment.needs for segment in segments])

    def unknown_shape(self, batch: Sequence[BatchToken]) -> PassShape | None:
        """Return the shape of a pass of `batch` whose graph was not mapped yet; where all were, that of the first."""
        starts = range(0, len(batch), self._width)
        shapes = [self._decoder.limits.shape_of(batch[start : start + self._width]) for start in starts]
        return next((shape for shape in shapes if shape not in self._maps), shapes[0] if shapes else None)

    def check_learnable(self, shape: PassShape) -> None:
        """Raise ConfigError for a shape that no pass can have, NotSupported where there are too many."""
        self._decoder.limits.check_shape(shape)
        if len(self._maps) >= MOST_MAPS and shape not in self._maps:
            raise NotSupported(f"this model cannot be spread over devices: its passes have over {MOST_MAPS} graphs")

    def learn(self, shape: PassShape) -> None:
        """Map the graph of passes of `shape`; the context must be empty. Raises NotSupported for other layers."""
        # Of another shape first: llama.cpp uses its last graph again, and a pass that failed has cleared flags in it.
        self._decoder.map_graph(self._unlike(shape), notes_nodes=False)
        self._driver.take_flow()
        graph = self._decoder.map_graph(shape)
        layout = lay_out(graph, self._driver.take_flow())
        if layout.shape != self.layout.shape:
            raise NotSupported(
                f"this model cannot be spread over devices: in a pass of {shape.tokens} tokens it has other layers"
            )
        self._maps[shape] = graph, layout
        self.layout = self._maps[ONE_TOKEN][1]

    def needs(self, share: Share, pieces: Pieces) -> set[int]:
        """Return the pieces of the model that computing `share` reads."""
        found: set[int] = set()
        for graph, layout in self._maps.values():
            found |= pieces_read(own_part(graph, layout, share), self._address_space, pieces)
        return found

    def unit_needs(self, pieces: Pieces) -> list[set[int]]:
        """Return the pieces that each unit reads."""
        graph, layout = self._maps[ONE_TOKEN]
        limits = [layout.start_of(unit) for unit in range(len(layout.units) + 1)]
        return [pieces_read(graph[a:b], self._address_space, pieces) for a, b in itertools.pairwise(limits)]

    def _unlike(self, shape: PassShape) -> PassShape:
        """Return another shape of passes than `shape`."""
        if shape.tokens > 1 or self._width == 1:
            return PassShape(1, 0 if shape == (1, 1) else 1)
        return PassShape(2, 1)
