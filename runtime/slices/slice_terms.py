"""The terms of the plan of a slice, and what of its keys and values stays in memory, for the planner of a mesh."""

from __future__ import annotations

from dataclasses import replace

from edge_run.runtime.decoding.driver import ONE_TOKEN
from edge_run.runtime.engine.loading import Loaded
from edge_run.runtime.engine.spilling import spillable_uses
from edge_run.runtime.graph.units import Layout
from edge_run.runtime.llama.holdings import Holdings
from edge_run.runtime.planning.spill_terms import LEAST_CONTEXT_TOKENS, with_spill
from edge_run.runtime.planning.terms import Terms
from edge_run.runtime.slices.maps import SliceMaps
from edge_run.runtime.slices.slice import Share
from edge_run.tiers import _libc
from edge_run.tiers.kv.cells import Cells


def slice_terms(loaded: Loaded, maps: SliceMaps, share: Share, holdings: Holdings, idle_bytes: int = 0) -> Terms:
    """Return the terms of a plan for `share`. idle_bytes: of the buffers, what passes of one token leave to weights."""
    graph, layout = maps[ONE_TOKEN]
    cells = _own_cells(loaded, layout, share)
    terms = replace(
        loaded.terms(holdings),
        idle_bytes=idle_bytes,
        cells=cells,
        verified_tokens=loaded.shape.verified_tokens,
        is_shared=True,
    )
    uses = spillable_uses(loaded, graph, layout.flow, cells.tensors) if cells else ()
    return with_spill(terms, uses, loaded.prepared.config)


def least_kept(terms: Terms, kept_bytes: int) -> tuple[int, float]:
    """Return what of keys and values is in memory at once at least, and of all of them what share stays besides.

    terms: of all units, which keep `kept_bytes` in all. (0, 0.0) where none may be in a file.
    """
    spill, cells, tokens = terms.spill, terms.cells, terms.context_tokens
    if spill is None or cells is None or tokens <= LEAST_CONTEXT_TOKENS:
        return 0, 0.0
    at_once_bytes = spill.piece_bytes * spill.at_once(spill.complete(tokens))
    stays_bytes = spill.least_bytes(tokens) - at_once_bytes + max(0, kept_bytes - cells.bytes_for(tokens))
    return at_once_bytes, min(1.0, stays_bytes / kept_bytes)


def _own_cells(loaded: Loaded, layout: Layout, share: Share) -> Cells | None:
    """Return the keys and values of the units of `share` that take memory when written; None where there are none."""
    if not loaded.context.untouched_bytes or loaded.shape.has_streams:
        return None
    own = [(start, start + size) for start, size, unit in layout.kept if share.owners[unit] == share.node]
    tensors = [t for t in layout.flow.cells if any(start <= t.address < stop for start, stop in own)]
    return Cells(tensors, _libc.PAGE) if tensors else None
