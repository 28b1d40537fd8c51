"""How wide passes of a prompt are, where the user leaves it open: as wide as pays under this budget.

A wide pass reads the weights that stream once for many tokens, but needs larger buffers, beside which fewer weights
stay. What is best is predicted, in seconds where the device was measured, else from what is read. The width belongs to
the numerics key, so that it must not hang on the weather: it is one of a few, and a decision is kept for a model, a
budget and a context, that for the usual width too. It changes only for a gain of more than a tenth, and not by what was
measured while other programs were at work, by which none is kept either. Buffers do not shorten the context that was
asked for where narrower passes do without, nor the window that many answers read ahead through.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from edge_run.base.config import WIDEST_MICRO_BATCH, ModelConfig
from edge_run.base.errors import BudgetError
from edge_run.base.profile import DeviceProfile
from edge_run.base.results import Plan
from edge_run.partition.plan import MARGIN_BYTES, MARGIN_SHARE
from edge_run.runtime.inspection.cache import SHAPING
from edge_run.runtime.planning.planner import Planner
from edge_run.runtime.planning.prepared import Prepared
from edge_run.runtime.planning.weighing import Weighed, best, smaller, text_s
from edge_run.runtime.probing.kept_findings import KeptFindings
from edge_run.tiers.gguf import GgufModel

WIDTHS = (WIDEST_MICRO_BATCH, 128, 32, 1)
PROMPT_TOKENS = 512  # of the text that a width is judged by
SMALL_SHARE = 1 / 8  # of the budget, in buffers: then narrower passes cannot gain much


def widths(config: ModelConfig) -> Sequence[int]:
    """Return the widths that passes may have: verifying, exactness, and answers at once take more than one token."""
    needs_two = config.exact or config.uses_lookup or bool(config.draft_model)
    least = max(config.sequences, 1 + needs_two)
    return [width for width in WIDTHS if width >= min(least, WIDTHS[0])]


def choose_micro_batch(
    gguf: GgufModel,
    config: ModelConfig,
    prepare: Callable[[ModelConfig], Prepared],
    recall: Callable[[Prepared], DeviceProfile | None],
) -> Prepared:
    """Return the model prepared with the width that is expected to be fastest, or with the one that was chosen before.

    prepare: prepares the model for a config with a width, and may raise BudgetError. recall: returns what is known of
    this device's speed. Raises BudgetError with the smallest budget that works with any width.
    """
    findings, key = KeptFindings.of_model(config.cache / "micro-batch", gguf), decision_key(config)
    decisions = findings.read(_decisions) or {}
    kept, found, refusal, is_disturbed = decisions.get(key), list[Weighed[int]](), None, False
    for width in widths(config):
        if found and found[0].way == WIDTHS[0] and _is_easy(found[0].plan) and width != kept:
            continue
        try:
            prepared = prepare(replace(config, micro_batch_tokens=width))
            if prepared.known is None or prepared.why_plain or prepared.offload:
                return prepared
            plan = _planned(prepared)
            if width == WIDTHS[0] and kept in (None, width) and _has_margin(plan) and _is_easy(plan):
                findings.decide(decisions, {key: width})  # which no measurement has a part in
                return prepared
            profile = recall(prepared)
            cost_s = text_s(prepared, plan, PROMPT_TOKENS, width, profile)
            is_disturbed |= bool(profile and profile.is_disturbed)
            if found or width == widths(config)[-1] or _has_margin(plan):
                found.append(Weighed(width, prepared, plan, cost_s))
        except BudgetError as error:
            refusal = smaller(refusal, error)
    if not found:
        assert refusal is not None
        raise refusal
    if any(one.has_room and one.way > 1 for one in found):
        found = [one for one in found if one.has_room]
    if config.sequences > 1 and any(one.reads_ahead for one in found):
        found = [one for one in found if one.reads_ahead]
    chosen = best(found, kept, is_kept_at_any_cost=is_disturbed)
    if not is_disturbed:
        findings.decide(decisions, {key: chosen.way})
    return chosen.prepared


def _planned(prepared: Prepared) -> Plan:
    return Planner(prepared).plan()


def _is_easy(plan: Plan) -> bool:
    """Return whether narrower passes could not gain much: all weights fit, or buffers take little of the budget."""
    buffers = sum(item.size_bytes for item in plan.items if item.what in ("buffers", "work"))
    is_whole = plan.context_tokens >= plan.wanted_context_tokens
    return plan.mode == "resident" or (is_whole and buffers <= SMALL_SHARE * plan.budget_bytes)


def _has_margin(plan: Plan) -> bool:
    """Return whether a run may hold a little more than its plan says, without being refused then."""
    return plan.minimum_bytes + plan.minimum_bytes // MARGIN_SHARE + MARGIN_BYTES <= plan.budget_bytes


def decision_key(config: ModelConfig) -> str:
    """Return what a decision is kept for, of a model on this device."""
    facts = {field: getattr(config, field) for field in SHAPING if field != "micro_batch_tokens"}
    return json.dumps({"memory": config.memory, "draft": str(config.draft_model or ""), **facts}, default=str)


def _decisions(found: Any) -> dict[str, int]:
    return {str(key): width for key, width in found.items() if width in WIDTHS}
