"""Makes what lends weights the room that passes leave: under one plan, of a model or of a device's slice of it."""

from __future__ import annotations

from edge_run.base.results import Plan
from edge_run.devices.host.limit_watch import LimitWatch
from edge_run.runtime.engine.loading import Loaded
from edge_run.runtime.llama.row_products import RowProducts
from edge_run.runtime.planning.terms import Terms
from edge_run.runtime.streaming.assemble import Streams
from edge_run.runtime.streaming.lent_residency import (
    Borrower,
    CellRoom,
    IdleBuffer,
    LentResidency,
    NoBorrower,
    WorkRoom,
)
from edge_run.runtime.streaming.spilled_cells import SpilledCells
from edge_run.tiers.kv.cells import CellCount
from edge_run.tiers.kv.loans import Loans


def open_lender(
    loaded: Loaded,
    terms: Terms,
    plan: Plan,
    streams: Streams,
    count: CellCount | None,
    spilled: SpilledCells | None,
    products: RowProducts | None = None,
    narrow_tokens: int = 1,
) -> LentResidency | None:
    """Return what lends weights the room that passes leave, and has them give back what a limit takes that falls.

    terms: those of `plan`. streams: its weights. count: counts the context's cells in use. spilled: those that may be
    in a file. products: computes products in row slices, whose work is lent. narrow_tokens: of a pass, at most, beside
    which the compute buffer is idle. None where no weights have a use for it, and nothing is spilled or short of room.
    """
    borrower: Borrower | None = next((stream for stream in streams if stream.most_loans > stream.least_loans), None)
    is_short = terms.context_tokens < loaded.context.context_tokens  # who counts cells keeps it so
    if borrower is None and (spilled or is_short):
        borrower = NoBorrower()
    if borrower is None or loaded.prepared.offload:
        return None
    loans = Loans(terms.pool_bytes, borrower.loan_bytes, borrower.most_loans, borrower.least_loans)
    buffer = IdleBuffer(loaded.driver.compute_buffer, terms.idle_bytes, narrow_tokens)
    cells = CellRoom(terms.cells, spilled.spill if spilled else None) if terms.cells else None
    draft_cells = CellRoom(terms.draft_cells) if terms.draft_cells else None
    per_token = terms.work_token_bytes, terms.sliced_token_bytes
    work = WorkRoom(terms.narrow_tokens, *per_token, products.close) if products and terms.narrow_tokens else None
    rows = loaded.context.rows if terms.row_bytes else None
    if rows:
        rows.is_lent = True
    lender = LentResidency(loans, borrower, buffer, cells, count, draft_cells, work, rows)
    lender.lacking_bytes = LimitWatch(sum(item.size_bytes for item in plan.items)).lacking_bytes
    return lender
