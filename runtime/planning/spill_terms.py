"""Whether keys and values that have no room in memory may lie in a file, and which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from edge_run.base.config import ModelConfig
from edge_run.base.errors import NotSupported, option
from edge_run.runtime.planning.terms import Terms
from edge_run.tiers.kv.cells import Cells
from edge_run.tiers.kv.spill_shape import SpillShape, piece_bytes

ATTENTIONS_AT_ONCE = 2  # one that computes, and the next one, whose rows are read meanwhile


def with_spill(terms: Terms, uses: Sequence[Sequence[int]], config: ModelConfig) -> Terms:
    """Return `terms` with keys and values that may be away, where `config` wants that and there is anything to send.

    uses: of `terms.cells`, what each attention reads that lies as rows. A sliding window's ring, which has fewer cells
    than the context, stays in memory, and without flash attention values do, which lie in columns.
    """
    cells = terms.cells
    if not config.spills_kv or cells is None:
        return terms
    whole = {number for number, tensor in enumerate(cells.tensors) if tensor.n_cells >= terms.context_tokens}
    kept = (tuple(number for number in use if number in whole) for use in uses)
    size, uses = piece_bytes(cells, config.chunk_bytes // 2), tuple(use for use in kept if use)
    shape = SpillShape(cells, uses, size, terms.micro_batch_tokens, ATTENTIONS_AT_ONCE)
    return replace(terms, spill=shape) if uses else terms


def check_spill(config: ModelConfig, cells: Cells | None, path: Path) -> None:
    """Raise NotSupported where keys and values of the model at `path` have no room, and not all can be away."""
    if config.spills_kv and cells is not None and any(tensor.n_rows > 1 for tensor in cells.tensors):
        why = (
            f"which {option('exact')} and {option('flash_attention', 'off')} leave out"
            if config.flash_attention == "off"
            else "which this model goes without"
        )
        raise NotSupported(
            f"{path}: without flash attention, {why}, {option('kv_spill')} keeps values in memory, as those of a token "
            "lie in as many places as they have numbers, and they have no room; give a shorter context "
            f"({option('context_tokens')}) or more {option('memory')}"
        )
