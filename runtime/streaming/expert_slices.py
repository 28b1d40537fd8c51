"""Products with experts that have no room together: the same rows of each are multiplied by at a time."""

from __future__ import annotations

from collections.abc import Sequence

from edge_run.runtime.llama.row_products import RowProducts
from edge_run.runtime.planning.experts import ExpertMap, ExpertTensor
from edge_run.tiers.weights import WeightsOnDemand


class ExpertSlices:
    """Computes such products. A slice is read while the one before is computed, as far as there are frames."""

    def __init__(self, experts: ExpertMap, weights: WeightsOnDemand, products: RowProducts) -> None:
        self._experts, self._weights, self._products = experts, weights, products
        self._in_use: list[int] = []
        self._ahead: list[int] = []

    def multiply(self, tensor: ExpertTensor, experts: Sequence[int], address: int, n_frames: int) -> float:
        """Compute the node at `address`, which multiplies by `experts` in `tensor`; return the seconds waited.

        n_frames: the frames that are free, which must do for the least of it (`ExpertMap.least_at_once`).
        """
        waited_s, slices = 0.0, self._experts.row_slices(tensor, len(experts), n_frames)
        for rows, following in zip(slices, [*slices[1:], None], strict=True):
            chunks = self._experts.chunks_of_rows(tensor, experts, rows)
            waited_s += self._weights.acquire(chunks)
            self._in_use, ahead = chunks, self._ahead
            self._ahead = self._experts.chunks_of_rows(tensor, experts, following) if following else []
            self._weights.hold(self._ahead)
            self._weights.release(ahead)
            self._products.multiply(address, rows)
            self._in_use = []
            self._weights.release(chunks)
        return waited_s

    def abandon(self) -> None:
        """Release what a product that failed has left."""
        self._weights.release([*self._in_use, *self._ahead])
        self._in_use, self._ahead = [], []
