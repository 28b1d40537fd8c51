"""What choosing the rows that attention looks at takes (`--kv-keep`): bounds of the keys of each page, in memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from edge_run.base.config import KV_KEEP_WINDOW, ModelConfig
from edge_run.base.units import round_up
from edge_run.runtime.planning.terms import Terms
from edge_run.tiers.kv.cells import BOUNDS_SHARE, NOTED_TOGETHER, CellTensor


def with_bounds(
    terms: Terms, tensors: Sequence[CellTensor], uses: Sequence[Sequence[int]], config: ModelConfig
) -> Terms:
    """Return `terms` with the memory of bounds, where `config` has any: lent as that of cells.

    uses: of `tensors`, what each attention reads that lies as rows. Its keys are taken for the widest of these.
    """
    if not config.kv_keep or config.kv_keep_by == KV_KEEP_WINDOW:
        return terms
    keys_bytes = sum(max(tensors[number].cell_bytes for number in use) for use in uses)
    noted_bytes = math.ceil(BOUNDS_SHARE * keys_bytes)
    all_bytes = round_up(terms.context_tokens, NOTED_TOGETHER) * noted_bytes
    return replace(
        terms,
        holdings=replace(terms.holdings, kv_bytes=terms.holdings.kv_bytes + all_bytes),
        cells=replace(terms.cells, noted_bytes=noted_bytes) if terms.cells else None,
    )
