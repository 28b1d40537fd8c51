"""Why a budget is too small, when it is not the model: a long context, or a large micro-batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from edge_run.base.errors import BudgetError, option
from edge_run.base.units import MIB, format_size
from edge_run.runtime.planning.terms import Terms


@contextlib.contextmanager
def cause_named(terms: Terms) -> Iterator[None]:
    """Name the largest item in a BudgetError of this block, where that is the KV cache or the buffers."""
    holdings = terms.holdings
    try:
        yield
    except BudgetError as error:
        minimum_bytes = error.minimum_bytes
        if not minimum_bytes:
            raise
        if holdings.kv_bytes > minimum_bytes // 2:
            cause = f"a context of {terms.context_tokens:,} tokens, whose cache takes {format_size(holdings.kv_bytes)}"
            shorter, smaller = option("context_tokens"), option("kv_type", "q8_0")
            advice = f"shorten the context ({shorter}), keep it in fewer bits ({smaller})"
        elif holdings.buffer_bytes + holdings.work_bytes > minimum_bytes // 2:
            size = format_size(holdings.buffer_bytes + holdings.work_bytes)
            cause = f"passes of {terms.micro_batch_tokens:,} tokens, whose buffers take {size}"
            advice = f"narrow them ({option('micro_batch_tokens')})"
        else:
            raise
        raise BudgetError(
            f"memory budget {format_size(error.found_bytes)}: too small for {cause}, it needs at least "
            f"{minimum_bytes // MIB} MiB; {advice}, or raise {option('memory')}",
            minimum_bytes=minimum_bytes,
            found_bytes=error.found_bytes,
        ) from error
