"""The expert cache: which experts of a mixture of experts stay in memory. Decisions only, without memory or reads.

Before a layer computes, it looks up the experts that its router chose. The cache returns those that are missing, which
must be read, and those that are evicted for them. Not every expert that is read is kept: one that is used once need not
evict another one that is used often (admission). A policy decides which are kept (`policies.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

LayerExpert = tuple[int, int]  # a layer, and the number of one of its experts


@dataclass(frozen=True, slots=True)
class MoeShape:
    """The shape of a mixture of experts.

    layers: the layers that have experts, in order.
    experts: the experts of a layer.
    used: the experts of a layer that a token uses.
    """

    layers: tuple[int, ...]
    experts: int
    used: int


MOST_AHEAD = 2  # layers that are looked ahead
_FLOAT_BYTES = 4


def prediction_bytes(n_layers: int, n_experts: int) -> int:
    """Return the most memory of a predictor: a number for each pair of experts, layer and distance."""
    return MOST_AHEAD * n_layers * n_experts * (n_experts + 1) * _FLOAT_BYTES


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a look-up.

    missing: the experts to read, in the order asked for.
    bypassed: those of the missing ones that are not kept.
    evicted: the experts whose memory is free now.
    """

    missing: tuple[int, ...] = ()
    bypassed: tuple[int, ...] = ()
    evicted: tuple[LayerExpert, ...] = ()


class Policy(ABC):
    """Decides which experts a cache keeps; it is told of every look-up, and of experts that come and go.

    has_shares: whether every layer has an equal part of the capacity, and evicts its own experts.
    """

    has_shares = False

    @abstractmethod
    def note(self, layer: int, experts: Sequence[int], resident: Collection[int], next_tokens: int) -> None:
        """Learn the experts that `layer` looks up; none of them is a victim until the next note.

        experts: those of one token after the other, with repeats.
        resident: the layer's experts in the cache.
        next_tokens: the tokens that the layer is expected to have next time.
        """

    def ranked(self, layer: int, experts: Sequence[int]) -> Sequence[int]:
        """Return `experts`, which have just been noted, ordered by worth, the greatest first, or as they are."""
        return experts

    def expect(self, layer: int, experts: Collection[int]) -> None:  # noqa: B027  all look-ups may be known
        """Learn the experts that `layer` is predicted to look up next; its next look-up ends the prediction."""

    @abstractmethod
    def victim(self, newcomer: LayerExpert | None, is_prefetch: bool = False) -> LayerExpert | None:
        """Return the expert to evict for `newcomer`, and forget it as resident; None where the newcomer is worth least.

        Without a newcomer, it is the one worth least.

        is_prefetch: whether the newcomer is predicted. Then the victim is no expert of the layer noted last, and none
            that is predicted in the newcomer's own layer.
        """

    @abstractmethod
    def add(self, expert: LayerExpert, is_prefetch: bool = False) -> None:
        """Take `expert`, which has just been noted or predicted, as resident."""

    @abstractmethod
    def remove(self, expert: LayerExpert) -> None:
        """Forget `expert` as resident."""


class ExpertCache:
    """A cache of experts. Not thread-safe.

    capacity: the most that the experts cost together.
    sizes: the cost of an expert, by layer.
    policy: decides which experts are kept.
    size_of: returns the cost of an expert, where experts of a layer differ; it is at most the layer's in `sizes`.
    cost: the cost of all resident experts.
    """

    def __init__(
        self,
        capacity: int,
        sizes: Mapping[int, int],
        policy: Policy,
        size_of: Callable[[LayerExpert], int] | None = None,
    ) -> None:
        self.capacity = capacity
        self._size_of = size_of or (lambda expert: sizes[expert[0]])
        self._policy = policy
        self._resident: dict[int, set[int]] = {layer: set() for layer in sizes}
        self.cost = 0

    def __contains__(self, expert: object) -> bool:
        return isinstance(expert, tuple) and expert[1] in self._resident.get(expert[0], ())

    def __len__(self) -> int:
        return sum(map(len, self._resident.values()))

    def look_up(self, layer: int, experts: Sequence[int], next_tokens: int = 1) -> Outcome:
        """Return the experts of `layer` that must be read; those that are kept count as resident from now on.

        experts: those that the router chose, token after token. Repeats are read once, and show which are popular.
            None of them is evicted.
        next_tokens: the tokens that the layer is expected to have next time.

        Raises KeyError for a layer that has no size.
        """
        resident = self._resident[layer]
        self._policy.note(layer, experts, resident, next_tokens)
        missing = [expert for expert in dict.fromkeys(experts) if expert not in resident]
        if not missing:
            return Outcome()
        evicted: list[LayerExpert] = []
        wanted = iter(self._policy.ranked(layer, missing))
        for expert in wanted:
            if not self._make_room_for((layer, expert), evicted):
                return Outcome(tuple(missing), (expert, *wanted), tuple(evicted))
        return Outcome(tuple(missing), (), tuple(evicted))

    def admit(self, layer: int, experts: Sequence[int]) -> Outcome:
        """Admit the experts predicted for `layer`, the likeliest first; return those to read, and those evicted.

        They replace experts that are worth less, but none of the layer that was looked up last. Those that are resident
        already, and those that find no room, are not among the missing.
        """
        self._policy.expect(layer, experts)
        resident, missing = self._resident[layer], list[int]()
        evicted: list[LayerExpert] = []
        for expert in experts:
            if expert in resident:
                continue
            if not self._make_room_for((layer, expert), evicted, is_prefetch=True):
                break
            missing.append(expert)
        return Outcome(tuple(missing), (), tuple(evicted))

    def drop(self, expert: LayerExpert) -> None:
        """Forget `expert`, if it is resident, because its read failed or its memory is needed otherwise."""
        if expert in self:
            self._policy.remove(expert)
            self._forget(expert)

    def resize(self, capacity: int) -> tuple[LayerExpert, ...]:
        """Set the capacity, and return the experts evicted for it; those that were looked up last go last."""
        self.capacity, evicted = capacity, list[LayerExpert]()
        while self.cost > capacity and (victim := self._policy.victim(None)) is not None:
            self._forget(victim)
            evicted.append(victim)
        if self.cost <= capacity:  # as nearly always: all that are resident are thousands
            return tuple(evicted)
        for expert in [(layer, number) for layer, numbers in self._resident.items() for number in numbers]:
            if self.cost <= capacity:
                break
            self.drop(expert)
            evicted.append(expert)
        return tuple(evicted)

    def _make_room_for(self, expert: LayerExpert, evicted: list[LayerExpert], is_prefetch: bool = False) -> bool:
        """Make `expert` resident, and return whether it has room; those evicted for it are added to `evicted`."""
        layer, number = expert
        size, resident, has_shares = self._size_of(expert), self._resident[layer], self._policy.has_shares
        share = max(size, self.capacity // len(self._resident))  # one has room in each, in turn if not at once
        while (is_over_share := has_shares and (len(resident) + 1) * size > share) or self.cost + size > self.capacity:
            victim = self._policy.victim(expert, is_prefetch) if size <= self.capacity else None
            if victim is None and has_shares and not (is_over_share or is_prefetch):
                victim = self._policy.victim(None)  # other layers have more than their shares since a resize
            if victim is None:
                return False
            self._forget(victim)
            evicted.append(victim)
        resident.add(number)
        self.cost += size
        self._policy.add(expert, is_prefetch)
        return True

    def _forget(self, expert: LayerExpert) -> None:
        self._resident[expert[0]].discard(expert[1])
        self.cost -= self._size_of(expert)
