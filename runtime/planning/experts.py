"""Where the weights of a mixture of experts lie: the tensors that hold the experts, by layer, and the chunks of all."""

from __future__ import annotations

import functools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from edge_run.base.config import CHUNK_BYTES
from edge_run.base.units import KIB, MIB, round_down
from edge_run.partition.plan import PassPlans
from edge_run.partition.window import SEGMENT_CHUNKS
from edge_run.prefetch.schedule import Segment
from edge_run.runtime.graph.nodes import GraphMap, Node, WeightRead
from edge_run.runtime.graph.segments import ROW_GROUP, chunks_of, cut_into_segments
from edge_run.tiers.address_space import AddressSpace
from edge_run.tiers.gguf import GgufModel
from edge_run.tiers.rows import RowRange

LEAST_EXPERT_CHUNK_BYTES = 64 * KIB
SEGMENT_BYTES = 8 * MIB  # of dense weights beside experts, whose chunks are small
CHUNKS_PER_PIECE = 48  # more would read less beside the piece, but each costs some 25 µs
CROWDED_SHARE = 0.5  # of a layer's experts, in use at once: they come tensor by tensor, each while one is computed
MOST_CUTS = 6  # that are kept: one takes some MB
MOST_FRAMES = 24_000  # each may be a mapping of its own, of which Linux allows 65,530

_Cut = TypeVar("_Cut")


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """A tensor that holds one piece of every expert of a layer.

    layer: the number of the layer among those with experts.
    address: where the tensor lies.
    stride: the size of a piece in bytes.
    n_experts: the number of experts.
    row_bytes: the size of a row of a piece; 0 where products with it are not computed in slices of rows.
    """

    layer: int
    address: int
    stride: int
    n_experts: int
    row_bytes: int = 0

    def __hash__(self) -> int:
        return self.address  # it is looked up a thousand times a token


def expert_tensors(graph: GraphMap, gguf: GgufModel, *, has_row_slices: bool = False) -> list[ExpertTensor]:
    """Return the tensors that are only read by expert, in order of use; tensors that share their ids form a layer.

    has_row_slices: as of `Terms`.
    """
    shapes = {tensor.name: tensor.shape for tensor in gguf.tensors if len(tensor.shape) == 3}
    otherwise = {read.address for node in graph for read in node.reads if routed_read(node) is not read}
    layers: dict[int, int] = {}
    found: dict[int, ExpertTensor] = {}
    for node in graph:
        read = routed_read(node)
        if read is None or read.address in otherwise or read.address in found:
            continue
        _, n_rows, count = shapes.get(read.name, (1, 1, 1))
        if count > 1 and read.length % count == 0 and node.expert_ids is not None:
            layer, stride = layers.setdefault(node.expert_ids, len(layers)), read.length // count
            row_bytes = stride // n_rows if has_row_slices and stride % n_rows == 0 else 0
            found[read.address] = ExpertTensor(layer, read.address, stride, count, row_bytes)
    return list(found.values())


def routed_read(node: Node) -> WeightRead | None:
    """Return the read of `node` that is by expert, if there is one."""
    return node.reads[0] if node.op == "MUL_MAT_ID" and node.reads else None


