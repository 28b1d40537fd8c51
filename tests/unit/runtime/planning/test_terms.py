"""What a shorter context takes, of the model's keys and values and of a draft model's."""

from __future__ import annotations

from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from edge_run.runtime.inspection.draft_file import GUESSED_TOKENS
from edge_run.runtime.llama.holdings import Holdings
from edge_run.runtime.planning.terms import LEAST_CONTEXT_TOKENS, Terms
from edge_run.tiers.gguf import GgufModel
from edge_run.tiers.kv.cells import Cells, CellTensor

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
    found = whole.shortened(lacking)
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
    assert found.shortened(1) is None or found.context_tokens > LEAST_CONTEXT_TOKENS


def test_a_draft_model_has_cells_for_guesses_beside_the_text() -> None:
    both, alone = terms(2, 2), terms(2, 0)
    guesses = cells(2, 256)
    assert guesses
    assert both.cell_bytes(0) - alone.cell_bytes(0) == guesses.bytes_for(GUESSED_TOKENS)
    assert both.lent_bytes > alone.lent_bytes
