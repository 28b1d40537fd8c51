"""How long a pass takes on a device that was measured. Pure: work and a profile in, seconds out.

The time of a pass is that of its kernels, which go through the weights, that of attention over the tokens before, and a
little for every node and every stop. The kernels' speed was measured at a few widths for each type and row length.
Between two of these the time per byte is taken to be affine in the number of tokens. A type or row length that was not
measured is taken to be like the nearest one that was: a device is characterised by a few samples (as in HELP, Lee et
al. 2021, which uses a learned predictor).
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from typing import NamedTuple

from edge_run.base.profile import DeviceProfile, GpuProfile, weight_kind

TILE_TOKENS = 64  # from which on llama.cpp's attention on a processor takes many tokens at once
OP_OFFLOAD_TOKENS = 32  # from which on llama.cpp copies weights to a GPU rather than compute with them where they are


def overlapped_s(reading_s: float, busy_s: float) -> float:
    """Return the seconds of a pass that reads while it computes: not entirely the longer of the two.

    Reading and computing overlap as far as the window of frames reaches, so less where both take the same time.
    """
    return math.sqrt(math.hypot(reading_s**2, busy_s**2))


@dataclass(frozen=True, slots=True)
class MatmulWork:
    """The weights of all matrix multiplications of one kind in a pass.

    type_name: their ggml type.
    row_elements: the length of a row.
    size_bytes: their total size.
    n_experts: the experts of a layer, 0 where the weights are dense.
    n_used: how many of these a token uses, 0 where the weights are dense.
    is_head: whether only the tokens whose logits are asked for use them.
    """

    type_name: str
    row_elements: int
    size_bytes: int
    n_experts: int = 0
    n_used: int = 0
    is_head: bool = False

    @property
    def kind(self) -> str:
        """The kind of the weights; see `weight_kind`."""
        return weight_kind(self.type_name, self.row_elements, by_expert=bool(self.n_experts))


class AttentionWindow(NamedTuple):
    """Attention to the latest positions alone: to how many, and in what share of the layers."""

    tokens: int = 0
    share: float = 0.0


NO_WINDOW = AttentionWindow()


@dataclass(frozen=True, slots=True)
class PassWork:
    """What a pass computes.

    matmuls: its matrix multiplications, by kind.
    n_nodes: the nodes of its graph.
    n_stops: how often llama.cpp stops between nodes.
    attention_flops: for each token and each position that the token attends to.
    expert_tensor_bytes: the size of the largest tensor that holds experts.
    window: of the attention.
    """

    matmuls: tuple[MatmulWork, ...]
    n_nodes: int
    n_stops: int
    attention_flops: float
    expert_tensor_bytes: int = 0
    window: AttentionWindow = NO_WINDOW

    def attention_of(self, tokens: int, position: int) -> float:
        """Return the operations of attention in a pass of `tokens` tokens after `position` others."""
        pairs = tokens * (position + (tokens + 1) / 2)
        beyond = max(0, position + tokens - self.window.tokens)  # what the last token does not see
        n_beyond = min(tokens, beyond)  # the tokens that do not see all
        unseen = n_beyond * beyond - n_beyond * (n_beyond - 1) / 2
        return self.attention_flops * (pairs - self.window.share * unseen)


class CostModel:
    """Predicts seconds on the device of `profile`, computing with `threads` threads.

    tile_tokens: from how many tokens on attention is as fast as over a wide pass.
    """

    def __init__(self, profile: DeviceProfile, threads: int, tile_tokens: int = TILE_TOKENS) -> None:
        self._profile, self._tile_tokens = profile, tile_tokens
        self._kernels = [kernel for kernel in profile.kernels if kernel.threads == threads] or list(profile.kernels)

    def compute_s(self, work: PassWork, tokens: int, position: int, n_outputs: int = 1) -> float:
        """Return the seconds of a pass of `tokens` tokens after `position` others, with all weights in memory."""
        matmuls = sum(self._matmul_s(matmul, n_outputs if matmul.is_head else tokens) for matmul in work.matmuls)
        narrow, wide = self._profile.attention_flops_per_s
        attention = work.attention_of(tokens, position) / (narrow if tokens < self._tile_tokens else wide)
        return matmuls + attention + work.n_nodes * self._profile.node_s + work.n_stops * self._profile.stop_s

    def _matmul_s(self, work: MatmulWork, tokens: float) -> float:
        if tokens <= 0:
            return 0.0
        if not work.n_experts:
            return work.size_bytes * self._s_per_byte(work, tokens)
        share = work.n_used / work.n_experts
        touched: float = 1 - (1 - share) ** tokens
        return work.size_bytes * touched * self._s_per_byte(work, tokens * share / touched)

    def _s_per_byte(self, work: MatmulWork, tokens: float) -> float:
        points = self._points(work)
        before = [point for point in points if point[0] <= tokens] or points[:1]
        after = [point for point in points if point[0] > tokens]
        x0, y0 = before[-1]
        if not after:
            return float(y0 * tokens / x0)
        x1, y1 = after[0]
        return y0 if x1 == x0 else y0 + (y1 - y0) * max(0.0, tokens - x0) / (x1 - x0)

    def _points(self, work: MatmulWork) -> list[tuple[int, float]]:
        """Return (width, seconds per byte) of the measured kernels that are most like `work`."""
        same_way = [kernel for kernel in self._kernels if kernel.by_expert == bool(work.n_experts)] or self._kernels
        alike = [kernel for kernel in same_way if kernel.type_name == work.type_name] or same_way
        nearest = min((kernel.row_elements for kernel in alike), key=lambda row: abs(row - work.row_elements))
        by_width: dict[int, list[float]] = {}
        for kernel in alike:
            if kernel.row_elements == nearest:
                by_width.setdefault(kernel.tokens, []).append(1 / kernel.bytes_per_s)
        return [(tokens, statistics.median(values)) for tokens, values in sorted(by_width.items())]


@dataclass(frozen=True, slots=True)
class GpuWork:
    """The part of a pass that a GPU computes.

    work: that part.
    n_borders: how often the pass goes over from the processor to the GPU or back.
    has_op_offload: whether passes of many tokens run on the GPU whole, with copies of the weights that lie in DRAM.
    """

    work: PassWork
    n_borders: int
    has_op_offload: bool


class SharedCost:
    """Predicts seconds of passes that the processor and a GPU compute one after the other."""

    def __init__(self, profile: DeviceProfile, threads: int, gpu: GpuProfile, part: GpuWork) -> None:
        self._processor = CostModel(profile, threads)
        speeds = replace(profile, kernels=gpu.kernels, attention_flops_per_s=gpu.attention_flops_per_s)
        self._gpu = CostModel(replace(speeds, node_s=gpu.node_s, stop_s=profile.stop_s), 0, tile_tokens=2)
        self._profile, self._part = gpu, part

    def compute_s(self, work: PassWork, tokens: int, position: int, n_outputs: int = 1) -> float:
        """Return the seconds of a pass whose work on the processor is `work`; see `CostModel.compute_s`."""
        is_copied = self._part.has_op_offload and tokens >= OP_OFFLOAD_TOKENS
        rest_s = (self._gpu if is_copied else self._processor).compute_s(work, tokens, position, n_outputs)
        copied_bytes = sum(matmul.size_bytes for matmul in work.matmuls) if is_copied else 0
        there_s = self._gpu.compute_s(self._part.work, tokens, position, n_outputs)
        handing_s = self._part.n_borders * self._profile.border_s
        return rest_s + there_s + handing_s + copied_bytes / self._profile.upload_bytes_per_s