def expert_chunk_bytes(tensors: Sequence[ExpertTensor], budget_bytes: int) -> int:
    """Return the size of a chunk: small against an expert's piece, but not so small that there are too many chunks."""
    least = max(LEAST_EXPERT_CHUNK_BYTES, budget_bytes // MOST_FRAMES)
    size = CHUNK_BYTES
    while size // 2 >= least and size > min(tensor.stride for tensor in tensors) // CHUNKS_PER_PIECE:
        size //= 2
    return size


class ExpertMap:
    """The chunks of every expert.

    layers: the tensors of each layer, in order of use.
    sizes: the most chunks of an expert, by layer.
    largest_tensor: the most chunks of a tensor.
    n_experts: the most experts of a layer.
    dense: chunks with other weights too, which are left out.
    """

    def __init__(self, tensors: Sequence[ExpertTensor], address_space: AddressSpace, dense: frozenset[int]) -> None:
        n_layers = max(tensor.layer for tensor in tensors) + 1
        self._address_space, self._dense = address_space, dense
        self.chunk_bytes = address_space.chunk_bytes
        self._unit_sizes: dict[tuple[int, int], int] = {}
        self._pieces: dict[ExpertTensor, list[Sequence[int]]] = {}
        self.layers = tuple(tuple(t for t in tensors if t.layer == i) for i in range(n_layers))
        self.at = {tensor.address: tensor for tensor in tensors}
        self.sizes = tuple(sum(map(self.piece_size, layer)) for layer in self.layers)
        self.n_experts = max(tensor.n_experts for tensor in tensors)
        self.largest_tensor = max(self.size_at_once(tensor, tensor.n_experts) for tensor in tensors)

    def piece_size(self, tensor: ExpertTensor) -> int:
        """Return the most chunks that an expert's piece of `tensor` has."""
        return self._most_chunks(tensor.stride)

    def size_at_once(self, tensor: ExpertTensor, n_experts: int) -> int:
        """Return the most chunks that the pieces of `n_experts` experts in `tensor` have."""
        return min(n_experts * self.piece_size(tensor), self._most_chunks(tensor.n_experts * tensor.stride))

    def least_at_once(self, tensor: ExpertTensor, n_experts: int) -> int:
        """Return the chunks that a product with `n_experts` experts in `tensor` can do with."""
        whole = self.size_at_once(tensor, n_experts)
        return min(whole, n_experts * self._most_chunks(ROW_GROUP * tensor.row_bytes)) if tensor.row_bytes else whole

    def row_slices(self, tensor: ExpertTensor, n_experts: int, n_chunks: int) -> list[range]:
        """Return slices of rows, the same of each of `n_experts` experts in `tensor`, which have at most `n_chunks`.

        A slice has as many rows as leave room for the next one to be read meanwhile, but not less than `ROW_GROUP`.
        """
        room_bytes = (n_chunks // 2 // n_experts - 1) * self.chunk_bytes
        n_rows, fitting = tensor.stride // tensor.row_bytes, round_down(room_bytes // tensor.row_bytes, ROW_GROUP)
        height = max(ROW_GROUP, fitting)
        return [range(first, min(first + height, n_rows)) for first in range(0, n_rows, height)]

    def chunks_of_rows(self, tensor: ExpertTensor, experts: Iterable[int], rows: range) -> list[int]:
        """Return the chunks of `rows` of the pieces of `experts` in `tensor`."""
        first, length = tensor.address + rows.start * tensor.row_bytes, len(rows) * tensor.row_bytes
        pieces = (self._address_space.chunks_of(first + expert * tensor.stride, length) for expert in experts)
        return [chunk for piece in pieces for chunk in piece if chunk not in self._dense]

    def _most_chunks(self, length: int) -> int:
        """Return the most chunks that `length` bytes lie in."""
        return (length - 1) // self.chunk_bytes + 2

    def size_of(self, unit: tuple[int, int]) -> int:
        """Return the number of chunks of `unit`, which is (layer, expert)."""
        if unit not in self._unit_sizes:
            layer, expert = unit
            self._unit_sizes[unit] = sum(len(self.pieces(tensor)[expert]) for tensor in self.layers[layer])
        return self._unit_sizes[unit]

    def pieces(self, tensor: ExpertTensor) -> list[Sequence[int]]:
        """Return the chunks of each expert's piece of `tensor`."""
        if tensor not in self._pieces:
            starts = (tensor.address + expert * tensor.stride for expert in range(tensor.n_experts))
            self._pieces[tensor] = [self._routed(self._address_space.chunks_of(s, tensor.stride)) for s in starts]
        return self._pieces[tensor]

    def _routed(self, piece: range) -> Sequence[int]:
        """Return the chunks of `piece` without dense ones: as a range where it can be, as there may be millions."""
        return piece if self._dense.isdisjoint(piece) else tuple(c for c in piece if c not in self._dense)


@dataclass(frozen=True, slots=True)
class DensePart:
    """The part of a model that every token reads, of one whose experts stream as they are chosen.

    routed: the addresses of the tensors of experts.
    chunks: the chunks that dense weights lie in, by number; these may hold ends of those tensors too.
    segment_chunks: the most chunks of a segment that is more than one matrix.
    has_row_slices: as of `Terms`.
    """

    routed: Collection[int]
    chunks: Sequence[int]
    segment_chunks: int
    has_row_slices: bool

    @classmethod
    def of(cls, experts: ExpertMap, dense: Collection[int], *, has_row_slices: bool) -> DensePart:
        """Return the part that is not of `experts`, in the chunks `dense`."""
        most_chunks = max(SEGMENT_CHUNKS, SEGMENT_BYTES // experts.chunk_bytes)
        return cls(experts.at.keys(), tuple(sorted(dense)), most_chunks, has_row_slices)

    def needs(self, read: WeightRead, chunks: Sequence[int]) -> Sequence[int]:
        """Return those of the `chunks` of `read`, a run of them, that are dense."""
        if read.address not in self.routed:
            return chunks
        return self.chunks[bisect_left(self.chunks, chunks[0]) : bisect_right(self.chunks, chunks[-1])]

    def segments(self, graph: GraphMap, address_space: AddressSpace, tables: Sequence[RowRange]) -> list[Segment]:
        """Return the segments of `graph`, of which only this part counts."""
        sliced = address_space if self.has_row_slices else None
        return cut_into_segments(
            graph, lambda read: self.needs(read, chunks_of(read, address_space, tables)), self.segment_chunks, sliced
        )


@dataclass(frozen=True)
class ExpertLayout:
    """A mixture's weights, in chunks of one size.

    address_space: where they lie.
    experts: the chunks of each expert.
    dense: the chunks that every token needs: all weights but the experts, in order of use, and what cannot move.
    part: the same as a part of the model.
    segments: of a pass of one token, in which only this part counts.
    """

    address_space: AddressSpace
    experts: ExpertMap
    dense: tuple[int, ...]
    part: DensePart
    segments: Sequence[Segment]

    @classmethod
    def of(
        cls,
        graph: GraphMap,
        address_space: AddressSpace,
        tensors: Sequence[ExpertTensor],
        tables: Sequence[RowRange],
        *,
        has_row_slices: bool,
    ) -> ExpertLayout:
        """Return the layout of the weights that `graph` reads. tensors: of the experts. tables: those read by row."""
        routed = {tensor.address for tensor in tensors}
        reads = (read for node in graph for read in node.reads if read.address not in routed)
        whole = (chunk for read in reads for chunk in chunks_of(read, address_space, tables))
        dense = tuple(dict.fromkeys((*whole, *sorted(address_space.unmovable))))
        experts = ExpertMap(tensors, address_space, frozenset(dense))
        part = DensePart.of(experts, dense, has_row_slices=has_row_slices)
        return cls(address_space, experts, dense, part, part.segments(graph, address_space, tables))

    @functools.cached_property
    def needs(self) -> list[Sequence[int]]:
        """The dense chunks that each segment needs."""
        return [segment.needs for segment in self.segments]

    @functools.cached_property
    def dense_plans(self) -> PassPlans:
        """Which of them stay, whatever room there is."""
        return PassPlans(self.needs, self.address_space.unmovable, self.part.segment_chunks)


class Cuts:
    """How the graph of one model is cut, for all plans of it that are weighed: of a large one that takes a second."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[GraphMap, Any]] = {}

    def get(self, graph: GraphMap, address_space: AddressSpace, kind: tuple[Any, ...], cut: Callable[[], _Cut]) -> _Cut:
        """Return what `cut` made of `graph`, whose weights lie in `address_space`, the first time.

        kind: what else tells one way to cut from others.
        """
        key = id(graph), address_space.spans, address_space.staying, address_space.chunk_bytes, *kind
        if key not in self._known:
            for oldest in list(self._known)[: 1 - MOST_CUTS]:
                del self._known[oldest]
            self._known[key] = graph, cut()  # with the graph, so that no other one is taken for it
        found: _Cut = self._known[key][1]
        return found
