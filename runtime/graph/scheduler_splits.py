"""How llama.cpp's scheduler splits a graph over devices: where each split begins, and what is copied to its device.

The scheduler copies all that a split reads from other devices, also weights, before it asks about a node of the split.
It says so beforehand only in its log, each time it schedules a graph anew; a graph that is reused is split as before.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_SPLIT = re.compile(rb"\s*## SPLIT #(\d+): (\S+) # (\d+) inputs")
_INPUT = re.compile(rb"\[(.+) \([^()]*\)\] ?")
_NODE = re.compile(rb"node #\s*(\d+) \(")


@dataclass(frozen=True, slots=True)
class Split:
    """One split of the scheduler.

    first: its first node.
    device: the device that computes it.
    inputs: the names of the tensors that are copied to the device before.
    """

    first: int
    device: str
    inputs: tuple[bytes, ...]


class SplitAccount:
    """Parses the log for the splits of the graph that was scheduled last."""

    def __init__(self) -> None:
        self.n_told = 0
        self._splits: list[Split] = []
        self._device = ""
        self._inputs: list[bytes] | None = None
        self._taken: tuple[Split, ...] = ()

    @property
    def splits(self) -> tuple[Split, ...]:
        """The splits of the graph; the same object until another graph is scheduled."""
        if len(self._taken) != len(self._splits):
            self._taken = tuple(self._splits)
        return self._taken

    def hear(self, text: bytes) -> None:
        """Take in a piece of the log; lines about anything else are ignored."""
        if begun := _SPLIT.match(text):
            if begun[1] == b"0":
                self._splits, self._taken, self.n_told = [], (), self.n_told + 1
            self._device, self._inputs = begun[2].decode(), []
        elif self._inputs is not None and (copied := _INPUT.fullmatch(text)):
            self._inputs.append(copied[1])
        elif self._inputs is not None and (node := _NODE.match(text)):
            first = int(node[1]) if self._splits else 0  # views before the first node that is named are in it too
            self._splits.append(Split(first, self._device, tuple(self._inputs)))
            self._inputs = None
