"""What is done where keys and values have no room in memory: some of them lie in a file, or the context is shorter."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from edge_run.base.config import ModelConfig
from edge_run.base.errors import NotSupported, option
from edge_run.base.units import MIB
from edge_run.runtime.llama.holdings import Holdings
from edge_run.runtime.planning.terms import Terms
from edge_run.tiers.kv.cells import Cells
from edge_run.tiers.kv.spill_shape import SpillShape, piece_bytes

ATTENTIONS_AT_ONCE = 2  # one that computes, and the next one, whose rows are read meanwhile
LEAST_CONTEXT_TOKENS = 512  # of a context that is longer than the budget has room for
MOST_BESIDE_SPILL_BYTES = 64 * MIB  # for weights, so that reading them need not wait for computing


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


def shortened(terms: Terms, lacking_bytes: int) -> Terms | None:
    """Return `terms` with keys and values that take `lacking_bytes` less; None where they cannot.

    Where they may be away, more of them are, as far as that goes, and weights get some room to be read ahead. Else the
    context is shorter; the shortest one has `LEAST_CONTEXT_TOKENS`, whatever it takes.
    """
    if terms.spill:
        return _with_more_away(terms, terms.spill, lacking_bytes)
    longest = terms.context_tokens
    if terms.is_shared or not (terms.cells or terms.draft_cells) or longest <= LEAST_CONTEXT_TOKENS:
        return None
    full_bytes = terms.cell_bytes(longest)
    fitting = bisect_right(range(1, longest), full_bytes - lacking_bytes, key=terms.cell_bytes)
    tokens = max(LEAST_CONTEXT_TOKENS, fitting)
    of_draft_bytes = terms.draft_cell_bytes(longest) - terms.draft_cell_bytes(tokens)
    of_own_bytes = full_bytes - terms.cell_bytes(tokens) - of_draft_bytes
    return replace(terms, holdings=_less(terms.holdings, of_own_bytes, of_draft_bytes), context_tokens=tokens)


def _with_more_away(terms: Terms, spill: SpillShape, lacking_bytes: int) -> Terms | None:
    """Return the same of keys and values that may be away, as `spill` says."""
    tokens, held_bytes = terms.context_tokens, terms.held_cell_bytes(terms.context_tokens)
    room_bytes = held_bytes - lacking_bytes
    if spill.least_bytes(tokens) <= room_bytes:
        # A byte of weights that is read costs what one of keys and values does.
        room_bytes -= min(MOST_BESIDE_SPILL_BYTES, terms.budget_bytes // 8)
    elif tokens <= LEAST_CONTEXT_TOKENS or (terms.is_shared and terms.away_bytes):
        return None
    elif terms.is_shared:
        room_bytes = 0  # all is away that can be
    else:
        tokens = max(LEAST_CONTEXT_TOKENS, spill.tokens_in(room_bytes, tokens - 1))
    shorter = replace(terms, context_tokens=tokens, away_bytes=0)
    all_bytes = shorter.held_cell_bytes(tokens)
    away_bytes = max(0, all_bytes - max(room_bytes, spill.least_bytes(tokens)))
    of_draft_bytes = terms.draft_cell_bytes(terms.context_tokens) - terms.draft_cell_bytes(tokens)
    holdings = _less(terms.holdings, held_bytes - all_bytes + away_bytes, of_draft_bytes)
    return replace(shorter, away_bytes=away_bytes, holdings=holdings)


def _less(holdings: Holdings, kv_bytes: int, draft_bytes: int) -> Holdings:
    """Return `holdings` with so many bytes less of keys and values, the model's and its draft's."""
    return replace(
        holdings,
        kv_bytes=max(0, holdings.kv_bytes - kv_bytes),
        draft_bytes=max(0, holdings.draft_bytes - draft_bytes),
    )
