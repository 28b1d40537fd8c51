"""Policies that count uses: they evict the least recently or the least frequently used expert, of all or of its layer.

A decay makes them one family, LRFU (Lee and others, 2001, section 2).
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Sequence

from edge_run.prefetch.experts import LayerExpert, MoeShape, Policy

_LARGEST = 1e100
_STALE = 4


class CountingPolicy(Policy):
    """Evicts the expert with the lowest count; of equal ones, the one used longest ago.

    A use counts 1, and is multiplied by `decay` at every later look-up of its layer. Every expert that was looked up is
    kept, as far as there is room.

    decay: 1 is LFU over all time, 0 is LRU.
    has_shares: whether each layer has an equal part of the capacity.
    """

    def __init__(self, moe: MoeShape, decay: float, has_shares: bool) -> None:
        self.has_shares = has_shares
        self._decay = decay
        self._clock = 0
        self._weight: dict[int, float] = dict.fromkeys(moe.layers, 1.0)  # grows, instead of all counts falling
        self._counts: dict[int, list[float]] = {layer: [0.0] * moe.experts for layer in moe.layers}
        self._entries: dict[LayerExpert, tuple[float, int, LayerExpert]] = {}  # the valid one of each resident expert
        self._heaps: defaultdict[int, list[tuple[float, int, LayerExpert]]] = defaultdict(list)
        self._layer, self._touched = -1, frozenset[int]()
        self._expected: dict[int, Collection[int]] = {}

    def note(self, layer: int, experts: Sequence[int], resident: Collection[int], next_tokens: int) -> None:
        """Count each expert once."""
        self._layer, self._touched = layer, frozenset(experts)
        self._expected.pop(layer, None)
        if 0 < self._decay < 1:
            self._grow(layer)
        counts, weight = self._counts[layer], self._weight[layer]
        for expert in dict.fromkeys(experts):
            self._clock += 1
            counts[expert] = counts[expert] + weight if self._decay else float(self._clock)
            if expert in resident:
                self._enter((layer, expert))

    def expect(self, layer: int, experts: Collection[int]) -> None:
        """Keep predicted experts from being evicted for others predicted with them."""
        self._expected[layer] = frozenset(experts)

    def victim(self, newcomer: LayerExpert | None, is_prefetch: bool = False) -> LayerExpert | None:
        """Return the expert with the lowest count, in the newcomer's layer where each layer has a share."""
        if newcomer is not None or not self.has_shares:
            return self._pop(newcomer[0] if newcomer and self.has_shares else 0, newcomer, is_prefetch)
        fullest = sorted(self._heaps, key=lambda pool: len(self._heaps[pool]), reverse=True)
        return next((victim for pool in fullest if (victim := self._pop(pool, None, False))), None)

    def add(self, expert: LayerExpert, is_prefetch: bool = False) -> None:
        """Take `expert` as resident; a prefetched one ranks as if it had been used once more."""
        self._enter(expert, self._count_once_more(expert) if is_prefetch else None)

    def remove(self, expert: LayerExpert) -> None:
        """Forget `expert` as resident."""
        del self._entries[expert]

    def _pop(self, pool: int, newcomer: LayerExpert | None, is_prefetch: bool) -> LayerExpert | None:
        heap, spared = self._heaps[pool], list[tuple[float, int, LayerExpert]]()
        found = None
        while heap and found is None:
            entry = heapq.heappop(heap)
            if self._entries.get(entry[2]) is not entry:
                continue
            if is_prefetch and newcomer is not None and entry[0] > self._count_once_more(newcomer):
                spared.append(entry)
                break
            if self._is_spared(entry[2], newcomer, is_prefetch):
                spared.append(entry)
            else:
                found = entry[2]
                del self._entries[found]
        for entry in spared:
            heapq.heappush(heap, entry)
        return found

    def _is_spared(self, expert: LayerExpert, newcomer: LayerExpert | None, is_prefetch: bool) -> bool:
        layer, number = expert
        if not is_prefetch or newcomer is None:
            return layer == self._layer and number in self._touched
        return layer == self._layer or (layer == newcomer[0] and number in self._expected[layer])

    def _count_once_more(self, expert: LayerExpert) -> float:
        if not self._decay:
            return float(self._clock)
        return self._counts[expert[0]][expert[1]] + self._weight[expert[0]]

    def _enter(self, expert: LayerExpert, count: float | None = None) -> None:
        if count is None:
            count = self._counts[expert[0]][expert[1]]
        entry = (count, self._clock, expert)
        self._entries[expert] = entry
        pool = expert[0] if self.has_shares else 0
        heap = self._heaps[pool]
        heapq.heappush(heap, entry)
        if len(heap) > _STALE * (len(self._entries) + 16):
            heap[:] = [entry for entry in heap if self._entries.get(entry[2]) is entry]
            heapq.heapify(heap)

    def _grow(self, layer: int) -> None:
        """Give the next use more weight than all before it, instead of decaying all counts.

        Counts and ranks are scaled down before they overflow.
        """
        self._weight[layer] /= self._decay
        if self._weight[layer] < _LARGEST:
            return
        scale = 1 / self._weight[layer]
        self._weight[layer] = 1.0
        self._counts[layer] = [count * scale for count in self._counts[layer]]
        for (own_layer, number), (_, clock, expert) in list(self._entries.items()):
            if own_layer == layer:
                entry = (self._counts[layer][number], clock, expert)
                self._entries[expert] = entry
                heapq.heappush(self._heaps[layer if self.has_shares else 0], entry)
