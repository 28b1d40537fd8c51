"""What of a model lies on a GPU: chosen under a budget, by what llama.cpp says each placement takes.

Nothing is allocated to find that out: a model without data is loaded for a placement, and a context made that only
tells its sizes. So what llama.cpp would do is asked, and not worked out anew: which tensors it puts where, also where
the GPU lacks a kernel, and how large its buffers are.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from edge_run.base.config import ModelConfig
from edge_run.base.errors import BudgetError
from edge_run.base.results import GpuPlan
from edge_run.base.units import MIB, format_size
from edge_run.partition.placement import (
    NOTHING,
    Placement,
    best_placement,
    fastest,
    has_biased_experts,
    placements,
    worth_timing,
)
from edge_run.runtime.gpu.devices import SOFTWARE, Gpu, choose_gpu, find_gpus
from edge_run.runtime.gpu.loading import gpu_tensors, host_weights
from edge_run.runtime.graph.nodes import GraphMap
from edge_run.runtime.inspection.draft_file import DraftFile
from edge_run.runtime.llama import _ggml as ggml
from edge_run.runtime.llama.context_shape import context_shape
from edge_run.runtime.llama.holdings import Holdings
from edge_run.runtime.llama.load_placement import LoadPlacement
from edge_run.runtime.llama.model import LlamaContext, LlamaModel
from edge_run.tiers.gguf import GgufModel
from edge_run.tiers.outline import outline_heads, outline_metadata
from edge_run.tiers.stub import Stubs
from edge_run.tiers.upload import STAGING_BYTES

logger = logging.getLogger(__name__)

ROWS_ONLY = b"token_embd.weight"  # as the output is on the GPU where anything is
ROUNDED_BYTES = 2 * (MIB // 100)  # llama.cpp tells sizes in hundredths of a MiB, here keys and values, and buffers


@dataclass(frozen=True, slots=True)
class OffloadSizes:
    """Bytes that a placement takes on the GPU, and that its context takes in DRAM; names of the tensors on the GPU.

    copied_bytes: of the largest weight that is copied there for a pass, through as much memory of the machine.
    """

    weights_bytes: int
    kv_bytes: int
    buffer_bytes: int
    host_kv_bytes: int
    host_buffer_bytes: int
    names: frozenset[str]
    copied_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All that it takes on the GPU."""
        return self.weights_bytes + self.kv_bytes + self.buffer_bytes


