"""How long a context is whose length nobody asked for: the model's own, as far as that costs nothing.

Keys and values take memory as they are written, and until then their room holds weights, unless sequences have cells of
their own. What a long context costs at once is a little of the buffers; and where all weights fit, room that other
programs may want. So the model's own length is halved until it fits, but not below what is usual. A model whose factors
change with the length of the context has the length up to which they stay the same: beyond it other logits come out.
"""

from __future__ import annotations

from dataclasses import replace

from edge_run.base.errors import BudgetError
from edge_run.base.results import Plan
from edge_run.base.units import round_down
from edge_run.runtime.inspection.draft_file import trained_context_tokens
from edge_run.runtime.inspection.inspection import Inspection
from edge_run.runtime.llama.context_shape import lends_cells
from edge_run.runtime.planning.planner import Planner
from edge_run.runtime.planning.prepared import Prepared
from edge_run.tiers.gguf import GgufModel

USUAL_TOKENS = 4096
STEP_TOKENS = 256  # to which llama.cpp rounds up
KV_SHARE = 1 / 2  # of what a model that fits leaves of the budget, at most, for what a longer context takes
BUFFER_SHARE = 1 / 16  # of the budget, at most, for what a longer context adds to buffers: these are not always lent


def rope_factors(gguf: GgufModel, context_tokens: int) -> str:
    """Return which factors a context of such a length has, `short` or `long`; empty for models without a choice."""
    original = _original_tokens(gguf)
    return "" if not original else "long" if context_tokens > original else "short"


def usual_lengths(gguf: GgufModel) -> list[int]:
    """Return the lengths that a context may have by itself: the longest first, at last the one that is always taken."""
    trained = trained_context_tokens(gguf)
    longest = trained or USUAL_TOKENS
    if original := _original_tokens(gguf):
        longest = min(longest, round_down(original, STEP_TOKENS) or original)
    least, found = min(longest, USUAL_TOKENS), list[int]()
    while longest > least:
        found.append(longest)
        longest = round_down(longest // 2, STEP_TOKENS)
    return [*found, least]


def longest_that_fits(usual: Prepared, longest: Prepared, lengths: list[int]) -> int:
    """Return the longest of `lengths` that costs nothing.

    usual: the model, inspected with the last of them.
    longest: the same with the first.
    """
    assert usual.known is not None
    try:
        least = Planner(usual).sketch()
    except BudgetError:
        return lengths[-1]
    room_tokens = lengths[0] if least.context_tokens >= usual.known.context_tokens else 0
    for tokens in lengths[:-1]:
        if tokens > room_tokens:
            continue
        between = _between(usual, longest, tokens)
        try:
            plan = Planner(between).sketch()
        except BudgetError:
            continue
        more_bytes = _draft_buffer_bytes(between) - _draft_buffer_bytes(usual)
        if _costs_nothing(plan, least, tokens, more_bytes, is_lent=lends_cells(usual.config)):
            return tokens
        if plan.mode == least.mode == "streamed":
            room_tokens = plan.context_tokens
    return lengths[-1]


def _costs_nothing(plan: Plan, least: Plan, tokens: int, draft_bytes: int, *, is_lent: bool) -> bool:
    """Return whether a context of `tokens`, planned as `plan`, takes nothing away from `least`, the usual one.

    draft_bytes: what it adds to the draft model's buffers. is_lent: whether keys and values take memory only as they
    are written.
    """
    if plan.mode != least.mode or plan.context_tokens < tokens:
        return False
    if plan.mode == "resident":
        return _size(plan) - _size(least) <= KV_SHARE * (least.budget_bytes - _size(least))
    taken = ("buffers", "reserve") if is_lent else ("buffers", "reserve", "kv")
    more_bytes = sum(_size(plan, what) - _size(least, what) for what in taken) + draft_bytes
    return more_bytes <= BUFFER_SHARE * least.budget_bytes


def _size(plan: Plan, what: str = "") -> int:
    return sum(item.size_bytes for item in plan.items if what in ("", item.what))


def _draft_buffer_bytes(prepared: Prepared) -> int:
    return prepared.draft.known.buffer_bytes if prepared.draft else 0


def _between(usual: Prepared, longest: Prepared, tokens: int) -> Prepared:
    """Return the model as it would be prepared with `tokens`."""
    assert usual.known is not None
    assert longest.known is not None
    known, draft = _sized(usual.known, longest.known, tokens), usual.draft
    if draft and longest.draft:
        trained = longest.draft.context_tokens
        draft = replace(draft, known=_sized(draft.known, longest.draft.known, min(tokens, trained)))
    return replace(usual, known=known, draft=draft)


def _sized(usual: Inspection, longest: Inspection, tokens: int) -> Inspection:
    """Return what an inspection with `tokens` would find: sizes grow in proportion."""
    share = (tokens - usual.context_tokens) / max(1, longest.context_tokens - usual.context_tokens)

    def size(low: int, high: int) -> int:
        return int(low + share * (high - low))

    return replace(
        usual,
        context_tokens=tokens,
        kv_bytes=size(usual.kv_bytes, longest.kv_bytes),
        cell_bytes=size(usual.cell_bytes, longest.cell_bytes),
        buffer_bytes=size(usual.buffer_bytes, longest.buffer_bytes),
        cell_rows=longest.cell_rows,
    )


def _original_tokens(gguf: GgufModel) -> int:
    """Return up to which length of the context a model has its short factors; 0 where it has one kind at most."""
    if not any("rope_factors" in tensor.name for tensor in gguf.tensors):
        return 0
    original = gguf.value("rope.scaling.original_context_length")
    return original if isinstance(original, int) and original > 0 else trained_context_tokens(gguf)
