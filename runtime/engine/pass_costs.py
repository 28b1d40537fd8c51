"""What passes of an engine cost by their width, to be learned from those that it computes."""

from __future__ import annotations

from collections.abc import Callable

from edge_run.partition.width_costs import WidthCosts
from edge_run.runtime.engine.engine import Engine


def pass_costs(engine: Engine) -> WidthCosts:
    """Return the costs of the passes of `engine`, none of which was seen yet."""
    return WidthCosts(_union_growth(engine))


def _union_growth(engine: Engine) -> Callable[[int], float]:
    """Return how a pass's reads grow with its width: in a mixture of experts as the union of the chosen experts."""
    n_experts, n_used = engine.gguf.value("expert_count"), engine.gguf.used_experts
    if not engine.plan.expert_bytes or not isinstance(n_experts, int) or n_experts <= n_used:
        return lambda width: 1.0
    share = n_used / n_experts
    return lambda width: (1 - (1 - share) ** width) / share
