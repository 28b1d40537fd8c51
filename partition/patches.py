"""Which part of each layer's input a patch of the last layer's output needs, and what padding it keeps at the edges.

After MCUNetV2 (Lin et al., 2021, section 3): the first layers of a network run patch by patch, so that none of their
tensors is ever whole. Every patch reads somewhat more than its share (the halo), which costs some computing again. A
patch at an edge of the image is padded there as the whole was, layer by layer, and nowhere else: the result is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Window:
    """How a layer moves along one axis. size: of its input there; pads: before and after it."""

    kernel: int
    stride: int
    dilation: int
    pads: tuple[int, int]
    size: int

    @property
    def output_size(self) -> int:
        """The size of what it makes."""
        return (self.size + sum(self.pads) - self.dilation * (self.kernel - 1) - 1) // self.stride + 1


@dataclass(frozen=True, slots=True)
class InputSpan:
    """From start to end of a layer's input along one axis, and the padding that this part of it keeps."""

    start: int
    end: int
    pads: tuple[int, int]


def plan_spans(windows: Sequence[Window], start: int, end: int) -> list[InputSpan]:
    """Return what each of `windows`, first layer first, reads for the last one to make its output from start to end."""
    spans: list[InputSpan] = []
    for window in reversed(windows):
        first = start * window.stride - window.pads[0]
        last = (end - 1) * window.stride - window.pads[0] + window.dilation * (window.kernel - 1) + 1
        start, end = max(first, 0), min(last, window.size)
        spans.append(InputSpan(start, end, (start - first, last - end)))
    return spans[::-1]


def plan_tiles(size: int, tiles: int) -> list[tuple[int, int]]:
    """Return `tiles` parts of a size, as equal as can be, none of them empty."""
    tiles = max(1, min(tiles, size))
    edges = [size * number // tiles for number in range(tiles + 1)]
    return list(pairwise(edges))
