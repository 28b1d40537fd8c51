"""A replay as a picture: hits of each policy over the budget."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_run.base.files.texts import as_text
from edge_run.base.replay import Replay
from edge_run.base.units import GIB

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLES: dict[str, dict[str, Any]] = {
    "optimum": {"color": "#333333", "linestyle": "--"},
    "default": {"color": "#1f6fb2", "linewidth": 2.5},
    "lru": {"color": "#d1873a"},
    "lfu": {"color": "#6a9a3a"},
    "layer-lru": {"color": "#d1873a", "linestyle": ":"},
    "layer-lfu": {"color": "#6a9a3a", "linestyle": ":"},
}


def draw(result: Replay, figure: Figure) -> None:
    """Draw `result` into an empty figure."""
    axes = figure.subplots()
    budgets = sorted(result.budgets_bytes)
    for policy in result.policies:
        hits = [100 * result.of(policy, budget).hit_rate for budget in budgets]
        style = _STYLES.get(policy, {})
        axes.plot([budget / GIB for budget in budgets], hits, label=policy, marker="o", markersize=4, **style)
    axes.set_xlabel("experts in memory at most, GiB")
    axes.set_ylabel("found in memory, %")
    axes.set_ylim(bottom=0, top=101)
    axes.set_xlim(left=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    about = f"{result.experts_per_token} of {result.experts} experts in {result.layers} layers"
    title = f"{as_text(Path(result.trace).name)[:60]}: {about}, {result.decoded_tokens:,} tokens"
    figure.suptitle(title, fontsize=12, fontweight="bold", parse_math=False)
