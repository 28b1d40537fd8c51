"""Which part of each layer's input a patch of the last layer's output needs, and its padding at the image's edges.

After MCUNetV2 (Lin et al., 2021, section 3): the first layers of a network run patch by patch, so that none of their
tensors is ever whole. Neighbouring patches overlap (the halo), and the overlap is computed twice. A patch is padded,
layer by layer, only where it touches an edge of the image, as the whole image would be. So the result is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Window:
    """How the kernel of a layer moves along one axis.

    kernel: its size.
    stride: its step.
    dilation: the distance of its taps.
    pads: the padding before and after the input.
    size: the size of the input.
    """

    kernel: int
    stride: int
    dilation: int
    pads: tuple[int, int]
    size: int

    @property
    def output_size(self) -> int:
        """The size of the output."""
        return (self.size + sum(self.pads) - self.dilation * (self.kernel - 1) - 1) // self.stride + 1


@dataclass(frozen=True, slots=True)
class InputSpan:
    """A part of a layer's input along one axis.

    start: its first position.
    end: the position after the last one.
    pads: the padding before and after it that remains.
    """

    start: int
    end: int
    pads: tuple[int, int]


def plan_spans(windows: Sequence[Window], start: int, end: int) -> list[InputSpan]:
    """Return the input that each layer reads for the last one to make its output from `start` to `end`.

    windows: the layers, the first one first.
    """
    spans: list[InputSpan] = []
    for window in reversed(windows):
        first = start * window.stride - window.pads[0]
        last = (end - 1) * window.stride - window.pads[0] + window.dilation * (window.kernel - 1) + 1
        start, end = max(first, 0), min(last, window.size)
        spans.append(InputSpan(start, end, (start - first, last - end)))
    return spans[::-1]


def plan_tiles(size: int, tiles: int) -> list[tuple[int, int]]:
    """Return `size` cut into `tiles` parts that are as equal as possible; none of them is empty."""
    tiles = max(1, min(tiles, size))
    edges = [size * number // tiles for number in range(tiles + 1)]
    return list(pairwise(edges))
