"""Lets a GPU compute before the memory of the process is measured: its driver loads kernels at their first use.

Which kernels a pass needs depends on its width. The processor's nodes are skipped, and leave zeros, so that no missing
weight is read.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace

from edge_run.base.errors import BudgetError, option
from edge_run.base.protocols import BatchToken
from edge_run.base.units import MIB, format_size, round_up
from edge_run.devices.host.memory import BESIDE_BUDGETS, process_memory
from edge_run.runtime.decoding.decoder import LocalDecoder
from edge_run.runtime.decoding.driver import Driver, PassShape
from edge_run.runtime.llama import _ggml as ggml
from edge_run.runtime.llama.context_shape import ContextShape
from edge_run.runtime.llama.model import LlamaContext, LlamaModel

NARROW_TOKENS, STEP_TOKENS, WIDE_TOKENS = 8, 8, 128  # llama.cpp's kernels: one for each width, for each 8, the same


def warm_up(
    model: LlamaModel, shape: ContextShape, passes: Iterable[PassShape], budget_bytes: int | None = None
) -> None:
    """Compute the GPU's part of `passes`, with as many logits as a pass may have, in a context of their own.

    Raises BudgetError when the process held more than `budget_bytes` at any time meanwhile.
    """
    before = process_memory().peak_bytes
    outputs = max(2, shape.sequences, shape.outputs_per_pass)
    wide = replace(shape, outputs_per_pass=outputs)
    with (
        closing(LlamaContext(model, wide, _follow, may_copy_weights=False)) as context,
        closing(LocalDecoder(model, context, Driver(), shape)) as decoder,
    ):
        for tokens, wanted in passes:
            first = tokens - min(wanted, shape.outputs_per_pass)
            decoder.follow([BatchToken(0, position, 0, position >= first) for position in range(tokens)])
            decoder.rewind(0, 0)
    if budget_bytes is not None:
        check_peak(before, process_memory().peak_bytes, budget_bytes + BESIDE_BUDGETS.n_bytes)


def usual_passes(micro_batch_tokens: int, *, is_software: bool) -> list[PassShape]:
    """Return passes that together need all kernels, of a width each, all of whose logits are wanted.

    Of a GPU that the processor plays only the narrowest and the widest, with the logits of one token: it is slow, and
    its driver ends the process in some wide passes of mixtures.
    """
    if is_software:
        return [PassShape(width, 1) for width in sorted({1, micro_batch_tokens})]
    widths = {*range(1, NARROW_TOKENS), *range(NARROW_TOKENS, WIDE_TOKENS + 1, STEP_TOKENS)}
    fitting = {width for width in widths if width < micro_batch_tokens} | {micro_batch_tokens}
    return [PassShape(width, width) for width in sorted(fitting)]


def check_peak(before: int, peak: int, budget_bytes: int) -> None:
    """Raise BudgetError where the peak of the process has grown since `before`, and is over the budget."""
    if before < peak > budget_bytes:
        needed = round_up(peak, MIB)
        raise BudgetError(
            f"memory budget {format_size(budget_bytes)}: the process held {format_size(peak)} while the GPU's driver "
            f"loaded its kernels; raise {option('memory')} to {needed // MIB}MiB or more, or leave out "
            + option("gpu_memory"),
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
