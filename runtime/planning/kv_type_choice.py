"""`--kv-type auto`: how many bits keys and values get, weighed between room, time and quality.

Fewer bits leave more room for weights, so that less is read for each token, and more tokens of a context have room at
all. But attention on them may be several times as slow, and they cost quality. So 16 bits stay unless fewer make a
text of half the context, which is read and gone on with, faster by as much as their quality is worth; or unless only
fewer have room for the whole context. The type belongs to the numerics key: what was chosen before stays unless
something else gains a tenth more, and where other programs disturbed the measurement, nothing changes it.

Only types that cost next to no quality are weighed (benchmarks/kv_types.py): keys of four bits spoil some models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from edge_run.base.config import ModelConfig
from edge_run.base.errors import BudgetError, ConfigError
from edge_run.base.profile import DeviceProfile
from edge_run.base.results import Plan
from edge_run.base.units import format_size
from edge_run.runtime.forecasting.pass_bytes import read_bytes_at
from edge_run.runtime.inspection.kv_rules import check_kv_types
from edge_run.runtime.planning.micro_batch import decision_key
from edge_run.runtime.planning.planner import Planner
from edge_run.runtime.planning.prepared import Prepared
from edge_run.runtime.planning.weighing import ANSWER_TOKENS, Weighed, best, smaller, text_s
from edge_run.runtime.probing.attention import PLAIN
from edge_run.runtime.probing.kept_findings import KeptFindings
from edge_run.tiers.gguf import GgufModel

if TYPE_CHECKING:
    from edge_run.runtime.probing.attention import AttentionSpeeds

LEAST_GAINS = {PLAIN: 1.0, "q8_0": 1.1, "q8_0/q4_0": 1.3}  # over 16 bits, to be worth what they cost in quality


_UNMEASURED = "how fast attention is on fewer bits was not measured, so nothing was weighed"


def choose_kv_type(
    gguf: GgufModel,
    config: ModelConfig,
    prepare: Callable[[ModelConfig], Prepared],
    recall: Callable[[Prepared], DeviceProfile | None],
    *,
    may_measure: bool = True,
) -> Prepared:
    """Return the model prepared with the type of keys and values that is best for it here.

    prepare: prepares the model for a config with a type. recall: returns what is known of this device's speed.
    may_measure: whether the speeds of attention may be measured; where they are not known, nothing is weighed, and what
    was chosen before stays, or 16 bits where these have room. Raises what `prepare` raises for 16 bits; BudgetError
    only where no type has room.
    """
    from edge_run.runtime.probing.attention import attention_speeds, known_speeds

    options, refusal, n_tokens, speeds, is_disturbed = list[Weighed[str]](), None, 0, None, False
    for kv_type in LEAST_GAINS:
        typed = replace(config, kv_type=kv_type) if _can_be(gguf, config, kv_type) else None
        if typed is None:
            continue
        try:
            prepared = prepare(typed)
            if prepared.known is None or prepared.why_plain:
                return replace(prepared, kv_type_reason=f"{kv_type}: llama.cpp's own loader keeps no budget")
            planner = Planner(prepared)
            plan = planner.plan()
        except BudgetError as error:
            refusal = smaller(refusal, error)
            continue
        n_tokens = n_tokens or max(1, plan.wanted_context_tokens // 2)
        if not options:  # what is known of all types is the same
            speeds_of = attention_speeds if may_measure else known_speeds
            speeds = speeds_of(config, list(LEAST_GAINS), prepared.budget_bytes)
        if speeds is None:
            options.append(Weighed(kv_type, prepared, plan, 0.0))
            continue
        profile = recall(prepared)
        is_disturbed |= speeds.is_disturbed or bool(profile and profile.is_disturbed)
        options.append(_weighed(planner, plan, n_tokens, speeds, profile))
    if not options:
        assert refusal is not None
        raise refusal
    key, findings = decision_key(replace(config, kv_type=PLAIN)), KeptFindings.of_model(config.cache / "kv-types", gguf)
    kept = findings.read(_decisions) or {}
    able = [one for one in options if one.has_room] or options
    chosen = best(able, kept.get(key), is_kept_at_any_cost=is_disturbed or speeds is None)
    if speeds is None:
        return replace(chosen.prepared, kv_type_reason=f"{chosen.way}: {_UNMEASURED}")
    if not is_disturbed:
        findings.decide(kept, {key: chosen.way})
    return replace(chosen.prepared, kv_type_reason=reason(options, chosen, n_tokens))


def reason(options: Sequence[Weighed[str]], chosen: Weighed[str], n_tokens: int) -> str:
    """Return what was chosen, and what was weighed, in a line."""
    weighed = "; ".join(
        f"{one.way} {one.cost_s:.3g} s, {format_size(one.plan.streamed_bytes_per_pass)} read for a token"
        + ("" if one.has_room else ", no room for the whole context")
        for one in options
    )
    return f"{chosen.way}, for {n_tokens:,} tokens of text and {ANSWER_TOKENS} more: {weighed}"


def _can_be(gguf: GgufModel, config: ModelConfig, kv_type: str) -> bool:
    try:
        check_kv_types(gguf, replace(config, kv_type=kv_type))
    except ConfigError:  # by the model, or by another setting
        return False
    return True


def _weighed(
    planner: Planner, plan: Plan, n_tokens: int, attention: AttentionSpeeds, profile: DeviceProfile | None
) -> Weighed[str]:
    """Return a type with the time of a text of `n_tokens` tokens that goes on."""
    kv_type = planner.config.kv_type
    prepared = replace(planner.prepared, attention=attention.ratio(kv_type))
    there = replace(plan, streamed_bytes_per_pass=read_bytes_at(plan, n_tokens))
    n_texts = max(1, prepared.config.sequences)  # where nobody said how many, it may be another number for each type
    speeds = attention.by_type[kv_type]
    cost_s = text_s(prepared, there, n_tokens, planner.known.micro_batch_tokens, profile, speeds) / n_texts
    return Weighed(kv_type, prepared, there, cost_s, LEAST_GAINS[kv_type])


def _decisions(found: Any) -> dict[str, str]:
    return {str(key): kind for key, kind in found.items() if kind in LEAST_GAINS}
