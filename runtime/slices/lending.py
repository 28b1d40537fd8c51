"""What a slice lends to its weights: the room of what its own units keep, until that is written, and idle buffers."""

from __future__ import annotations

from edge_run.base.results import Plan
from edge_run.devices.host.limit_watch import LimitWatch
from edge_run.runtime.engine.loading import Loaded
from edge_run.runtime.graph.units import Layout
from edge_run.runtime.planning.terms import Terms
from edge_run.runtime.slices.slice import Share
from edge_run.runtime.streaming.assemble import Streams
from edge_run.runtime.streaming.lent_residency import Borrower, CellRoom, IdleBuffer, LentResidency, NoBorrower
from edge_run.runtime.streaming.spilled_cells import SpilledCells
from edge_run.tiers import _libc
from edge_run.tiers.kv.cells import CellCount, Cells
from edge_run.tiers.kv.loans import Loans


def own_cells(loaded: Loaded, layout: Layout, share: Share) -> Cells | None:
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
