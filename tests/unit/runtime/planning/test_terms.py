"""What a shorter context takes, or one of which a part is in a file: of the model's keys and values, and a draft's."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from edge_run.runtime.inspection.draft_file import GUESSED_TOKENS
from edge_run.runtime.llama.holdings import Holdings
from edge_run.runtime.planning.spill_terms import LEAST_CONTEXT_TOKENS, shortened
from edge_run.runtime.planning.terms import Terms
from edge_run.tiers.gguf import GgufModel
from edge_run.tiers.kv.cells import Cells, CellTensor
from edge_run.tiers.kv.spill_shape import SpillShape

PAGE, TOKENS, VERIFIED, OTHERS = 4096, 8192, 20, 1_000_000


def cells(n_layers: int, cell_bytes: int) -> Cells | None:
    return Cells([CellTensor(0, TOKENS, cell_bytes)] * 2 * n_layers, PAGE) if n_layers else None


def terms(n_own: int, n_draft: int) -> Terms:
    """Terms of a context of TOKENS tokens, of models with so many layers of attention."""
    own, draft = cells(n_own, 512), cells(n_draft, 256)
    sizes = [one.bytes_for(TOKENS) if one else 0 for one in (own, draft)]
    holdings = Holdings(1, 1, kv_bytes=sizes[0], draft_bytes=sizes[1] + OTHERS if draft else 0)
    nothing = cast(GgufModel, None)
    return Terms(nothing, 0, holdings, TOKENS, 32, 1, cells=own, draft_cells=draft, verified_tokens=VERIFIED)


@given(n_own=st.integers(0, 8), n_draft=st.integers(0, 8), share=st.floats(0.001, 1))
def test_a_shorter_context_frees_what_is_lacking_of_both(n_own: int, n_draft: int, share: float) -> None:
    whole = terms(n_own, n_draft)
    lacking = max(1, int(share * whole.pool_bytes))
    found = shortened(whole, lacking)
    if not whole.pool_bytes:
        assert found is None
        return
    assert found
    assert LEAST_CONTEXT_TOKENS <= found.context_tokens < TOKENS
    assert found.holdings.kv_bytes == whole.holdings.kv_bytes - (
        whole.cells.bytes_for(TOKENS) - whole.cells.bytes_for(found.context_tokens + VERIFIED) if whole.cells else 0
    )
    freed = whole.holdings.total_bytes - found.holdings.total_bytes
    assert freed == whole.pool_bytes - found.pool_bytes
    assert freed >= lacking or found.context_tokens == LEAST_CONTEXT_TOKENS
    assert found.holdings.draft_bytes >= OTHERS or not n_draft
    assert shortened(found, 1) is None or found.context_tokens > LEAST_CONTEXT_TOKENS


@given(n_texts=st.integers(1, 12), most_rows=st.integers(1, 12))
def test_rows_of_logits_are_lent_but_for_those_of_texts_in_one_pass(n_texts: int, most_rows: int) -> None:
    usual = terms(2, 0)
    found = replace(usual, row_bytes=PAGE, most_rows=most_rows, sequences=n_texts)
    assert found.pool_bytes == found.lent_bytes + found.cell_bytes(1) + (min(n_texts, most_rows) - 1) * PAGE
    assert found.most_lent_bytes == usual.most_lent_bytes + (most_rows - 1) * PAGE
    assert found.loans_at(100, PAGE) - usual.loans_at(100, PAGE) == max(0, most_rows - n_texts)


def spilling(n_layers: int) -> Terms:
    """Terms of a context of TOKENS tokens that may spill, with work and a buffer that are lent."""
    own = cells(n_layers, 512)
    assert own
    shape = SpillShape(own, [(2 * i, 2 * i + 1) for i in range(n_layers)], 64 * PAGE, 32, 2)
    work = {"narrow_tokens": 1, "work_token_bytes": PAGE, "sliced_token_bytes": 2 * PAGE}
    holdings = Holdings(1, 1, kv_bytes=own.bytes_for(TOKENS), work_bytes=32 * 3 * PAGE)
    nothing = cast(GgufModel, None)
    return Terms(nothing, 8 * PAGE, holdings, TOKENS, 32, 1, cells=own, idle_bytes=100 * PAGE, spill=shape, **work)


@given(n_layers=st.integers(1, 8), shares=st.lists(st.floats(0.001, 0.5), min_size=1, max_size=4))
def test_a_context_of_which_a_part_is_away_frees_what_is_lacking(n_layers: int, shares: list[float]) -> None:
    """It stays as long as it can be, and what is lent besides keys and values stays what it was."""
    whole = found = spilling(n_layers)
    assert whole.spill
    for share in shares:
        before, lacking = found, max(1, int(share * whole.cell_bytes(TOKENS)))
        shorter = shortened(before, lacking)
        if shorter is None:
            assert before.context_tokens == LEAST_CONTEXT_TOKENS
            return
        found = shorter
        room = before.cell_bytes(before.context_tokens) - lacking
        assert (found.context_tokens == before.context_tokens) == (
            whole.spill.least_bytes(before.context_tokens) <= room
        )
        assert before.holdings.total_bytes - found.holdings.total_bytes == before.pool_bytes - found.pool_bytes
        assert found.cell_bytes(found.context_tokens) <= room or found.context_tokens == LEAST_CONTEXT_TOKENS
        full = whole.cells.bytes_for(found.context_tokens) if whole.cells else 0
        assert found.cell_bytes(found.context_tokens) == full - found.away_bytes
        assert found.pool_bytes - found.cell_bytes(found.context_tokens) == whole.pool_bytes - whole.cell_bytes(TOKENS)
        assert found.loans_at(found.context_tokens - 1, PAGE) == (found.idle_bytes + 31 * 2 * PAGE) // PAGE
        assert (found.kv_read_at(found.context_tokens - 1) > 0) == (found.away_bytes > 0)


def test_what_is_away_is_not_taken_from_short_texts() -> None:
    whole = spilling(4)
    assert whole.spill
    found = shortened(whole, whole.cell_bytes(TOKENS) - whole.spill.least_bytes(TOKENS))
    assert found
    assert found.away_bytes > 0
    assert found.cell_bytes(512) == whole.cell_bytes(512)
    assert found.kv_read_at(512) == 0
    assert replace(found, away_bytes=0).cell_bytes(TOKENS) == whole.cell_bytes(TOKENS)


def test_a_draft_model_has_cells_for_guesses_beside_the_text() -> None:
    both, alone = terms(2, 2), terms(2, 0)
    guesses = cells(2, 256)
    assert guesses
    assert both.cell_bytes(0) - alone.cell_bytes(0) == guesses.bytes_for(GUESSED_TOKENS)
    assert both.lent_bytes > alone.lent_bytes


@given(n_draft=st.integers(1, 8), share=st.floats(0.001, 1))
def test_what_a_draft_model_keeps_is_no_room_for_the_models_own(n_draft: int, share: float) -> None:
    alone, draft = spilling(4), cells(n_draft, 256)
    assert draft
    holdings = replace(alone.holdings, draft_bytes=draft.bytes_for(TOKENS) + OTHERS)
    both = replace(alone, draft_cells=draft, holdings=holdings)
    lacking = max(1, int(share * alone.cell_bytes(TOKENS)))
    found, without = shortened(both, lacking), shortened(alone, lacking)
    assert found
    assert without
    assert (found.away_bytes, found.context_tokens) == (without.away_bytes, without.context_tokens)
    tokens = found.context_tokens
    assert found.held_cell_bytes(tokens) == without.cell_bytes(tokens)
    assert found.kv_read_at(tokens - 1) == without.kv_read_at(tokens - 1)
    assert both.holdings.total_bytes - found.holdings.total_bytes == both.pool_bytes - found.pool_bytes
