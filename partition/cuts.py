"""Where a network can be cut in two with a single tensor between the halves, and what each half takes.

A network is only names and sizes here (`Network`), which the reader of an ONNX file fills in. Nothing is computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Operation:
    """One node.

    kind: its operator.
    inputs: the tensors that it reads, also those that the body of an If or a Loop reads from outside; an empty name
        stands for a missing one.
    outputs: the tensors that it makes.
    multiply_adds: in one pass with a batch of one; 0 where there are few.
    """

    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    multiply_adds: int = 0


@dataclass(frozen=True, slots=True)
class Network:
    """A graph of operations, in an order in which they can run.

    inputs: the tensors that the network is given, without weights.
    outputs: the tensors that it returns.
    operations: its nodes.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    operations: tuple[Operation, ...]

    def moving(self) -> list[int]:
        """Return the indices of the operations that depend on the input; the others make constants."""
        known = set(self.inputs)
        found = []
        for index, operation in enumerate(self.operations):
            if not known.isdisjoint(operation.inputs):
                known.update(operation.outputs)
                found.append(index)
        return found


def find_cuts(network: Network) -> list[str]:
    """Return every tensor that all paths from the inputs to the outputs go through, in order, the input first.

    A tensor is such a cut when it is the only one alive at some point. If an operation were neither before nor after
    the cut, its result would be alive there too, in whichever order the operations run. So one sweep finds the
    dominators. An output is no cut, because no operation follows it.
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
    """Return the indices of the operations between two cuts, and of those that make the constants they read.

    start: the earlier cut; None for the inputs.
    end: the later cut; None for the outputs.
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
    """Return the most bytes of tensors that are alive at once when `operations` run one by one, in this order.

    A tensor is alive from the operation that makes it to the last one that reads it; `ends` stay alive. The inputs and
    outputs of an operation are alive together. Tensors without a size (weights) do not count.
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
