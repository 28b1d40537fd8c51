"""One conversation in a decoder: the tokens that its sequence holds.

A new prompt that begins like the conversation so far costs only its new tokens: the prefix stays in the KV cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from edge_run.base.errors import Cancelled
from edge_run.base.protocols import BatchToken, Decoder, Logits
from edge_run.base.results import Speculation
from edge_run.runtime.decoding.common_prefix import common_prefix_tokens
from edge_run.runtime.decoding.context_shift import ContextShift
from edge_run.runtime.llama.prompt_text import check_room


class Keeper(Protocol):
    """What keeps prompts beyond this process."""

    def resume(self, prompt: Sequence[int], held: int) -> int | None:
        """Make the sequence hold what is kept of `prompt`, if that is more than its first `held` tokens.

        Returns how many tokens it holds then, None where it was not touched. What raises leaves it empty. Where `held`
        is 0 the context is emptied, of all sequences.
        """
        ...

    def finish(self) -> None:
        """Note that an answer is complete."""
        ...


class Session:
    """One sequence of a decoder. Not thread-safe. After an error its tokens are those that the decoder still holds.

    keeper: the prompt cache, where there is one.
    shifted_tokens: those that were taken out of a full context since the last prompt.
    keeps_whole_passes: whether the decoder keeps those of a prompt that is cancelled, for the next one.
    """

    def __init__(self, decoder: Decoder, why_plain: str = "", shift: ContextShift | None = None) -> None:
        """Begin an empty conversation.

        why_plain: why it does not speculate although the user asked for it.
        shift: makes room when the context is full, if that was asked for.
        """
        self.keeper: Keeper | None = None
        self.keeps_whole_passes = False
        self._shift, self._prompt_tokens, self.shifted_tokens = shift, 0, 0
        self._decoder = decoder
        self._sequence = 0
        self._why_plain = why_plain
        self.history: list[int] = []

    def feed(self, prompt: Sequence[int]) -> tuple[Logits, int]:
        """Make `prompt` the conversation; return the logits after it, `(vocabulary,)`, and how many tokens were there.

        Those were in memory, or in the prompt cache.

        Raises ContextFull when the prompt and one more token do not fit, and the errors of `Decoder.decode`.
        """
        check_room(len(prompt), self._decoder.capabilities.context_tokens)
        if self.shifted_tokens:  # what is left in the cells is not what reading it would give
            self.shifted_tokens = self._cut(0)
        self._prompt_tokens = len(prompt)
        cached = self._resume(prompt, common_prefix_tokens(self.history, prompt))
        return self._append(prompt[cached:]), cached

    def step(self, token: int, n_more: int | None = None) -> Logits:
        """Append one token; return the logits after it, `(vocabulary,)`. In a full context, others go first.

        n_more: as many tokens are appended after it at most, None where that is not known: no more than these are
            worth guessing.
        """
        position, n_tokens = self._next_shift
        if self._shift is None or not n_tokens:
            return self._append([token])
        self.shifted_tokens += n_tokens
        try:
            self._shift.shift(position, n_tokens)
            del self.history[position : position + n_tokens]
            return self._append([token])
        except BaseException:
            self._shift.give_up()
            self.history.clear()
            raise

    def forget(self) -> None:
        """Leave the conversation: its sequence belongs to others."""
        self._cut(0)

    def speculation(self) -> Speculation:
        """Return the figures of speculation since the last prompt; a plain session has none."""
        return Speculation(reason=self._why_plain)

    @property
    def is_full(self) -> bool:
        """Whether there is no room for another token."""
        return len(self.history) >= self._decoder.capabilities.context_tokens and not self._next_shift[1]

    @property
    def _next_shift(self) -> tuple[int, int]:
        """Which tokens go before another one comes, as (position, how many)."""
        return self._shift.plan_shift(self._prompt_tokens, len(self.history)) if self._shift else (0, 0)

    def _resume(self, prompt: Sequence[int], common: int) -> int:
        """Hold what is there of `prompt`, of which `common` tokens are in memory; return how much that is."""
        held = self._cut(common)  # first: of what cannot be cut there nothing is left, and all that is kept is more
        if self.keeper is None:
            return held
        try:
            resumed = self.keeper.resume(prompt, held)
        except BaseException:
            self.history.clear()
            raise
        if resumed is None:
            return held
        self.history[:] = prompt[:resumed]
        return resumed

    def finish(self) -> None:
        """The answer is complete: nothing follows it before the next prompt."""
        if self.keeper is not None:
            self.keeper.finish()

    def _cut(self, position: int) -> int:
        if position < len(self.history):
            position = self._decoder.rewind(self._sequence, position)
            del self.history[position:]
        return position

    def _append(self, tokens: Sequence[int]) -> Logits:
        start = len(self.history)
        batch = [
            BatchToken(token, start + i, self._sequence, wants_logits=i + 1 == len(tokens))
            for i, token in enumerate(tokens)
        ]
        try:
            rows = self._decoder.decode(batch)
            self.history.extend(tokens)  # here: where Ctrl-C comes after this, the decoder is cut as well
        except BaseException as error:
            may_stay = self.keeps_whole_passes and isinstance(error, Cancelled)
            end = self._decoder.rewind(self._sequence, start + len(tokens) if may_stay else start)
            self.history[start:] = tokens[: max(0, end - start)]
            del self.history[end:]
            raise
        return np.asarray(rows[-1])
