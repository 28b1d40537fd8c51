"""A slice as a part of a pass: some units of a model are computed here, the others elsewhere.

Every device loads the whole header and runs llama.cpp on the same batches, so inputs, positions and caches are set
everywhere alike. Nodes of other devices' units lose their compute flag; at the start of each range of ours the pass
stops until the tensors alive there have come, which are written where llama.cpp expects them (memory is reserved for
them from their producer to their last use), and at its end they are handed on. What is no number (NaN) is neither taken
nor handed on: so it is known whose it is. Infinities are: some masks have them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

import numpy as np

from edge_run.base.errors import KernelError, ProtocolError
from edge_run.runtime.decoding.driver import Step, Steps
from edge_run.runtime.graph.nodes import GraphMap
from edge_run.runtime.graph.units import Layout
from edge_run.runtime.llama import _ggml as ggml
from edge_run.tiers import _libc

TAIL = "the tail's pass"  # what owns the last unit, where it is split off; no node has such an id


@dataclass(eq=False, repr=False, kw_only=True)
class NotNumbers(KernelError):
    """Layers gave what is no number (NaN).

    node: whose doing it is. after: who handed over what they computed with, empty where nobody did.
    """

    node: str
    after: str


class Transport(Protocol):
    """What carries activations between the devices of a run. Both may wait, and raise to end the pass."""

    def begin(self) -> None:
        """A pass through the graph begins; there may be several in one batch."""
        ...

    def receive(self, unit: int, sizes: Sequence[int]) -> Sequence[memoryview]:
        """Return the tensors handed over at the start of `unit`, which have `sizes` bytes."""
        ...

    def send(self, unit: int, node: str, parts: Sequence[memoryview]) -> None:
        """Hand the tensors over to `node`, which computes `unit`; for `TAIL`, to the node that has the tail.

        The parts may change after this returns.
        """
        ...


@dataclass(frozen=True, slots=True)
class Share:
    """Who computes which unit.

    owners: a node's id for each unit.
    node: this node.
    is_split: whether the last unit, the tail, is computed in a pass of its own, after other passes maybe. So what it
        needs is handed on whole, as to a node that has computed nothing before.
    """

    owners: tuple[str, ...]
    node: str
    is_split: bool = False

    @property
    def body(self) -> Share:
        """What this node computes in a pass of all units but the tail, where that is split off."""
        return Share((*self.owners[:-1], TAIL), self.node) if self.is_split else self

    @property
    def tail(self) -> Share | None:
        """What this node computes in a pass of the tail; None where it has none."""
        has_tail = self.is_split and self.owners[-1] == self.node
        return Share((*self.owners[:-1], TAIL), TAIL) if has_tail else None

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Return this node's units, as ranges [first, end)."""
        runs = [list(units) for _, units in itertools.groupby(range(len(self.owners)), self.owners.__getitem__)]
        return [(units[0], units[-1] + 1) for units in runs if self.owners[units[0]] == self.node]


def own_part(graph: GraphMap, layout: Layout, share: Share) -> GraphMap:
    """Return `graph` as this node computes it: other nodes' units read nothing and are skipped."""
    own = list(graph)
    borders = {layout.start_of(unit) for pair in share.ranges for unit in pair}
    for unit in range(len(share.owners)):
        for i in range(layout.start_of(unit), layout.start_of(unit + 1)):
            if share.owners[layout.strays.get(i, unit)] != share.node:
                own[i] = replace(graph[i], reads=(), is_computed=False, expert_ids=None)
    for i in borders - {0, len(graph)}:
        own[i] = replace(own[i], is_border=True)
    return tuple(own)


class Slice:
    """The steps of a share in a graph of `layout`: what is known of it is received, computed and handed on."""

    def __init__(self, share: Share, transport: Transport, layout: Layout) -> None:
        self._share, self._transport, self._layout = share, transport, layout
        self._at: dict[int, int] = {}
        self._came = "", False  # who handed over what is computed with, and whether infinities were among it

    def register(self, graph: GraphMap, steps: Steps) -> None:
        """Receive before each range, and hand on after it."""
        layout, owners = self._layout, self._share.owners
        steps.add_before(0, lambda _: self._begin())
        for first, end in self._share.ranges:
            if first > 0:
                taken = self._watch(layout.passed_on(owners, first), steps)
                steps.stop_before(layout.start_of(first), self._receive_step(first, taken))
            if end < len(owners):
                given = self._watch(layout.passed_on(owners, end), steps)
                steps.add_after(layout.start_of(end) - 1, self._send_step(end, owners[end], given))

    def _begin(self) -> None:
        self._at.clear()
        self._came = "", False
        self._transport.begin()

    def _watch(self, storages: Sequence[int], steps: Steps) -> list[int]:
        """Have the tensors that own `storages` noted as they pass; return their ordinals."""
        ordinals = [o for s in storages if (o := self._layout.flow.storages[s].producer) is not None]
        for ordinal in ordinals:
            steps.add_before(ordinal, functools.partial(self._at.__setitem__, ordinal))
        return ordinals

    def _receive_step(self, unit: int, ordinals: Sequence[int]) -> Step:
        sender = self._share.owners[unit - 1]

        def receive(_: int) -> None:
            targets = [_numbers(self._at[ordinal]) for ordinal in ordinals]
            parts = self._transport.receive(unit, [target.nbytes for target in targets])
            ranges = [_range_of(part) for part, target in zip(parts, targets, strict=True) if target.format == "f"]
            if any(np.isnan(lowest) for lowest, _ in ranges):
                raise ProtocolError(f"the activation before unit {unit} has what is no number (NaN)", node=sender)
            self._came = sender, not np.isfinite(ranges).all()
            for part, target in zip(parts, targets, strict=True):
                target.cast("B")[:] = part

        return receive

    def _send_step(self, unit: int, node: str, ordinals: Sequence[int]) -> Callable[[int], None]:
        def send(_: int) -> None:
            parts = [_numbers(self._at[ordinal]) for ordinal in ordinals]
            if any(np.isnan(_range_of(part)[0]) for part in parts if part.format == "f"):
                sender, had_infinities = self._came
                whose = sender if had_infinities else self._share.node
                raise NotNumbers(
                    f"the layers before unit {unit} gave what is no number (NaN)", node=whose, after=sender
                )
            self._transport.send(unit, node, parts)

        return send


def _range_of(part: memoryview) -> tuple[float, float]:
    """Return the least and the greatest of the float32 numbers in `part`; NaN where one of them is that."""
    numbers = np.frombuffer(part, np.float32)
    return (float(numbers.min()), float(numbers.max())) if len(numbers) else (0.0, 0.0)


def _numbers(address: int) -> memoryview:
    """Return the memory of the tensor at `address`, of format `f` where it is float32."""
    tensor, size_bytes = ggml.tensor_at(address), ggml.functions().ggml_nbytes(address)
    memory = _libc.view(tensor.data, size_bytes) if size_bytes else memoryview(bytearray())
    return cast("memoryview", memory.cast("f")) if tensor.type == ggml.TYPE_IDS["f32"] else memory
