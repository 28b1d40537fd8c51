"""What of a model lies on a GPU: chosen under a budget, by what llama.cpp says each placement takes.

Nothing is allocated to find that out: a model without data is loaded for a placement, and a context made that only
tells its sizes. So what llama.cpp would do is asked, and not worked out anew: which tensors it puts where, also where
the GPU lacks a kernel, and how large its buffers are.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from edge_run.base.config import ModelConfig
from edge_run.base.errors import BudgetError
from edge_run.base.results import GpuPlan
from edge_run.base.units import MIB, format_size
from edge_run.partition.placement import NOTHING, Placement, best_placement, placements
from edge_run.runtime import _ggml as ggml
from edge_run.runtime.context_shape import context_shape
from edge_run.runtime.gpus import SOFTWARE, Gpu, choose_gpu, find_gpus
from edge_run.runtime.graph import GraphMap
from edge_run.runtime.llama_model import LlamaContext, LlamaModel
from edge_run.runtime.offload_loading import gpu_tensors
from edge_run.runtime.terms import Holdings
from edge_run.tiers.gguf import GgufModel
from edge_run.tiers.outline import outline_heads, outline_metadata
from edge_run.tiers.stub import Stubs
from edge_run.tiers.upload import STAGING_BYTES

ROUNDED_BYTES = 2 * (MIB // 100)  # llama.cpp tells sizes in hundredths of a MiB, here keys and values, and buffers


@dataclass(frozen=True, slots=True)
class OffloadSizes:
    """Bytes that a placement takes on the GPU, and that its context takes in DRAM; names of the tensors on the GPU."""

    weights_bytes: int
    kv_bytes: int
    buffer_bytes: int
    host_kv_bytes: int
    host_buffer_bytes: int
    names: frozenset[str]

    @property
    def total_bytes(self) -> int:
        """All that it takes on the GPU."""
        return self.weights_bytes + self.kv_bytes + self.buffer_bytes


@dataclass(frozen=True, slots=True)
class Offload:
    """A part of a model on a GPU, under a budget."""

    gpu: Gpu
    budget_bytes: int
    placement: Placement
    sizes: OffloadSizes

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
        )

    @property
    def key(self) -> str:
        """What of it decides the numbers."""
        return f"{self.gpu.name} ({self.gpu.description}): {self.placement.n_layers} layers, " + (
            f"{self.placement.n_narrow} of them narrow" if self.placement.n_narrow else "all whole"
        )

    @property
    def process_bytes(self) -> int:
        """What of it is in this process's resident memory once a context is made; counted only where that is sure."""
        return self.sizes.weights_bytes + self.sizes.kv_bytes if self.gpu.kind == SOFTWARE else 0

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
            upload_bytes=STAGING_BYTES,
            gpu_bytes=taken_bytes,
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
        if sizes.total_bytes > self.budget_bytes:
            raise OffloadTooLarge(
                f"GPU memory {format_size(self.budget_bytes)}: llama.cpp takes {format_size(sizes.total_bytes)}",
                found_bytes=self.budget_bytes,
                minimum_bytes=sizes.total_bytes,
            )
        return replace(self, sizes=sizes)


class OffloadTooLarge(BudgetError):
    """llama.cpp took more of a GPU than it had said."""


def plan_offload(gguf: GgufModel, config: ModelConfig, memory_bytes: int) -> Offload | None:
    """Return what of `gguf` is to lie on a GPU; None for nothing. memory_bytes: the budget of the machine's memory.

    Where the GPU has no memory of its own, at most half of that budget is taken unless more is asked for. Raises
    ConfigError where memory is asked for and there is no GPU, BudgetError where what is asked for holds nothing.
    """
    if config.gpu_memory == 0:
        return None
    wanted = None if config.gpu_memory is None else int(config.gpu_memory)
    if (chosen := choose_gpu(wanted, find_gpus())) is None:
        return None
    gpu, budget_bytes = chosen
    if wanted is None and not gpu.has_own_memory:
        budget_bytes = min(budget_bytes, memory_bytes // 2)
    return _fitted(gguf, config, gpu, budget_bytes, is_asked=wanted is not None)


def shrink_offload(gguf: GgufModel, config: ModelConfig, offload: Offload, taken_bytes: int) -> Offload | None:
    """Return a smaller one than `offload`, which took `taken_bytes`, more than its budget; None for nothing."""
    excess_bytes = taken_bytes - offload.budget_bytes
    less = _fitted(gguf, config, offload.gpu, offload.sizes.total_bytes - excess_bytes, is_asked=False)
    return replace(less, budget_bytes=offload.budget_bytes) if less else None


def _fitted(gguf: GgufModel, config: ModelConfig, gpu: Gpu, budget_bytes: int, *, is_asked: bool) -> Offload | None:
    layers = gguf.value("block_count")
    choices = placements([tensor.name for tensor in gguf.tensors], layers if isinstance(layers, int) else 0)
    with Stubs(gguf.shards, outline_heads(gguf)) as stubs:

        @functools.cache
        def sizes(placement: Placement) -> OffloadSizes:
            return _sizes(gguf, config, stubs, Offload(gpu, budget_bytes, placement, _NO_SIZES))

        best = best_placement(
            choices, budget_bytes, lambda one: sizes(one).total_bytes if one != NOTHING else 0, is_asked=is_asked
        )
        return Offload(gpu, budget_bytes, best, sizes(best)) if best != NOTHING else None


_NO_SIZES = OffloadSizes(0, 0, 0, 0, 0, frozenset())


def _sizes(gguf: GgufModel, config: ModelConfig, stubs: Stubs, offload: Offload) -> OffloadSizes:
    metadata, path = outline_metadata(gguf), gguf.shards[0].path
    with LlamaModel(stubs.paths, metadata=metadata, mode="sized", path=path, offload=offload) as model:
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
        )
