"""Attention on a part of the context (`--kv-keep`), as a feature of a pass: for each layer, a mask of its own.

llama.cpp computes as ever. Before an attention is computed, its query is read, rows are chosen, and the mask that all
layers share says for this layer that the others are hidden; its kernel does not read rows that are hidden. So what is
computed is not the model's any more, but that of a model that looks at less. Only passes of one token do so: a prompt
is read with all of its rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from edge_run.base.config import KV_KEEP_BLOCKS, KV_KEEP_WINDOW
from edge_run.base.errors import NotSupported, option
from edge_run.base.results import KvKeep
from edge_run.runtime.decoding.driver import Steps
from edge_run.runtime.graph.nodes import ATTENTION, WRITES_ROWS, GraphMap, Node
from edge_run.runtime.llama import _ggml as ggml
from edge_run.runtime.streaming.visible_rows import HIDDEN
from edge_run.tiers import _libc
from edge_run.tiers.kv.cells import PAGE_ROWS
from edge_run.tiers.kv.key_bounds import Choice, KeyBounds, choose_pages, choose_window
from edge_run.tiers.kv.layout import BLOCK_ROWS

BLOCK_PAGES = BLOCK_ROWS // PAGE_ROWS  # a block of rows is about a piece of them in a file (`piece_bytes`)
_HALF = ggml.TYPE_IDS["f16"]


class ChosenRows:
    """The feature that chooses. keep_rows: as many are looked at. kind: `pages`, `blocks` or `window`.

    is_asked: whether somebody else calls `choose` and `learn` for each attention, who brings the rows in between.
    """

    def __init__(self, keep_rows: int, kind: str, *, is_asked: bool = False) -> None:
        self._keep_rows, self._kind, self._is_asked = keep_rows, kind, is_asked
        self._bounds: dict[int, KeyBounds] = {}  # by where a layer's keys lie
        self._mask: np.ndarray[Any, np.dtype[np.uint16]] | None = None  # as llama.cpp made it for the pass at hand
        self._n_rows = self._looked_at = self._there = 0

    @property
    def bounds_bytes(self) -> int:
        """The memory of what is known of keys."""
        return sum(bounds.held_bytes for bounds in self._bounds.values())

    @property
    def figures(self) -> KvKeep:
        """What was looked at so far."""
        return KvKeep(self._kind, self._keep_rows, self._looked_at / self._there if self._there else 1.0)

    def register(self, graph: GraphMap, steps: Steps) -> None:
        """Choose before each attention, and forget what was known of rows that are written."""
        attentions = [i for i, node in enumerate(graph) if node.op == ATTENTION and node.is_computed]
        for i in attentions[:1]:
            steps.add_before(i, self._begin)
        for i in attentions if not self._is_asked else ():
            steps.stop_before(i, self._attend)
        for i, node in enumerate(graph):
            if node.op == WRITES_ROWS:
                steps.add_before(i, self._forget)

    def before_unknown(self, node: Node, address: int) -> bool:
        """Choose nothing where the graph is not known, but forget rows that are written.

        What the last known attention of the pass hid stays hidden: llama.cpp may have given the memory of the mask to
        another node by now, so that nothing may be written there.
        """
        if node.op == WRITES_ROWS:
            self._forget(address)
        return False

    def after_unknown(self) -> None:
        """Do nothing: nothing stops a pass for it."""

    def abandon(self) -> None:
        """Forget the mask of the pass, and all pages: rows of another text may come to lie there next."""
        self._mask = None
        if not self._is_asked:  # where they cannot be learnt before a choice, no rows come so
            self._bounds.clear()

    def cut(self, n_rows: int) -> None:
        """Forget what was known of other rows than the first `n_rows`, and free its memory."""
        for bounds in self._bounds.values():
            bounds.forget(n_rows)

    def choose(self, address: int) -> Choice | None:
        """Hide rows from the attention at `address`, whose query is computed; return those that it reads, None: all.

        `learn` follows once these are in memory.
        """
        sources = ggml.tensor_at(address).src
        q, k, mask = (ggml.tensor_at(sources[i]) for i in (0, 1, 3))
        if k.type != _HALF or mask.type != _HALF or q.type != 0:
            given = option("kv_type", "f16", "-ctk")
            raise NotSupported(f"kv keep: needs keys of 16 bits (f16), and flash attention; give {given}")
        last = np.frombuffer(_libc.view(mask.data + (q.ne[1] - 1) * mask.nb[1], 2 * mask.ne[0]), np.uint16)
        original = self._mask = last.copy() if self._mask is None or q.ne[1] != 1 else self._mask
        visible = np.flatnonzero(original != HIDDEN)
        self._n_rows = int(visible[-1]) + 1 if len(visible) else 0
        if len(visible) != self._n_rows:
            raise NotSupported("kv keep: the rows of this model's context do not lie in the order of the text")
        if q.ne[1] != 1:
            return None
        chosen = self._chosen(q, k)
        self._there += self._n_rows
        self._looked_at += self._n_rows if chosen is None else int(chosen.sum())
        visible_now = original[: self._n_rows]  # where all are looked at too: the layer before may have hidden some
        last[: self._n_rows] = visible_now if chosen is None else np.where(chosen, visible_now, HIDDEN)
        return chosen

    def learn(self, address: int) -> None:
        """Learn of the pages of keys that are complete and not known yet: `choose` let all of their rows be read."""
        self._learn(ggml.tensor_at(ggml.tensor_at(address).src[1]), self._n_rows)

    def _learn(self, k: Any, n_rows: int) -> None:
        bounds, n_pages = self._bounds_of(k), n_rows // PAGE_ROWS
        if self._kind == KV_KEEP_WINDOW:
            return
        while n_pages > bounds.n_pages:  # in pieces, as all rows of a long text are many
            stop = min(n_pages, bounds.n_pages + BLOCK_PAGES)
            bounds.extend(_rows(k, bounds.n_pages * PAGE_ROWS, stop * PAGE_ROWS))

    def _attend(self, address: int) -> None:
        self.choose(address)
        self.learn(address)

    def _begin(self, _: int) -> None:
        self._mask = None

    def _forget(self, address: int) -> None:
        written = ggml.rows_written(address)
        if written and len(written[1]) and (bounds := self._bounds.get(written[0])):
            bounds.forget(int(written[1].min()))

    def _chosen(self, q: Any, k: Any) -> Choice | None:
        if self._n_rows <= self._keep_rows:
            return None
        if not self._is_asked:
            self._learn(k, self._n_rows - 1)  # what no pass has told of, as rows that came back from a file
        bounds = self._bounds_of(k)
        if self._kind == KV_KEEP_WINDOW or not bounds.n_pages:
            return choose_window(self._n_rows, self._keep_rows) if self._kind == KV_KEEP_WINDOW else None
        together = BLOCK_PAGES if self._kind == KV_KEEP_BLOCKS else 1
        return choose_pages(bounds.scores(_heads(q)), self._n_rows, self._keep_rows, together)

    def _bounds_of(self, k: Any) -> KeyBounds:
        while k.view_src:
            k = ggml.tensor_at(k.view_src)
        return self._bounds.setdefault(k.data, KeyBounds())


def _heads(q: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the query of one token, `(heads, channels)`."""
    n_channels, _, n_heads = q.ne[:3]
    memory = _libc.view(q.data, (n_heads - 1) * q.nb[2] + 4 * n_channels)
    return np.ndarray((n_heads, n_channels), np.float32, memory, strides=(q.nb[2], 4)).copy()


def _rows(k: Any, start: int, stop: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the keys of whole pages, `(pages, PAGE_ROWS, heads, channels)`."""
    kind = np.dtype(np.float16)
    n_channels, _, n_heads = k.ne[:3]
    length = (stop - 1) * k.nb[1] + (n_heads - 1) * k.nb[2] + n_channels * kind.itemsize
    shape = (stop - start, n_heads, n_channels)
    memory = _libc.view(k.data + start * k.nb[1], length - start * k.nb[1])
    rows = np.ndarray(shape, kind, memory, strides=(k.nb[1], k.nb[2], kind.itemsize))
    return rows.astype(np.float32).reshape(-1, PAGE_ROWS, n_heads, n_channels)
