"""Context shift: where a context is full, tokens are taken out of its middle, and the text goes on.

It is that of llama.cpp's server: before the last cell is used, the older half of what comes after the first tokens
goes, and the keys of the rest are turned to their new positions. So what is computed next is not what llama.cpp
computes for the text that is left: its keys and values still come from the whole text. That the first few tokens must
stay is known from StreamingLLM (Xiao 2024).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edge_run.runtime.decoding.decoder import LocalDecoder

WHOLE_PROMPT = -1
LEAST_SPARE = 4  # tokens of a context that do not stay whatever is to stay


class ContextShift:
    """Makes room in a full context.

    keep_tokens: the first tokens that stay; WHOLE_PROMPT is those of the prompt.
    context_tokens: as many have room.
    adds_bos: whether the vocabulary has texts begin with a token of its own: one more stays then.
    """

    def __init__(self, decoder: LocalDecoder, keep_tokens: int, context_tokens: int, *, adds_bos: bool) -> None:
        self._decoder, self._context_tokens = decoder, context_tokens
        self._keep_tokens, self._adds_bos = keep_tokens, adds_bos

    def plan_shift(self, prompt_tokens: int, all_tokens: int) -> tuple[int, int]:
        """Return which of so many tokens go before the next one comes, as (position, how many), 0 for none."""
        keep = (prompt_tokens if self._keep_tokens == WHOLE_PROMPT else self._keep_tokens) + self._adds_bos
        keep = min(keep, max(0, self._context_tokens - LEAST_SPARE))
        return keep, max(0, all_tokens - keep) // 2 if all_tokens + 1 >= self._context_tokens else 0

    def shift(self, position: int, n_tokens: int) -> None:
        """Let these tokens go. Their keys are turned in the next pass; where that fails, `give_up` must follow."""
        self._decoder.shift(position, n_tokens)

    def give_up(self) -> None:
        """Empty the context: some keys may have been turned, and others not."""
        self._decoder.clear()
