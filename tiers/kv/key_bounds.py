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

from edge_run.tiers.kv.cells import NOTED_TOGETHER, PAGE_ROWS

SINK_ROWS = 4
RECENT_SHARE = 4  # of what is looked at, a quarter is the latest
_PART_PAGES = NOTED_TOGETHER // PAGE_ROWS

Floats = npt.NDArray[np.float32]
Choice = npt.NDArray[np.bool_]  # of each row, whether it is looked at


class KeyBounds:
    """The smallest and largest keys of each page of one layer. n_pages: those that are known, from the first on.

    They are kept in 16 bits, as the keys are, and take a `BOUNDS_SHARE` of the keys' memory.
    """

    def __init__(self) -> None:
        self.n_pages = 0
        self._parts: list[npt.NDArray[np.float16]] = []  # each of low and high of `_PART_PAGES` pages

    @property
    def held_bytes(self) -> int:
        """The memory that they take."""
        return sum(part.nbytes for part in self._parts)

    def extend(self, keys: Floats) -> None:
        """Learn of the next pages: `keys`, `(pages, PAGE_ROWS, heads, channels)`."""
        for page in keys:
            number, place = divmod(self.n_pages, _PART_PAGES)
            if number == len(self._parts):
                self._parts.append(np.empty((2, _PART_PAGES, *page.shape[1:]), np.float16))
            self._parts[number][0, place], self._parts[number][1, place] = page.min(0), page.max(0)
            self.n_pages += 1

    def forget(self, first_row: int) -> None:
        """Forget what holds rows from `first_row` on: they change."""
        self.n_pages = min(self.n_pages, first_row // PAGE_ROWS)
        del self._parts[-(-self.n_pages // _PART_PAGES) :]

    def scores(self, queries: Floats) -> Floats:
        """Return the most that each page can score with `queries`, `(heads, channels)`, as `(pages, heads)`."""
        found = np.empty((len(self._parts) * _PART_PAGES, len(queries)), np.float32)
        for number, part in enumerate(self._parts):
            low, high = part.astype(np.float32)
            grouped = queries.reshape(low.shape[1], -1, queries.shape[1])  # query heads that share a head of keys
            up, down = np.maximum(grouped, 0), np.minimum(grouped, 0)
            best = np.einsum("phc,hgc->phg", high, up) + np.einsum("phc,hgc->phg", low, down)
            found[number * _PART_PAGES : (number + 1) * _PART_PAGES] = best.reshape(_PART_PAGES, -1)
        return found[: self.n_pages]


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
