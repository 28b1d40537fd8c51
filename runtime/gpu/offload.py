"""The part of a model that lies on a GPU, chosen under a budget from the sizes that llama.cpp reports.

For each placement, a model without data is loaded, and a context made that only reports its sizes, so nothing is
allocated. llama.cpp itself thus says which tensors it puts where, also where the GPU lacks a kernel, and how large its
buffers are.
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
from edge_run.runtime.gpu.devices import Gpu, choose_gpu, find_gpus
from edge_run.runtime.gpu.loading import gpu_tensors, host_weights
from edge_run.runtime.graph.nodes import GraphMap
from edge_run.runtime.inspection.draft_file import DraftFile
from edge_run.runtime.llama import _ggml as ggml
from edge_run.runtime.llama.context_shape import context_shape
from edge_run.runtime.llama.holdings import Holdings
from edge_run.runtime.llama.load_placement import LoadPlacement
from edge_run.runtime.llama.model import LlamaContext, LlamaModel
from edge_run.tiers.gguf import GgufModel
from edge_run.tiers.stub import Stubs, outline_heads, outline_metadata
from edge_run.tiers.upload import STAGING_BYTES

logger = logging.getLogger(__name__)

ROWS_ONLY = b"token_embd.weight"  # as the output is on the GPU where anything is
ROUNDED_BYTES = 2 * (MIB // 100)  # llama.cpp tells sizes in hundredths of a MiB, here keys and values, and buffers


@dataclass(frozen=True, slots=True)
class OffloadSizes:
    """The sizes of a placement.

    weights_bytes: the weights on the GPU.
    kv_bytes: the keys and values on the GPU.
    buffer_bytes: the buffers on the GPU.
    host_kv_bytes: the keys and values in DRAM.
    host_buffer_bytes: the buffers in DRAM.
    names: the tensors on the GPU.
    copied_bytes: the largest weight that is copied to the GPU for a pass, through as much memory of the machine.
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
        """The memory of the GPU that it takes."""
        return self.weights_bytes + self.kv_bytes + self.buffer_bytes


@dataclass(frozen=True, slots=True)
class Offload:
    """A part of a model on a GPU, under a budget.

    gpu: the GPU.
    budget_bytes: the budget of its memory.
    placement: the layers there.
    sizes: the memory that they take.
    draft_bytes: the part of the budget that a draft model takes.
    has_op_offload: whether passes of many tokens run on the GPU whole, with copies of the weights in DRAM.
    """

    gpu: Gpu
    budget_bytes: int
    placement: Placement
    sizes: OffloadSizes
    draft_bytes: int = 0
    has_op_offload: bool = False

    @property
    def plan(self) -> GpuPlan:
        """The offload as an item of a plan."""
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
        """The placement that llama.cpp is given."""
        return LoadPlacement(self.gpu.handle, self.gpu.name, self.placement, self.has_op_offload)

    @property
    def key(self) -> str:
        """Its part of the numerics key."""
        return f"{self.gpu.name} ({self.gpu.description}): {self.placement.n_layers} layers, " + (
            (f"{self.placement.n_narrow} of them narrow" if self.placement.n_narrow else "all whole")
            + (", and op offload" if self.has_op_offload else "")
        )

    @property
    def part(self) -> str:
        """The name of its part of the model, on which the speed of tokens depends."""
        return f"{self.gpu.description}: {self.placement.n_layers}, {self.placement.n_narrow}"

    @property
    def process_bytes(self) -> int:
        """The part that is in this process's resident memory once a context is made, where that is certain."""
        return self.sizes.weights_bytes + self.sizes.kv_bytes if self.gpu.is_software else 0

    @property
    def moved_bytes(self) -> int:
        """The part that takes no memory of the machine."""
        return self.sizes.weights_bytes + self.sizes.kv_bytes if self.gpu.has_own_memory else 0

    def streamed(self, gguf: GgufModel) -> Offload:
        """Return the offload for weights in DRAM that stream: without op offload where these stream by expert."""
        is_moe = gguf.is_mixture
        return replace(self, has_op_offload=False) if is_moe else self

    def on_host(self, graph: GraphMap) -> GraphMap:
        """Return `graph`, of a model without a GPU, without the reads of weights that lie on the GPU."""
        names = self.sizes.names
        return tuple(
            replace(node, reads=tuple(read for read in node.reads if read.row_bytes or read.name not in names))
            for node in graph
        )

    def added_to(self, holdings: Holdings) -> Holdings:
        """Return `holdings` of a context with this part on the GPU."""
        taken_bytes = 0 if self.gpu.has_own_memory else self.sizes.total_bytes
        return replace(
            holdings,
            kv_bytes=self.sizes.host_kv_bytes,
            buffer_bytes=self.sizes.host_buffer_bytes,
            upload_bytes=STAGING_BYTES + (self.sizes.copied_bytes if self.has_op_offload else 0),
            gpu_bytes=taken_bytes,  # less a draft model's, which has a line of its own
        )

    def measured(self, context: LlamaContext) -> Offload:
        """Return the offload with the sizes of `context`. Raises OffloadTooLarge where they are over the budget."""
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
    """llama.cpp took more of a GPU's memory than it had reported."""


TokenTime: TypeAlias = Callable[[Offload | None], float | None]


class Offloads(NamedTuple):
    """The parts of a model and of its draft model that go to a GPU; of a draft model, all or nothing."""

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
    """Return the parts of `gguf` and of its draft model that go to a GPU.

    memory_bytes: the budget of the machine's memory.
    draft_file: the draft model.
    token_s: predicts the seconds of a token with an offload, where these are known.

    As much goes there as fits, or less where tokens are then faster by `token_s`. A draft model comes first, because it
    is small and read as a whole for each guess, unless no part of the model would fit beside it. Where the GPU has no
    memory of its own, at most half of `memory_bytes` is taken unless the user asks for more. Raises ConfigError where
    the user asks for memory of a GPU and there is none, BudgetError where no layer fits the memory asked for.
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
    fitted = functools.partial(_fitted, gguf, config, gpu, has_op_offload=has_op_offload, token_s=token_s)
    draft = _fitted(draft_file.gguf, draft_file.config, gpu, budget_bytes, is_asked=False) if draft_file else None
    if draft and draft_file and draft.placement == _choices(draft_file.gguf, gpu)[-1]:
        taken_bytes = draft.sizes.total_bytes
        if beside := fitted(budget_bytes - taken_bytes, is_asked=False):
            return Offloads(replace(beside, budget_bytes=budget_bytes, draft_bytes=taken_bytes), draft)
    return Offloads(fitted(budget_bytes, is_asked=wanted is not None))


def _choices(gguf: GgufModel, gpu: Gpu) -> list[Placement]:
    """Return the placements of `gguf` on `gpu`. Mesa's software driver ends the process over experts with biases."""
    layers, names = gguf.value("block_count"), [tensor.name for tensor in gguf.tensors]
    may_hold_experts = not gpu.is_software or not has_biased_experts(names)
    if not may_hold_experts:
        logger.warning("%s: experts with biases stay in memory; this driver would end the process", gpu.description)
    return placements(names, layers if isinstance(layers, int) else 0, may_hold_experts=may_hold_experts)


def shrink_offload(gguf: GgufModel, config: ModelConfig, offload: Offload, taken_bytes: int) -> Offload | None:
    """Return a smaller offload than `offload`, which took `taken_bytes`, more than its budget; None for nothing."""
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
    """Return the size of the largest weight of `model` in DRAM that is not only read by row."""
    weights = host_weights(model)
    return max((weight.length for name, weight in weights.items() if name != ROWS_ONLY), default=0)
