"""Context shift: where a context is full, tokens are taken out of its middle, and the text goes on.

It is llama.cpp's: of what comes after the first tokens, the older half goes, and the keys of the rest are turned to
their new positions. So what is computed next is not what llama.cpp computes for the text that is left: its keys and
values still come from the whole text. That the first few tokens must stay is known from StreamingLLM (Xiao 2024).
"""

from __future__ import annotations

from typing import Protocol

WHOLE_PROMPT = -1


class ShiftingDecoder(Protocol):
    """A decoder that can take tokens out of the middle of its sequence 0."""

    def shift(self, position: int, n_tokens: int) -> None:
        """Take out `n_tokens` tokens from `position` on; those after them move down by as many positions."""
        ...

    def clear(self) -> None:
        """Empty all sequences."""
        ...


class ContextShift:
    """Makes room in a full context. keep_tokens: the first tokens that stay; WHOLE_PROMPT is those of the prompt."""

    def __init__(self, decoder: ShiftingDecoder, keep_tokens: int) -> None:
        self._decoder, self._keep_tokens = decoder, keep_tokens

    def plan_shift(self, prompt_tokens: int, all_tokens: int) -> tuple[int, int]:
        """Return which tokens go, as (position, how many), 0 where none can."""
        keep = prompt_tokens if self._keep_tokens == WHOLE_PROMPT else min(self._keep_tokens, prompt_tokens)
        return keep, (all_tokens - keep) // 2

    def shift(self, position: int, n_tokens: int) -> None:
        """Let these tokens go. Their keys are turned in the next pass; where that fails, `give_up` must follow."""
        self._decoder.shift(position, n_tokens)

    def give_up(self) -> None:
        """Empty the context: some keys may have been turned, and others not."""
        self._decoder.clear()
