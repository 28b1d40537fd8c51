"""How much two lists of tokens have in common: what a conversation that grows need not read again."""

from __future__ import annotations

from collections.abc import Sequence


def common_prefix_tokens(held: Sequence[int], prompt: Sequence[int]) -> int:
    """Return how many tokens `prompt`, without its last one, begins with that `held` begins with too."""
    most = max(0, min(len(held), len(prompt) - 1))
    if list(held[:most]) == list(prompt[:most]):  # mostly it is so, and quick to see
        return most
    return next(i for i, (ours, theirs) in enumerate(zip(held, prompt, strict=False)) if ours != theirs)
