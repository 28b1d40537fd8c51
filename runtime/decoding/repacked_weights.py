"""The weights of an open model that are computed by llama.cpp's repacked kernels."""

from __future__ import annotations

import threading
from collections.abc import Collection

from edge_run.runtime.decoding.conversions import Conversions
from edge_run.runtime.graph.nodes import GraphMap
from edge_run.runtime.graph.repackable import is_by_expert, repackable
from edge_run.runtime.llama import _ggml as ggml
from edge_run.runtime.llama.model import LlamaModel
from edge_run.runtime.llama.repacking import RepackedRows, Repacking, most_slice_bytes
from edge_run.tiers.address_space import AddressSpace
from edge_run.tiers.gguf import GgufModel


class RepackedWeights:
    """The weights of a model that have repacked kernels from now on; their rows are repacked as they are read.

    kinds: the kinds of weights that have one, in order.
    """

    def __init__(self, model: LlamaModel, gguf: GgufModel, graph: GraphMap, kinds: Collection[str]) -> None:
        """Give weights of `kinds` repacked kernels, where passes like `graph` only multiply by them.

        The context must be made afterwards.
        """
        self._repacking, self._slices = Repacking(), list[RepackedRows]()
        self._copies = threading.local()
        places: dict[str, set[int]] = {}
        for address in ggml.model_tensors(model.handle):
            places.setdefault(ggml.tensor_name(address).decode("utf-8", "replace"), set()).add(address)
        found: set[str] = set()
        for kind, tensors in repackable(graph, gguf).items():
            for tensor in tensors if kind in kinds else ():
                kernel = self._repacking.kernel(tensor.type_id, tensor.shape, by_expert=is_by_expert(kind))
                if kernel and len(places[tensor.name]) == 1:
                    self._slices += self._repacking.mark(min(places[tensor.name]), kernel)
                    found.add(kind)
        self.kinds = tuple(sorted(found))
        self._most_bytes = most_slice_bytes(self._slices)

    def copy_bytes(self, readers: int) -> int:
        """Return what `readers` threads take to repack, one slice each."""
        return readers * self._most_bytes

    def undo(self) -> None:
        """Give the weights, none of which was read, the kernels that they had; the context must be made anew."""
        self._repacking.undo()
        self.kinds, self._slices, self._most_bytes = (), [], 0

    def conversions(self, address_space: AddressSpace) -> Conversions:
        """Return what repacks the weights when they have been read."""
        parts = [(one.address, one.size_bytes) for one in self._slices]
        return Conversions(address_space, parts, self._repack)

    def repack_now(self) -> None:
        """Repack the weights, all of which are in memory already."""
        for number in range(len(self._slices)):
            self._repack(number)

    def close(self) -> None:
        """Free what stands for the kernels; the context must be closed. Idempotent."""
        self._repacking.close()

    def _repack(self, number: int) -> None:
        """Repack a slice, by way of a copy that each thread has."""
        if not hasattr(self._copies, "rows"):
            self._copies.rows = ggml.RowCopy(self._most_bytes)
        part = self._slices[number]
        self._copies.rows.repack(part.weight, part.first_row, part.n_rows)
