"""Where a network can be cut in two with a single tensor between the halves, and what each half takes.

A network here is names and sizes only (`Network`): what reads an ONNX file makes one. Nothing is computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Operation:
    """One node. inputs: all it reads, with what the bodies of an If or a Loop read from outside. Empty names are none.

    multiply_adds: of one pass with a batch of one; 0 where there are none worth counting.
    """

    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    multiply_adds: int = 0


@dataclass(frozen=True, slots=True)
class Network:
    """A graph of operations in an order in which they can run. inputs, outputs: names of tensors, not of weights."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    operations: tuple[Operation, ...]

    def moving(self) -> list[int]:
        """Return which operations depend on the input; the others give constants, and belong to whoever reads them."""
        known = set(self.inputs)
        found = []
        for index, operation in enumerate(self.operations):
            if not known.isdisjoint(operation.inputs):
                known.update(operation.outputs)
                found.append(index)
        return found


def find_cuts(network: Network) -> list[str]:
    """Return every tensor that all paths from the inputs to the outputs go through, in order; the input is the first.

    A tensor is such a cut when it is the only one alive at some point: if an operation were neither before nor after
    it, that operation's result would be alive there too, in whichever order the operations run. So one sweep finds the
    dominators. An output is no cut: nothing is left behind it.
    """
    moving = network.moving()
    last_use: dict[str, int] = {}
    for index in moving:
        last_use.update(dict.fromkeys(network.operations[index].inputs, index))
    ends = set(network.outputs)
    alive = {name for name in network.inputs if name in last_use or name in ends}
    cuts = [next(iter(alive))] if len(alive) == 1 else []
    for index in moving:
        operation = network.operations[index]
        alive = {name for name in alive if name in ends or last_use[name] > index}
        alive |= {name for name in operation.outputs if name and (name in ends or last_use.get(name, -1) > index)}
        if len(alive) == 1 and (only := next(iter(alive))) not in cuts and only not in ends:
            cuts.append(only)
    return cuts


def operations_between(network: Network, start: str | None, end: str | None) -> list[int]:
    """Return which operations lead from tensor `start` to tensor `end`, with the constants that those read.

    None is the inputs, or the outputs. Both must be cuts, `start` the earlier one.
    """
    producer = {name: index for index, one in enumerate(network.operations) for name in one.outputs if name}
    wanted = list(network.outputs if end is None else (end,))
    stop = set(network.inputs if start is None else (start,))
    found: set[int] = set()
    while wanted:
        name = wanted.pop()
        index = producer.get(name)
        if name in stop or index is None or index in found:
            continue
        found.add(index)
        wanted.extend(network.operations[index].inputs)
    return sorted(found)


def multiply_adds(network: Network, operations: Iterable[int]) -> int:
    """Return the multiply-adds of these operations."""
    return sum(network.operations[index].multiply_adds for index in operations)


def peak_bytes(network: Network, operations: Sequence[int], ends: Iterable[str], sizes: Mapping[str, int]) -> int:
    """Return the most bytes of tensors that are alive at once when `operations` run in this order, one by one.

    A tensor lives from the operation that makes it to the last that reads it; `ends` live on. What an operation reads
    and makes is alive together. Tensors without a size (weights) do not count.
    """
    kept = set(ends)
    last_use: dict[str, int] = {}
    made: set[str] = set()
    for step, index in enumerate(operations):
        last_use.update(dict.fromkeys(network.operations[index].inputs, step))
        made.update(network.operations[index].outputs)
    alive = {name: sizes[name] for name in last_use if name not in made and name in sizes}
    peak = sum(alive.values())
    for step, index in enumerate(operations):
        outputs = [name for name in network.operations[index].outputs if name]
        alive.update({name: sizes.get(name, 0) for name in outputs})
        peak = max(peak, sum(alive.values()))
        for name in {*network.operations[index].inputs, *outputs} & alive.keys():
            if name not in kept and last_use.get(name, -1) <= step:
                del alive[name]
    return peak