@dataclass(frozen=True, slots=True)
class Offload:
    """A part of a model on a GPU, under a budget. draft_bytes: what a draft model has there, of the same budget.

    has_op_offload: passes of many tokens are computed there whole; what lies in DRAM is copied there for each of them.
    """

    gpu: Gpu
    budget_bytes: int
    placement: Placement
    sizes: OffloadSizes
    draft_bytes: int = 0
    has_op_offload: bool = False

    @property
    def plan(self) -> GpuPlan:
        """What a plan says of it."""
        return GpuPlan(
            device=self.gpu.name,
            kind=self.gpu.kind,
            budget_bytes=self.budget_bytes,
            weights_bytes=self.sizes.weights_bytes,
            kv_bytes=self.sizes.kv_bytes,
            buffer_bytes=self.sizes.buffer_bytes,
            layers=self.placement.n_layers,
            narrow_layers=self.placement.n_narrow,
            draft_bytes=self.draft_bytes,
            op_offload=self.has_op_offload,
        )

    @property
    def load_placement(self) -> LoadPlacement:
        """What llama.cpp is told of it."""
        return LoadPlacement(self.gpu.handle, self.gpu.name, self.placement, self.has_op_offload)

    @property
    def key(self) -> str:
        """What of it decides the numbers."""
        return f"{self.gpu.name} ({self.gpu.description}): {self.placement.n_layers} layers, " + (
            (f"{self.placement.n_narrow} of them narrow" if self.placement.n_narrow else "all whole")
            + (", and op offload" if self.has_op_offload else "")
        )

    @property
    def part(self) -> str:
        """What of it decides how fast tokens are."""
        return f"{self.gpu.description}: {self.placement.n_layers}, {self.placement.n_narrow}"

    @property
    def process_bytes(self) -> int:
        """What of it is in this process's resident memory once a context is made; counted only where that is sure."""
        return self.sizes.weights_bytes + self.sizes.kv_bytes if self.gpu.kind == SOFTWARE else 0

    @property
    def moved_bytes(self) -> int:
        """What of it takes no memory of the machine."""
        return self.sizes.weights_bytes + self.sizes.kv_bytes if self.gpu.has_own_memory else 0

    def streamed(self, gguf: GgufModel) -> Offload:
        """Return it as it is where what lies in DRAM streams: nothing is copied from where only chosen experts are."""
        is_moe = bool(gguf.value("expert_count"))
        return replace(self, has_op_offload=False) if is_moe else self

    def on_host(self, graph: GraphMap) -> GraphMap:
        """Return `graph`, of a model without a GPU, with what is read from the machine's memory besides."""
        names = self.sizes.names
        return tuple(
            replace(node, reads=tuple(read for read in node.reads if read.row_bytes or read.name not in names))
            for node in graph
        )

    def added_to(self, holdings: Holdings) -> Holdings:
        """Return `holdings` of a context that has this part of it on the GPU."""
        taken_bytes = 0 if self.gpu.has_own_memory else self.sizes.total_bytes
        return replace(
            holdings,
            kv_bytes=self.sizes.host_kv_bytes,
            buffer_bytes=self.sizes.host_buffer_bytes,
            upload_bytes=STAGING_BYTES + (self.sizes.copied_bytes if self.has_op_offload else 0),
            gpu_bytes=taken_bytes,  # less a draft model's, which has a line of its own
        )

    def measured(self, context: LlamaContext) -> Offload:
        """Return it with what `context` takes. Raises OffloadTooLarge where that is more than the budget."""
        sizes = replace(
            self.sizes,
            kv_bytes=context.gpu_kv_bytes,
            buffer_bytes=context.gpu_buffer_bytes,
            host_kv_bytes=context.kv_bytes,
            host_buffer_bytes=context.buffer_bytes,
        )
        taken_bytes = sizes.total_bytes + self.draft_bytes
        if taken_bytes > self.budget_bytes:
            raise OffloadTooLarge(
                f"GPU memory {format_size(self.budget_bytes)}: llama.cpp takes {format_size(taken_bytes)}",
                found_bytes=self.budget_bytes,
                minimum_bytes=taken_bytes,
            )
        return replace(self, sizes=sizes)


class OffloadTooLarge(BudgetError):
    """llama.cpp took more of a GPU than it had said."""


TokenTime: TypeAlias = Callable[[Offload | None], float | None]


class Offloads(NamedTuple):
    """What of a model is to lie on a GPU, and what of its draft model: all of that, or nothing."""

    model: Offload | None = None
    draft: Offload | None = None


def _not_known(offload: Offload | None) -> float | None:
    return None


