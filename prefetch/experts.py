"""The expert cache: which experts of a mixture stay in memory. Decisions only; memory and reads are others' affair.

A unit is one expert of one layer. Before a layer computes, it looks up the experts that its router chose: what is
missing must be read, and what makes room for it is named. Not every unit that was read is kept: one that is used once
need not push out another that is used often (admission). What stays and what goes is a policy's choice (`policies.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

Unit = tuple[int, int]


@dataclass(frozen=True, slots=True)
class MoeShape:
    """The shape of a moe: its layers that have experts, in order; experts in each; and how many a token uses."""

    layers: tuple[int, ...]
    experts: int
    used: int


MOST_AHEAD = 2  # layers that are looked ahead
_FLOAT_BYTES = 4


def prediction_bytes(n_layers: int, n_experts: int) -> int:
    """Return what a predictor learns at most: a figure for each pair of experts, for each layer and distance."""
    return MOST_AHEAD * n_layers * n_experts * (n_experts + 1) * _FLOAT_BYTES


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a look-up needs. missing: experts to read, in the order asked; bypassed: those of them that are not kept.

    evicted: units whose memory is free now.
    """

    missing: tuple[int, ...] = ()
    bypassed: tuple[int, ...] = ()
    evicted: tuple[Unit, ...] = ()


class Policy(Protocol):
    """What decides about a cache: told of every look-up and of what comes and goes; asked what to keep.

    has_shares: every layer has an equal part of the capacity, and makes room in its own.
    """

    has_shares: bool

    def note(self, layer: int, experts: Sequence[int], resident: Collection[int], next_tokens: int) -> None:
        """Learn what `layer` looks up; until the next note, no such expert is a victim.

        experts: of each token one after the other, with repeats. resident: the layer's experts in the cache.
        next_tokens: of the layer's next turn.
        """
        ...

    def ranked(self, layer: int, experts: Sequence[int]) -> Sequence[int]:
        """Return `experts`, which have just been noted, the most worth keeping first."""
        ...

    def expect(self, layer: int, experts: Collection[int]) -> None:
        """Learn what `layer` is expected to look up at its next turn; that turn ends it."""
        ...

    def victim(self, newcomer: Unit | None, is_prefetch: bool = False) -> Unit | None:
        """Return, and forget as resident, the unit to give up for `newcomer`; None where it is worth less than all.

        Without a newcomer it is the unit worth least. For one that is foretold, no unit of the layer noted last, and
        none of its own layer that is foretold too.
        """
        ...

    def add(self, unit: Unit, is_prefetch: bool = False) -> None:
        """Take `unit`, which has just been noted or foretold, as resident."""
        ...

    def remove(self, unit: Unit) -> None:
        """Forget `unit` as resident."""
        ...


class ExpertCache:
    """At most `capacity` of units, of which one of a layer costs `sizes[layer]`, kept by `policy`. Not thread-safe.

    size_of: what a unit costs where those of a layer differ; never more than that.
    """

    def __init__(
        self,
        capacity: int,
        sizes: Mapping[int, int],
        policy: Policy,
        size_of: Callable[[Unit], int] | None = None,
    ) -> None:
        self.capacity = capacity
        self._size_of = size_of or (lambda unit: sizes[unit[0]])
        self._policy = policy
        self._resident: dict[int, set[int]] = {layer: set() for layer in sizes}
        self._cost = 0
        self._share = capacity // len(sizes) if policy.has_shares and sizes else None

    def __contains__(self, unit: object) -> bool:
        return isinstance(unit, tuple) and unit[1] in self._resident.get(unit[0], ())

    def __len__(self) -> int:
        return sum(map(len, self._resident.values()))

    @property
    def cost(self) -> int:
        """What the resident units cost, in the unit of `capacity`."""
        return self._cost

    def look_up(self, layer: int, experts: Sequence[int], next_tokens: int = 1) -> Outcome:
        """Return what `layer` lacks of `experts`; those that are kept are resident from now on, so read them all.

        experts: as the router chose them, token after token; repeats are read once, and tell what is popular. Nothing
        among them is evicted. next_tokens: as many as are expected to look up at the layer's next turn. Raises KeyError
        for a layer that has no size.
        """
        resident = self._resident[layer]
        self._policy.note(layer, experts, resident, next_tokens)
        missing = [expert for expert in dict.fromkeys(experts) if expert not in resident]
        if not missing:
            return Outcome()
        evicted: list[Unit] = []
        wanted = iter(self._policy.ranked(layer, missing))
        for expert in wanted:
            if not self._make_room_for((layer, expert), evicted):
                return Outcome(tuple(missing), (expert, *wanted), tuple(evicted))
        return Outcome(tuple(missing), (), tuple(evicted))

    def admit(self, layer: int, experts: Sequence[int]) -> Outcome:
        """Take in what is foretold of `layer`, the likeliest first; return what of it must be read, and what goes.

        It takes the place of units that are worth less, and of none of the layer that was looked up last. What finds no
        place, and what is resident, is not among the missing.
        """
        self._policy.expect(layer, experts)
        resident, missing = self._resident[layer], list[int]()
        evicted: list[Unit] = []
        for expert in experts:
            if expert in resident:
                continue
            if not self._make_room_for((layer, expert), evicted, is_prefetch=True):
                break
            missing.append(expert)
        return Outcome(tuple(missing), (), tuple(evicted))

    def drop(self, unit: Unit) -> None:
        """Forget `unit`, where it is resident: its read failed, or its memory is needed for something else."""
        if unit in self:
            self._policy.remove(unit)
            self._forget(unit)

    def make_room(self, cost: int) -> tuple[Unit, ...]:
        """Evict what is worth least until `cost` is free; return it. What was looked up last stays, so it may be less.

        It is free until the next look-up that misses.
        """
        evicted: list[Unit] = []
        while self._cost + cost > self.capacity and (victim := self._policy.victim(None)) is not None:
            self._forget(victim)
            evicted.append(victim)
        return tuple(evicted)

    def resize(self, capacity: int) -> tuple[Unit, ...]:
        """Set the capacity; return what is evicted for it, what was looked up last after all else."""
        self.capacity = capacity
        evicted = list(self.make_room(0))
        for unit in [(layer, expert) for layer, experts in self._resident.items() for expert in experts]:
            if self._cost <= capacity:
                break
            self.drop(unit)
            evicted.append(unit)
        return tuple(evicted)

    def _make_room_for(self, unit: Unit, evicted: list[Unit], is_prefetch: bool = False) -> bool:
        """Make `unit` resident, and return whether it has a place; what goes for it is added to `evicted`."""
        layer, expert = unit
        size, resident = self._size_of(unit), self._resident[layer]
        while (
            self._cost + size > self.capacity
            if self._share is None
            else (len(resident) + 1) * size > self._share or self._cost + size > self.capacity
        ):
            victim = self._policy.victim(unit, is_prefetch) if size <= self.capacity else None
            if victim is None:
                return False
            self._forget(victim)
            evicted.append(victim)
        resident.add(expert)
        self._cost += size
        self._policy.add(unit, is_prefetch)
        return True

    def _forget(self, unit: Unit) -> None:
        self._resident[unit[0]].discard(unit[1])
        self._cost -= self._size_of(unit)
