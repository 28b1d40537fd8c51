"""The offline optimum: the policy that knows every look-up beforehand (Belady, 1966).

It evicts the expert whose next use is the latest. As in published figures, all that are looked up are kept. Where
little fits, a policy that need not keep them does better still (`may_bypass`); with experts of one size, no policy is
better than that.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Sequence

from edge_run.prefetch.experts import LayerExpert, Policy
from edge_run.prefetch.routes import LookUp

NEVER = 1 << 62


class OptimalPolicy(Policy):
    """The optimal policy for `look_ups`, which must be noted in this order.

    may_bypass: whether an expert that is looked up may be dropped, whether it was resident or read.
    """

    def __init__(self, look_ups: Sequence[LookUp], may_bypass: bool = False) -> None:
        self._may_bypass = may_bypass
        self._uses: defaultdict[LayerExpert, list[int]] = defaultdict(list)  # the next one last
        for number in range(len(look_ups) - 1, -1, -1):
            for expert in dict.fromkeys(look_ups[number].experts):
                self._uses[look_ups[number].layer, expert].append(number)
        self._next: dict[LayerExpert, int] = {}  # of resident experts, and of those noted last
        self._resident: set[LayerExpert] = set()
        self._heap: list[tuple[int, LayerExpert]] = []
        self._touched: frozenset[LayerExpert] = frozenset()

    def note(self, layer: int, experts: Sequence[int], resident: Collection[int], next_tokens: int) -> None:
        """Go on to the next look-up."""
        self._touched = frozenset((layer, expert) for expert in experts)
        for expert in self._touched:
            uses = self._uses[expert]
            uses.pop()
            self._next[expert] = uses[-1] if uses else NEVER
            if expert in self._resident:
                heapq.heappush(self._heap, (-self._next[expert], expert))

    def ranked(self, layer: int, experts: Sequence[int]) -> Sequence[int]:
        """Return those first whose next use is the soonest; where all are kept, in the order given."""
        return sorted(experts, key=lambda expert: self._next[layer, expert]) if self._may_bypass else experts

    def victim(self, newcomer: LayerExpert | None, is_prefetch: bool = False) -> LayerExpert | None:
        """Return the expert whose next use is the latest."""
        spared, found = [], None
        while self._heap and found is None:
            entry = heapq.heappop(self._heap)
            expert = entry[1]
            if expert not in self._resident or self._next[expert] != -entry[0]:
                continue
            if expert in self._touched and not self._may_bypass:
                spared.append(entry)
            elif self._may_bypass and newcomer is not None and self._next[expert] <= self._next[newcomer]:
                spared.append(entry)
                break
            else:
                found = expert
                self._resident.remove(expert)
        for entry in spared:
            heapq.heappush(self._heap, entry)
        return found

    def add(self, expert: LayerExpert, is_prefetch: bool = False) -> None:
        """Take `expert` as resident."""
        self._resident.add(expert)
        heapq.heappush(self._heap, (-self._next[expert], expert))

    def remove(self, expert: LayerExpert) -> None:
        """Forget `expert` as resident."""
        self._resident.remove(expert)
