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
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from edge_run.base.config import ModelConfig
from edge_run.base.errors import BudgetError, ConfigError
from edge_run.base.profile import DeviceProfile
from edge_run.base.results import Plan
from edge_run.base.units import format_size
from edge_run.runtime.forecasting.forecast import pass_work
from edge_run.runtime.inspection.kv_rules import check_kv_types
from edge_run.runtime.planning.micro_batch import ANSWER_TOKENS, READ_BYTES_PER_S, computing_s, decision_key
from edge_run.runtime.planning.planner import Planner
from edge_run.runtime.planning.prepared import Prepared
from edge_run.runtime.probing.kept_findings import KeptFindings
from edge_run.tiers.gguf import GgufModel

if TYPE_CHECKING:
    from edge_run.runtime.probing.attention import AttentionSpeeds

PLAIN = "f16"
LEAST_GAINS = {PLAIN: 1.0, "q8_0": 1.1, "q8_0/q4_0": 1.3}  # over 16 bits, to be worth what they cost in quality
STICKINESS = 1.1


@dataclass(frozen=True, slots=True)
class Option:
    """A type, what the model was prepared as with it, and the seconds that a text is expected to take.

    has_room: whether the whole context that was asked for has room.
    token_bytes: what a token reads when half of the context is full.
    """

    kv_type: str
    prepared: Prepared
    cost_s: float
    has_room: bool
    token_bytes: int


def choose_kv_type(gguf: GgufModel, config: ModelConfig, prepare: Callable[[ModelConfig], Prepared]) -> Prepared:
    """Return the model prepared with the type of keys and values that is best for it here.

    prepare: prepares the model for a config with a type. Raises what `prepare` raises for 16 bits; BudgetError only
    where no type has room.
    """
    from edge_run.runtime.probing.attention import attention_speeds

    options, refusal, n_tokens, speeds = list[Option](), None, 0, None
    for kv_type in LEAST_GAINS:
        typed = replace(config, kv_type=kv_type) if _can_be(gguf, config, kv_type) else None
        if typed is None:
            continue
        try:
            prepared = prepare(typed)
        except BudgetError as error:
            refusal = error if refusal is None or error.minimum_bytes < refusal.minimum_bytes else refusal
            continue
        if prepared.known is None or prepared.why_plain:
            return replace(prepared, kv_type_reason=f"{kv_type}: llama.cpp's own loader keeps no budget")
        n_tokens = n_tokens or max(1, Planner(prepared).plan().wanted_context_tokens // 2)
        speeds = speeds or attention_speeds(config, list(LEAST_GAINS), prepared.budget_bytes)
        options.append(_weighed(prepared, typed, n_tokens, speeds))
    if speeds is None:
        assert refusal is not None
        raise refusal
    key, findings = decision_key(replace(config, kv_type=PLAIN)), KeptFindings.of_model(config.cache / "kv-types", gguf)
    kept = findings.read(_decisions) or {}
    chosen = best(options, kept.get(key), is_kept_at_any_cost=speeds.is_disturbed)
    if kept.get(key) != chosen.kv_type and not speeds.is_disturbed:
        findings.write({**kept, key: chosen.kv_type})
    return replace(chosen.prepared, kv_type_reason=reason(options, chosen, n_tokens))


def best(options: Sequence[Option], kept: str | None = None, *, is_kept_at_any_cost: bool = False) -> Option:
    """Return the best of `options`, of which the first has the most bits.

    kept: the type that was chosen before.
    is_kept_at_any_cost: it stays where it has room, as the costs are not to be trusted.
    """
    able = [one for one in options if one.has_room] or options
    costs = {one.kv_type: one.cost_s * LEAST_GAINS[one.kv_type] for one in able}
    found = min(able, key=lambda one: costs[one.kv_type])
    earlier = next((one for one in able if one.kv_type == kept), None)
    if earlier and (is_kept_at_any_cost or costs[earlier.kv_type] <= STICKINESS * costs[found.kv_type]):
        return earlier
    return found


def reason(options: Sequence[Option], chosen: Option, n_tokens: int) -> str:
    """Return what was chosen, and what was weighed, in a line."""
    weighed = "; ".join(
        f"{one.kv_type} {one.cost_s:.3g} s, {format_size(one.token_bytes)} read for a token"
        + ("" if one.has_room else ", no room for the whole context")
        for one in options
    )
    return f"{chosen.kv_type}, for {n_tokens:,} tokens of text and {ANSWER_TOKENS} more: {weighed}"


def _can_be(gguf: GgufModel, config: ModelConfig, kv_type: str) -> bool:
    try:
        check_kv_types(gguf, replace(config, kv_type=kv_type))
    except ConfigError:  # by the model, or by another setting
        return False
    return True


def _weighed(prepared: Prepared, config: ModelConfig, n_tokens: int, attention: AttentionSpeeds) -> Option:
    """Return a type with the time of a text of `n_tokens` tokens that goes on."""
    from edge_run.runtime.probing.probe import recall

    planner = Planner(prepared)
    plan = planner.plan()
    there = replace(plan, streamed_bytes_per_pass=_read_at(plan, n_tokens))
    speeds = attention.by_type[config.kv_type]
    profile = recall(prepared.gguf, prepared.config)
    if profile and planner.can_time(profile):
        profile = _with_attention(profile, speeds, attention.by_type[PLAIN])
        times, width = planner.times(there, profile), planner.known.micro_batch_tokens
        cost_s = times.prefill_s(n_tokens, width, is_first=False)
        cost_s += ANSWER_TOKENS * times.pass_s(1, n_tokens, 1, is_first=False)
    else:
        cost_s = _unmeasured_s(planner, there, n_tokens, speeds)
    return Option(
        config.kv_type,
        prepared,
        cost_s,
        plan.context_tokens >= plan.wanted_context_tokens,
        there.streamed_bytes_per_pass,
    )


def _with_attention(profile: DeviceProfile, speeds: tuple[float, float], plain: tuple[float, float]) -> DeviceProfile:
    """Return `profile` with attention as much slower as it was found to be on other keys and values."""
    narrow, wide = (
        known * speed / base for known, speed, base in zip(profile.attention_flops_per_s, speeds, plain, strict=True)
    )
    return replace(profile, attention_flops_per_s=(narrow, wide))


def _unmeasured_s(planner: Planner, plan: Plan, n_tokens: int, speeds: tuple[float, float]) -> float:
    """Return about how long it takes on a device of which only attention was measured."""
    work = pass_work(planner.gguf, planner.known.graph, 0).attention_flops
    narrow, wide = speeds
    width = planner.known.micro_batch_tokens
    wide_s = work * n_tokens * n_tokens / 2 / wide
    prompt_s = -(-n_tokens // width) * max(plan.streamed_bytes_per_batch / READ_BYTES_PER_S, computing_s(plan))
    token_s = max(plan.streamed_bytes_per_pass / READ_BYTES_PER_S, computing_s(plan) + work * n_tokens / narrow)
    return prompt_s + wide_s + ANSWER_TOKENS * token_s


def _read_at(plan: Plan, n_tokens: int) -> int:
    """Return what a token reads when the context has `n_tokens` tokens: between two points, as at the later one."""
    if not plan.by_context:
        return plan.streamed_bytes_per_pass
    point = next((point for point in plan.by_context if point.tokens >= n_tokens), plan.by_context[-1])
    return point.streamed_bytes_per_pass + point.kv_bytes_per_pass


def _decisions(found: Any) -> dict[str, str]:
    return {str(key): kind for key, kind in found.items() if kind in LEAST_GAINS}
