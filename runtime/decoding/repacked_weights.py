"""The weights of an open model that are computed by llama.cpp's repacked kernels."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING

from edge_run.runtime.decoding.repacked_blocks import RepackedBlocks
from edge_run.runtime.decoding.repacked_source import RepackedSource, RepackRooms
from edge_run.runtime.graph.nodes import GraphMap
from edge_run.runtime.graph.repackable import is_by_expert, repackable
from edge_run.runtime.llama import _ggml as ggml
from edge_run.runtime.llama.holdings import repacking_bytes
from edge_run.runtime.llama.model import LlamaModel
from edge_run.runtime.llama.repacking import RepackedWeight, Repacking
from edge_run.tiers.gguf import GgufModel
from edge_run.tiers.source import PiecewiseSource, Source, SourceFile

if TYPE_CHECKING:
    from edge_run.tiers.packed_file import PackedFile


class RepackedWeights:
    """The weights of a model that have repacked kernels from now on; their rows are repacked as they are read.

    kinds: the kinds of weights that have one, in order.
    packed: the packed file that holds some of them repacked; None where none is used.
    """

    def __init__(
        self,
        model: LlamaModel,
        gguf: GgufModel,
        graph: GraphMap,
        kinds: Collection[str],
        packed: PackedFile | None = None,
    ) -> None:
        """Give weights of `kinds` repacked kernels, where passes like `graph` only multiply by them.

        packed: holds some repacked as kernels here need them. It is used where all of these are repacked.
        The context must be made afterwards.
        """
        self._repacking = Repacking()
        self._file: SourceFile | None = None
        self._weights: dict[int, list[tuple[int, RepackedWeight]]] = {}  # with their places in the file, by shard
        places: dict[str, set[int]] = {}
        for address in ggml.model_tensors(model.handle):
            places.setdefault(ggml.tensor_name(address).decode("utf-8", "replace"), set()).add(address)
        found, named = set[str](), dict[str, tuple[int, int]]()
        for kind, tensors in repackable(graph, gguf).items():
            for tensor in tensors if kind in kinds else ():
                kernel = self._repacking.kernel(tensor.type_id, tensor.shape, by_expert=is_by_expert(kind))
                if kernel and len(places[tensor.name]) == 1:
                    weight = self._repacking.mark(min(places[tensor.name]), kernel)
                    self._weights.setdefault(tensor.shard, []).append((tensor.offset, weight))
                    named[tensor.name] = tensor.shard, tensor.offset
                    found.add(kind)
        self.kinds = tuple(sorted(found))
        weights = itertools.chain(*self._weights.values())
        self._group_bytes = max((weight.group_bytes for _, weight in weights), default=0)
        self._rooms = RepackRooms(self._group_bytes)
        self.packed = packed if packed and named.keys() >= set(packed.facts.names) else None
        self._read_repacked = {named[name] for name in self.packed.facts.names} if self.packed else set()

    def memory_bytes(self, readers: int) -> int:
        """Return what `readers` threads take to repack, and to read what lies repacked in a file."""
        return readers * repacking_bytes(self._group_bytes) + (self.packed.memory_bytes(readers) if self.packed else 0)

    def undo(self) -> None:
        """Give the weights, none of which was read, the kernels that they had; the context must be made anew."""
        self._repacking.undo()

    def sources(self, plain: Sequence[PiecewiseSource]) -> list[Source]:
        """Return the shards `plain`, by number, with the weights repacked as they are read. Raises ModelFileError."""
        if self.packed and self._file is None:
            self._file = SourceFile(self.packed.path, self.packed.identity)
        return [self._source(shard, source) for shard, source in enumerate(plain)]

    def _source(self, shard: int, plain: PiecewiseSource) -> Source:
        weights = sorted(self._weights.get(shard, ()), key=itemgetter(0))
        if self.packed is None or self._file is None:
            return RepackedSource(plain, weights, self._rooms)
        weights = [(start, weight) for start, weight in weights if (shard, start) not in self._read_repacked]
        return RepackedSource(RepackedBlocks(plain, shard, self.packed, self._file), weights, self._rooms)

    def check_unchanged(self) -> None:
        """Raise ModelFileError when the packed file was written to since it was opened."""
        if self._file:
            self._file.check_unchanged()

    def repack_now(self) -> None:
        """Repack the weights, all of which are in memory already."""
        for _, weight in itertools.chain(*self._weights.values()):
            *_, copy = self._rooms.mine()
            weight.repack(weight.address, weight.size_bytes, copy)

    def close(self) -> None:
        """Free what stands for the kernels, and the readers' memory; the context must be closed. Idempotent."""
        self._repacking.close()
        self._rooms.close()
        if self._file:
            self._file.close()