def plan_offload(
    gguf: GgufModel,
    config: ModelConfig,
    memory_bytes: int,
    draft_file: DraftFile | None = None,
    token_s: TokenTime = _not_known,
) -> Offloads:
    """Return what of `gguf`, and of its draft model, is to lie on a GPU. memory_bytes: the machine's, as budgeted.

    That is the most that fits, or less where tokens are faster so, by `token_s`, which may know what a token takes with
    so much of the model there. A draft model comes first: it is small, and read as a whole for each guess. But nothing
    of it goes there where no part of the model would fit beside it. Where the GPU has no memory of its own, at most
    half of that budget is taken unless more is asked for. Raises ConfigError where memory is asked for and there is no
    GPU, BudgetError where what is asked for holds nothing.
    """
    if config.gpu_memory == 0:
        return Offloads()
    wanted = None if config.gpu_memory is None else int(config.gpu_memory)
    if (chosen := choose_gpu(wanted, find_gpus())) is None:
        return Offloads()
    gpu, budget_bytes = chosen
    has_op_offload = gpu.has_own_memory if config.op_offload is None else config.op_offload
    if wanted is None and not gpu.has_own_memory:
        budget_bytes = min(budget_bytes, memory_bytes // 2)
    draft = _fitted(draft_file.gguf, draft_file.config, gpu, budget_bytes, is_asked=False) if draft_file else None
    if draft and draft_file and draft.placement == _choices(draft_file.gguf, gpu)[-1]:
        taken_bytes = draft.sizes.total_bytes
        left_bytes = budget_bytes - taken_bytes
        if beside := _fitted(
            gguf, config, gpu, left_bytes, is_asked=False, has_op_offload=has_op_offload, token_s=token_s
        ):
            return Offloads(replace(beside, budget_bytes=budget_bytes, draft_bytes=taken_bytes), draft)
    is_asked = wanted is not None
    return Offloads(
        _fitted(gguf, config, gpu, budget_bytes, is_asked=is_asked, has_op_offload=has_op_offload, token_s=token_s)
    )


def _choices(gguf: GgufModel, gpu: Gpu) -> list[Placement]:
    """Return what of `gguf` may lie on `gpu`. Mesa's software driver ends the process over experts with biases."""
    layers, names = gguf.value("block_count"), [tensor.name for tensor in gguf.tensors]
    may_hold_experts = gpu.kind != SOFTWARE or not has_biased_experts(names)
    if not may_hold_experts:
        logger.warning("%s: experts with biases stay in memory; this driver would end the process", gpu.description)
    return placements(names, layers if isinstance(layers, int) else 0, may_hold_experts=may_hold_experts)


def shrink_offload(gguf: GgufModel, config: ModelConfig, offload: Offload, taken_bytes: int) -> Offload | None:
    """Return a smaller one than `offload`, which took `taken_bytes`, more than its budget; None for nothing."""
    excess_bytes = taken_bytes - offload.budget_bytes
    room_bytes = offload.sizes.total_bytes - excess_bytes
    less = _fitted(gguf, config, offload.gpu, room_bytes, is_asked=False, has_op_offload=offload.has_op_offload)
    return replace(less, budget_bytes=offload.budget_bytes, draft_bytes=offload.draft_bytes) if less else None


def _fitted(
    gguf: GgufModel,
    config: ModelConfig,
    gpu: Gpu,
    budget_bytes: int,
    *,
    is_asked: bool,
    has_op_offload: bool = False,
    token_s: TokenTime = _not_known,
) -> Offload | None:
    choices = _choices(gguf, gpu)
    with Stubs(gguf.shards, outline_heads(gguf)) as stubs:

        @functools.cache
        def made(placement: Placement) -> Offload | None:
            bare = Offload(gpu, budget_bytes, placement, _NO_SIZES, has_op_offload=has_op_offload)
            return replace(bare, sizes=_sizes(gguf, config, stubs, bare)) if placement != NOTHING else None

        def needed(placement: Placement) -> int:
            return offload.sizes.total_bytes if (offload := made(placement)) else 0

        largest = best_placement(choices, budget_bytes, needed, is_asked=is_asked)
        if largest == NOTHING:
            return None
        options = worth_timing(choices, largest, is_asked=is_asked)
        return made(fastest(options, lambda placement: token_s(made(placement))))


_NO_SIZES = OffloadSizes(0, 0, 0, 0, 0, frozenset())


def _sizes(gguf: GgufModel, config: ModelConfig, stubs: Stubs, offload: Offload) -> OffloadSizes:
    metadata, path = outline_metadata(gguf), gguf.shards[0].path
    placement = offload.load_placement
    with LlamaModel(stubs.paths, metadata=metadata, mode="sized", path=path, placement=placement) as model:
        context = LlamaContext(model, context_shape(config, model.trained_context_tokens, threads=1))
        context.close()
        on_gpu = gpu_tensors(model)
        n_layers = offload.placement.n_layers - 1
        kv_bytes = sum(min(size, -(-size * n_layers // layers)) for size, layers in context.caches)
        return OffloadSizes(
            weights_bytes=ggml.allocated_bytes(on_gpu),
            kv_bytes=kv_bytes,
            buffer_bytes=context.gpu_buffer_bytes + ROUNDED_BYTES,
            host_kv_bytes=sum(size for size, _ in context.caches) - kv_bytes,
            host_buffer_bytes=context.buffer_bytes,
            names=frozenset(ggml.tensor_name(tensor).decode("utf-8", "replace") for tensor in on_gpu),
            copied_bytes=_largest_copied(model) if offload.has_op_offload and offload.gpu.has_own_memory else 0,
        )


def _largest_copied(model: LlamaModel) -> int:
    """Return the bytes of the largest weight of `model` in DRAM that is not only looked up by row."""
    weights = host_weights(model)
    return max((weight.length for name, weight in weights.items() if name != ROWS_ONLY), default=0)
