"""Which rows a token looks at: bounds hold, and a choice has the first, the latest and the best."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_run.tiers.kv.cells import BOUNDS_SHARE, PAGE_ROWS, Cells
from edge_run.tiers.kv.key_bounds import (
    SINK_ROWS,
    KeyBounds,
    choose_pages,
    choose_window,
)


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 2), st.integers(0, 2**31))
def test_no_key_scores_more_than_its_page_may(n_pages: int, n_heads: int, group: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    keys = random.standard_normal((n_pages, PAGE_ROWS, n_heads, 8), np.float32).astype(np.float16).astype(np.float32)
    queries = random.standard_normal((n_heads * group, 8), np.float32)
    bounds = KeyBounds()
    for page in keys:
        bounds.extend(page[None])
    real = np.einsum("prhc,hgc->phgr", keys, queries.reshape(n_heads, group, 8)).max(-1).reshape(n_pages, -1)
    assert (bounds.scores(queries) >= real - 1e-4).all()


def test_a_page_of_one_key_scores_what_the_key_does() -> None:
    key = np.random.default_rng(0).standard_normal((1, 1, 2, 4), np.float32).astype(np.float16).astype(np.float32)
    bounds = KeyBounds()
    bounds.extend(np.repeat(key, PAGE_ROWS, 1))
    queries = np.random.default_rng(1).standard_normal((4, 4), np.float32)
    wanted = [float(key[0, 0, head // 2] @ queries[head]) for head in range(4)]
    assert np.allclose(bounds.scores(queries)[0], wanted, atol=1e-6)


def test_what_is_written_anew_is_learnt_anew() -> None:
    bounds = KeyBounds()
    bounds.extend(np.zeros((3, PAGE_ROWS, 1, 4), np.float32))
    bounds.forget(2 * PAGE_ROWS + 1)
    assert bounds.n_pages == 2
    bounds.extend(np.ones((200, PAGE_ROWS, 1, 4), np.float32))
    scores = bounds.scores(np.ones((1, 4), np.float32))
    assert scores[:, 0].tolist() == [0.0] * 2 + [4.0] * 200


@given(st.integers(64, 400), st.integers(64, 600), st.integers(0, 2**31))
def test_pages(keep_rows: int, n_rows: int, seed: int) -> None:
    n_pages = (n_rows - 1) // PAGE_ROWS
    scores = np.random.default_rng(seed).standard_normal((n_pages, 3)).astype(np.float32)
    chosen = choose_pages(scores, n_rows, keep_rows)
    assert chosen[:PAGE_ROWS].all()
    assert chosen[n_pages * PAGE_ROWS :].all()
    assert min(n_rows, keep_rows - 2 * PAGE_ROWS) <= chosen.sum() <= max(keep_rows, 2 * PAGE_ROWS)
    n_recent = keep_rows // 4 // PAGE_ROWS * PAGE_ROWS
    middle = [page for page in range(1, n_pages) if (page + 1) * PAGE_ROWS <= n_rows - n_recent]
    rank = (scores - scores.max(0)).max(1)
    hidden = [rank[page] for page in middle if not chosen[page * PAGE_ROWS]]
    shown = [rank[page] for page in middle if chosen[page * PAGE_ROWS : (page + 1) * PAGE_ROWS].all()]
    assert not hidden or not shown or max(hidden) <= min(shown)


def test_a_block_is_chosen_for_the_best_of_its_pages() -> None:
    scores = np.zeros((32, 1), np.float32)
    scores[9] = 5.0
    scores[20] = 1.0
    chosen = choose_pages(scores, 32 * PAGE_ROWS + 3, 8 * PAGE_ROWS, pages_together=4)
    found = [page for page in range(32) if chosen[page * PAGE_ROWS : (page + 1) * PAGE_ROWS].all()]
    assert found == [0, 8, 9, 10, 11, 20, 31]  # the first, a block, of the next one what has room, and of the latest
    assert chosen[-2 * PAGE_ROWS :].all()


@pytest.mark.parametrize("keep_rows", [64, 300, 1000])
@pytest.mark.parametrize("pages_together", [1, 16])
def test_as_many_rows_as_were_asked_for(keep_rows: int, pages_together: int) -> None:
    scores = np.random.default_rng(0).standard_normal((1250, 4)).astype(np.float32)
    assert keep_rows - 2 * PAGE_ROWS < choose_pages(scores, 20_000, keep_rows, pages_together).sum() <= keep_rows


@pytest.mark.parametrize(("n_rows", "keep_rows"), [(64, 64), (65, 64), (1000, 64), (10, 64)])
def test_a_window(n_rows: int, keep_rows: int) -> None:
    chosen = choose_window(n_rows, keep_rows)
    assert chosen.sum() == min(n_rows, keep_rows)
    assert chosen[:SINK_ROWS].all()
    assert chosen[-1]


def test_bounds_take_what_a_plan_counts_and_give_it_back() -> None:
    """A plan counts a share of the memory of keys, for some cells at once."""
    random, key_bytes = np.random.default_rng(0), 2 * 8 * np.dtype(np.float16).itemsize
    cells = Cells([], 4096, noted_bytes=int(BOUNDS_SHARE * key_bytes))
    bounds = KeyBounds()
    for n_pages in (1, 31, 1, 40):
        bounds.extend(random.standard_normal((n_pages, PAGE_ROWS, 2, 8), np.float32))
        assert bounds.held_bytes == cells.bytes_for(bounds.n_pages * PAGE_ROWS)
    bounds.forget(600)
    assert bounds.held_bytes == cells.bytes_for(600)
    bounds.forget(0)
    assert bounds.held_bytes == 0
