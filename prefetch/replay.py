"""Replays a route trace through expert caches: what each policy would have read, and the least possible.

The accounting is that of published figures: a look-up for each expert that a decoded token uses in a layer; a prompt
warms the cache, as one batch for each layer, and is not counted; a miss costs the layer's `expert_bytes`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_run.base.errors import BudgetError, ConfigError, ModelFileError, option
from edge_run.base.replay import PolicyReplay, Replay
from edge_run.base.units import MIB, format_size, parse_size, round_up
from edge_run.prefetch.experts import ExpertCache, MoeShape, Policy
from edge_run.prefetch.optimum import OptimalPolicy
from edge_run.prefetch.policies import POLICIES, make_policy
from edge_run.prefetch.routes import LookUp, RouteReader

OPTIMUM = "optimum"
NAMES = (OPTIMUM, *POLICIES)
MOST_IN_ALL = 1 << 20  # experts, of all layers together, for each of which policies keep some account
BUDGET_SHARES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1)


@dataclass(frozen=True, slots=True)
class Trace:
    """The look-ups of a trace, in order. expert_bytes: the size of an expert, by layer."""

    look_ups: tuple[LookUp, ...]
    expert_bytes: dict[int, int]
    moe: MoeShape
    model: str
    prompts: int
    decoded_tokens: int

    @property
    def all_bytes(self) -> int:
        """The size of all experts of all layers."""
        return self.moe.experts * sum(self.expert_bytes.values())


def read_trace(path: Path) -> Trace:
    """Return the trace at `path`. Raises ModelFileError where it is none, or decodes nothing; TierReadError."""
    with RouteReader(path) as reader:
        look_ups, header = tuple(reader.look_ups()), reader.header
    decoded = [look_up for look_up in look_ups if not look_up.is_prefill]
    if not decoded:
        raise ModelFileError(f"{path}: no decoded token, which is what is counted; record the trace with an answer")
    n_experts = header.n_experts or 1 + max(max(look_up.experts) for look_up in look_ups)
    if len(header.expert_bytes) * n_experts > MOST_IN_ALL:
        raise ModelFileError(
            f"{path}: {len(header.expert_bytes)} layers of {n_experts} experts, {MOST_IN_ALL} experts in all can be; "
            "choose another trace"
        )
    n_used = max(len(look_up.experts) for look_up in decoded)
    moe = MoeShape(tuple(sorted(header.expert_bytes)), n_experts, n_used)
    prompts, tokens = (_passes([one for one in look_ups if one.is_prefill is kind]) for kind in (True, False))
    return Trace(look_ups, header.expert_bytes, moe, header.model, prompts, tokens)


def replay(
    path: Path | str,
    budgets: Sequence[int | str] = (),
    policies: Sequence[str] = (),
    on_step: Callable[[str], None] | None = None,
) -> Replay:
    """Replay the trace at `path` through each of `policies` under each of `budgets`.

    budgets: as `4000MiB` or bytes; none: from a 32nd of all experts to all of them. policies: names in NAMES; none:
    all. on_step: told what is next. Raises ModelFileError or TierReadError for the trace, ConfigError for a name or a
    size, BudgetError for a budget below one expert.
    """
    for name in policies:
        if name not in NAMES:
            raise ConfigError(f"policy {name!r}: not known; choose one of {', '.join(NAMES)}")
    given_bytes = [parse_size(budget) for budget in budgets]
    trace = read_trace(Path(path))
    largest = max(trace.expert_bytes.values())
    budgets_bytes = given_bytes or [max(largest, int(trace.all_bytes * share)) for share in BUDGET_SHARES]
    for budget_bytes in budgets_bytes:
        _check_budget(budget_bytes, largest)
    replays = []
    for budget_bytes in dict.fromkeys(budgets_bytes):
        for name in dict.fromkeys(policies or NAMES):
            if on_step is not None:
                on_step(f"Replaying {name} within {format_size(budget_bytes)}")
            policy = OptimalPolicy(trace.look_ups) if name == OPTIMUM else make_policy(name, trace.moe)
            replays.append(run_policy(trace, budget_bytes, name, policy))
    moe = trace.moe
    return Replay(
        trace=str(path),
        model=trace.model,
        layers=len(moe.layers),
        experts=moe.experts,
        experts_per_token=moe.used,
        expert_bytes=trace.all_bytes,
        prompts=trace.prompts,
        decoded_tokens=trace.decoded_tokens,
        replays=tuple(replays),
    )


def run_policy(trace: Trace, budget_bytes: int, name: str, policy: Policy) -> PolicyReplay:
    """Return the figures of `policy`, called `name`, on `trace` within `budget_bytes`."""
    cache = ExpertCache(budget_bytes, trace.expert_bytes, policy)
    look_ups = misses = bytes_read = bypassed = 0
    for layer, experts, is_prefill in trace.look_ups:
        outcome = cache.look_up(layer, experts)
        if not is_prefill:
            look_ups += len(experts)
            misses += len(outcome.missing)
            bytes_read += len(outcome.missing) * trace.expert_bytes[layer]
            bypassed += len(outcome.bypassed)
    hits = look_ups - misses
    return PolicyReplay(
        name, budget_bytes, look_ups, hits, hits / look_ups, bytes_read, bytes_read / trace.decoded_tokens, bypassed
    )


def _passes(look_ups: Sequence[LookUp]) -> int:
    """Return how often the layers begin anew."""
    layers = [look_up.layer for look_up in look_ups]
    return bool(layers) + sum(layer <= before for before, layer in itertools.pairwise(layers))


def _check_budget(budget_bytes: int, largest_bytes: int) -> None:
    if budget_bytes < largest_bytes:
        minimum = round_up(largest_bytes, MIB)
        raise BudgetError(
            f"budget {format_size(budget_bytes)}: less than one expert, which takes {format_size(largest_bytes)}; give "
            f"{option('budgets', f'{minimum // MIB}MiB')} or more",
            found_bytes=budget_bytes,
            minimum_bytes=largest_bytes,
        )
