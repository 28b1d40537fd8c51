"""The policies of an expert cache, by name."""

from __future__ import annotations

from collections.abc import Callable

from edge_run.base.errors import ConfigError
from edge_run.prefetch.counting import CountingPolicy
from edge_run.prefetch.experts import MoeShape, Policy
from edge_run.prefetch.next_use import NextUsePolicy

DEFAULT = "default"
_DECAY = 0.98  # of a use, per look-up of its layer: half after 34 tokens

POLICIES: dict[str, Callable[[MoeShape], Policy]] = {
    "lru": lambda moe: CountingPolicy(moe, decay=0, has_shares=False),
    "lfu": lambda moe: CountingPolicy(moe, decay=1, has_shares=False),
    "layer-lru": lambda moe: CountingPolicy(moe, decay=0, has_shares=True),
    "layer-lfu": lambda moe: CountingPolicy(moe, decay=_DECAY, has_shares=True),
    DEFAULT: NextUsePolicy,
}


def make_policy(name: str, moe: MoeShape) -> Policy:
    """Return a new policy of this name, for one cache. Raises ConfigError for another name."""
    if name not in POLICIES:
        raise ConfigError(f"policy {name!r}: not known; choose one of {', '.join(POLICIES)}")
    return POLICIES[name](moe)
