"""Decides for each activation whether it is sent as it is or in fewer bytes, by the measured speed of the link.

Numbers are packed, without loss, where that saves time. Where the user allowed compact activations, numbers may be
rounded to 8 bits, again only where that saves time. The time and the bytes of each coding are learnt by size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from edge_run.base.errors import ProtocolError
from edge_run.base.fields import shown
from edge_run.base.protocols import Clock
from edge_run.partition.activation_codec import (
    compact_bytes,
    decode_activations,
    encode_activations,
    is_worthwhile,
    pack_floats,
    packed_bytes,
    unpack_floats,
)

KINDS = PLAIN, PACKED, COMPACT = "plain", "packed", "compact"  # the later, the further from what was computed
DECODING_SHARE = 1.0  # of what coding takes, about; the other device does it
LATEST_SHARE = 0.25  # what the latest figure counts for


@dataclass(frozen=True, slots=True)
class Cost:
    """What a code takes of an activation of some size.

    seconds: to make and to read it.
    ratio: the share of bytes left.
    """

    seconds: float
    ratio: float


_GUESSES = {PACKED: (200e6, 0.87), COMPACT: (60e6, 0.3)}  # bytes a second both ways, ratio; until they are measured


@dataclass(slots=True)
class SentActivations:
    """What was handed on.

    sent_bytes: on the link.
    plain_bytes: of the same activations before they were coded.
    activations: how many went each way.
    """

    sent_bytes: int = 0
    plain_bytes: int = 0
    activations: dict[str, int] = field(default_factory=dict)


class ActivationCoder:
    """Codes what one device hands on. Not thread-safe.

    activations: `exact` or `compact`, as in ModelConfig.
    bytes_per_s: of the links to other nodes; to nodes that are not in it, activations go as they are.
    sent: is kept up to date.
    """

    def __init__(
        self,
        activations: str,
        bytes_per_s: Mapping[str, float],
        sent: SentActivations | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._kinds = (PACKED, COMPACT) if activations == "compact" else (PACKED,)
        self._bytes_per_s, self._clock = bytes_per_s, clock
        self._costs: dict[tuple[str, int], Cost] = {}
        self._sent = sent or SentActivations()

    def encode(self, node: str, parts: Sequence[memoryview]) -> tuple[list[str], list[memoryview]]:
        """Return how each part goes to `node`, and its bytes. Parts of format `f` are numbers."""
        found = [self._encode(self._bytes_per_s.get(node), part) for part in parts]
        kinds, coded = [kind for kind, _ in found], [code for _, code in found]
        sent, worst = self._sent, max(kinds, key=KINDS.index, default=PLAIN)
        sent.sent_bytes += sum(code.nbytes for code in coded)
        sent.plain_bytes += sum(part.nbytes for part in parts)
        sent.activations[worst] = sent.activations.get(worst, 0) + 1
        return kinds, coded

    def _encode(self, bytes_per_s: float | None, part: memoryview) -> tuple[str, memoryview]:
        plain = part.cast("B")
        if bytes_per_s is None or part.format != "f" or not plain.nbytes:
            return PLAIN, plain
        kind = self._choose(plain.nbytes, bytes_per_s)
        if kind == PLAIN:
            return PLAIN, plain
        started = self._clock()
        try:
            code = memoryview(_ENCODE[kind](plain))
        except ProtocolError:  # numbers that cannot be rounded
            return PLAIN, plain
        seconds = (1 + DECODING_SHARE) * (self._clock() - started)
        self._learn(kind, plain.nbytes, Cost(seconds, code.nbytes / plain.nbytes))
        return kind, code

    def _choose(self, size: int, bytes_per_s: float) -> str:
        """Return how `size` bytes arrive the soonest."""
        costs = {kind: self._cost(kind, size) for kind in self._kinds}
        better = [
            kind
            for kind, cost in costs.items()
            if is_worthwhile(size, int(size * cost.ratio), bytes_per_s, size / max(cost.seconds, 1e-9))
        ]
        return min(better, key=lambda kind: size * costs[kind].ratio / bytes_per_s + costs[kind].seconds, default=PLAIN)

    def _cost(self, kind: str, size: int) -> Cost:
        known = self._costs.get((kind, size.bit_length()))
        if known:
            return known
        per_s, ratio = _GUESSES[kind]
        return Cost(size / per_s, ratio)

    def _learn(self, kind: str, size: int, found: Cost) -> None:
        before = self._costs.get((kind, size.bit_length()), found)
        self._costs[kind, size.bit_length()] = Cost(
            before.seconds + LATEST_SHARE * (found.seconds - before.seconds),
            before.ratio + LATEST_SHARE * (found.ratio - before.ratio),
        )


def decode(kinds: object, parts: Sequence[memoryview], sizes: Sequence[int]) -> list[memoryview]:
    """Return the parts of an activation as they were, of `sizes` bytes each, which are checked before memory is taken.

    Raises ProtocolError for what is no code of `kinds`, or of something else.
    """
    kinds = [PLAIN] * len(parts) if kinds is None else kinds
    if not isinstance(kinds, list | tuple) or len(kinds) != len(parts) or any(kind not in KINDS for kind in kinds):
        raise ProtocolError(f"an activation of {len(parts)} parts says {shown(kinds)} of how they are coded")
    found = [_SIZE[kind](part) for kind, part in zip(kinds, parts, strict=True)]
    if found != list(sizes):
        raise ProtocolError(
            f"an activation came in parts of {found[:9]} bytes, needed are {list(sizes)[:9]}; the devices run "
            "different models or versions"
        )
    return [_DECODE[kind](part) for kind, part in zip(kinds, parts, strict=True)]


def _compact(plain: memoryview) -> bytes:
    return encode_activations(np.frombuffer(plain, np.float32).reshape(1, -1))


def _from_compact(code: memoryview) -> memoryview:
    return memoryview(np.ascontiguousarray(decode_activations(code)).reshape(-1).view(np.uint8).data).cast("B")


_ENCODE: dict[str, Callable[[memoryview], bytes]] = {PACKED: pack_floats, COMPACT: _compact}
_SIZE: dict[str, Callable[[memoryview], int]] = {
    PLAIN: lambda part: part.nbytes,
    PACKED: packed_bytes,
    COMPACT: compact_bytes,
}
_DECODE: dict[str, Callable[[memoryview], memoryview]] = {
    PLAIN: lambda part: part,
    PACKED: unpack_floats,
    COMPACT: _from_compact,
}
