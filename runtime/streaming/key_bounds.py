"""Which rows of a context a token looks at, where it may not look at all: a choice from bounds of keys. Pure.

Rows are grouped in pages. Of each page the smallest and the largest value of each channel of its keys are known, from
which follows the largest score that a query can have with any key of the page: that is how pages are ranked (Quest,
Tang et al. 2024). Unlike there, all heads of a layer look at the same pages, as llama.cpp has one mask for all of them:
a page counts as much as it does for the head that wants it most. The first page and the last ones are always looked at:
the first tokens draw attention whatever they are (StreamingLLM, Xiao et al. 2024).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

PAGE_ROWS = 16
SINK_ROWS = 4
RECENT_SHARE = 4  # of what is looked at, a quarter is the latest

Floats = npt.NDArray[np.float32]
Choice = npt.NDArray[np.bool_]


class KeyBounds:
    """The smallest and largest keys of each page of one layer. n_pages: those that are known, from the first on."""

    def __init__(self) -> None:
        self.n_pages = 0
        self._low: Floats = np.empty((0, 0, 0), np.float32)
        self._high = self._low

    def extend(self, keys: Floats) -> None:
        """Learn of the next pages: `keys`, `(pages, PAGE_ROWS, heads, channels)`."""
        n_pages = self.n_pages + len(keys)
        if n_pages > len(self._low):
            grown = (max(64, 2 * n_pages), *keys.shape[2:])
            low, high = np.empty(grown, np.float32), np.empty(grown, np.float32)
            if self.n_pages:
                low[: self.n_pages], high[: self.n_pages] = self._low[: self.n_pages], self._high[: self.n_pages]
            self._low, self._high = low, high
        self._low[self.n_pages : n_pages], self._high[self.n_pages : n_pages] = keys.min(1), keys.max(1)
        self.n_pages = n_pages

    def forget(self, first_row: int) -> None:
        """Forget what holds rows from `first_row` on: they change."""
        self.n_pages = min(self.n_pages, first_row // PAGE_ROWS)

    def scores(self, queries: Floats) -> Floats:
        """Return the most that each page can score with `queries`, `(heads, channels)`, as `(pages, heads)`."""
        low, high = self._low[: self.n_pages], self._high[: self.n_pages]
        grouped = queries.reshape(low.shape[1], -1, queries.shape[1])  # query heads that share a head of keys
        up, down = np.maximum(grouped, 0), np.minimum(grouped, 0)
        found = np.einsum("phc,hgc->phg", high, up) + np.einsum("phc,hgc->phg", low, down)
        return found.reshape(self.n_pages, -1)


def choose_pages(scores: Floats, n_rows: int, keep_rows: int, pages_together: int = 1) -> Choice:
    """Return which of `n_rows` rows are looked at, `keep_rows` at most, by the `scores` of their pages in each head.

    Rows that are in no page of `scores` are the latest, and are looked at. pages_together: so many are chosen at once,
    for the best of them; of those that have no room together, the best.
    """
    n_pages = len(scores)
    chosen = np.zeros(n_rows, np.bool_)
    chosen[:PAGE_ROWS] = True
    recent_rows = max(n_rows - n_pages * PAGE_ROWS, keep_rows // RECENT_SHARE // PAGE_ROWS * PAGE_ROWS)
    chosen[max(0, n_rows - recent_rows) :] = True
    rank = (scores - scores.max(0)).max(1)
    unit = np.arange(n_pages) // pages_together
    unit_rank = np.maximum.reduceat(rank, range(0, n_pages, pages_together))[unit]
    order = np.lexsort((-rank, unit, -unit_rank))  # units by rank, then the pages of each
    pages = chosen[: n_pages * PAGE_ROWS].reshape(n_pages, PAGE_ROWS)
    n_chosen = chosen.sum() + np.cumsum(PAGE_ROWS - pages[order].sum(1))
    pages[order[n_chosen <= keep_rows]] = True
    return chosen


def choose_window(n_rows: int, keep_rows: int) -> Choice:
    """Return which of `n_rows` rows are looked at: the first few and the latest, `keep_rows` in all."""
    chosen = np.zeros(n_rows, np.bool_)
    chosen[:SINK_ROWS] = True
    chosen[max(SINK_ROWS, n_rows - (keep_rows - SINK_ROWS)) :] = True
    return chosen
