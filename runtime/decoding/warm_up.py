"""Lets a GPU compute once before the memory of the process is measured: its driver compiles kernels at their first use.

The processor's nodes are skipped, and leave zeros, so that no missing weight is read.
"""

from __future__ import annotations

from dataclasses import replace

from edge_run.base.errors import BudgetError
from edge_run.base.protocols import BatchToken
from edge_run.base.units import MIB, format_size, round_up
from edge_run.devices.host.memory import process_memory
from edge_run.runtime.decoding.decoder import LocalDecoder
from edge_run.runtime.decoding.driver import Driver
from edge_run.runtime.llama import _ggml as ggml
from edge_run.runtime.llama.context_shape import ContextShape
from edge_run.runtime.llama.model import LlamaContext, LlamaModel


def warm_up(model: LlamaModel, shape: ContextShape, budget_bytes: int | None = None) -> None:
    """Compute the GPU's part of a pass of one token and of a full micro-batch, in a context of their own.

    Raises BudgetError when the process held more than `budget_bytes` at any time meanwhile.
    """
    before = process_memory().peak_bytes
    outputs = max(2, shape.sequences)
    context = LlamaContext(model, replace(shape, outputs_per_pass=outputs), _follow, may_copy_weights=False)
    decoder = LocalDecoder(model, context, Driver(), shape)
    try:
        for width in {1, shape.micro_batch_tokens}:
            decoder.decode([BatchToken(0, position, 0, position == width - 1) for position in range(width)])
            decoder.rewind(0, 0)
    finally:
        decoder.close()
        context.close()
    if budget_bytes is not None:
        check_peak(before, process_memory().peak_bytes, budget_bytes)


def check_peak(before: int, peak: int, budget_bytes: int) -> None:
    """Raise BudgetError where the peak of the process has grown since `before`, and is over the budget."""
    if before < peak > budget_bytes:
        needed = round_up(peak, MIB)
        raise BudgetError(
            f"memory budget {format_size(budget_bytes)}: the process held {format_size(peak)} while the GPU's driver "
            f"compiled its kernels; raise --memory to {needed // MIB}MiB or more, or leave --gpu-memory out",
            found_bytes=budget_bytes,
            minimum_bytes=needed,
        )


def _follow(address: int, is_asking: bool, _: int) -> bool:
    """Answer llama.cpp's scheduler: a GPU's nodes are computed; the others are skipped one by one and zeroed."""
    if not is_asking:
        if ggml.is_on_host(address):
            ggml.clear_data(address)
        return True
    is_on_host = ggml.is_on_host(address)
    ggml.set_compute_flag(address, not is_on_host)
    return is_on_host
