"""What a slice has for its weights: the terms of its plan, and what lends it the room of what is not written yet."""

from __future__ import annotations

from dataclasses import replace

from edge_run.base.results import Plan
from edge_run.devices.host.limit_watch import LimitWatch
from edge_run.runtime.decoding.driver import ONE_TOKEN
from edge_run.runtime.engine.loading import Loaded
from edge_run.runtime.engine.spilling import spillable_uses
from edge_run.runtime.graph.units import Layout
from edge_run.runtime.llama.holdings import Holdings
from edge_run.runtime.planning.spill_terms import with_spill
from edge_run.runtime.planning.terms import LEAST_CONTEXT_TOKENS, Terms
from edge_run.runtime.slices.maps import SliceMaps
from edge_run.runtime.slices.slice import Share
from edge_run.runtime.streaming.assemble import Streams
from edge_run.runtime.streaming.lent_residency import Borrower, CellRoom, IdleBuffer, LentResidency, NoBorrower
from edge_run.runtime.streaming.spilled_cells import SpilledCells
from edge_run.tiers import _libc
from edge_run.tiers.kv.cells import CellCount, Cells
from edge_run.tiers.kv.loans import Loans


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


def lender(
    loaded: Loaded, terms: Terms, plan: Plan, streams: Streams, count: CellCount, spilled: SpilledCells | None
) -> LentResidency | None:
    """Return what lends weights the room that passes leave, and has them give back what a limit takes that falls.

    terms: those of `plan`. streams: its weights. count: counts the context's cells in use. spilled: those that may be
    in a file. None where no weights can, and none are.
    """
    borrower: Borrower | None = next((stream for stream in streams if stream.most_loans > stream.least_loans), None)
    if borrower is None and spilled is None:
        return None
    borrower = borrower or NoBorrower()
    loans = Loans(terms.pool_bytes, borrower.loan_bytes, borrower.most_loans, borrower.least_loans)
    buffer = IdleBuffer(loaded.driver.compute_buffer, terms.idle_bytes)
    cells = CellRoom(terms.cells, spilled.spill if spilled else None) if terms.cells else None
    lent = LentResidency(loans, borrower, buffer, cells, count)
    lent.lacking_bytes = LimitWatch(sum(item.size_bytes for item in plan.items)).lacking_bytes
    return lent
