"""The limits of an open context, checked before anything is written into C arrays.

llama.cpp's batch is a set of C arrays for a fixed number of tokens, and of sequences per token. ctypes would write
beyond their ends, and cut numbers to 32 bits. So every batch for a decoder is checked by `Limits` first, whether it
comes from a member of a mesh or from our own code. What llama.cpp refuses by itself (positions with gaps) is not
checked here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import NoReturn

from edge_run.base.errors import ConfigError, ContextFull, option
from edge_run.base.protocols import BatchToken
from edge_run.runtime.decoding.driver import PassShape
from edge_run.runtime.decoding.padding import LEAST_TOKENS


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one open context. The `check_` methods raise ConfigError for anything beyond them.

    context_tokens: the most tokens of a sequence.
    vocabulary: the number of token ids.
    micro_batch_tokens: the most tokens of a pass.
    sequences: the number of sequences.
    outputs_per_pass: the most tokens of a pass whose logits can be asked for.
    can_branch: whether a token may belong to several sequences.
    has_padding: whether a pass of a single token, or row of logits, gets another one (`LocalDecoder`).
    is_short: whether the memory budget has no room for a context as long as was asked for.
    has_window: whether later tokens may have the cells of those that a cut brings back.
    """

    context_tokens: int
    vocabulary: int
    micro_batch_tokens: int
    sequences: int
    outputs_per_pass: int
    can_branch: bool
    has_padding: bool = False
    is_short: bool = False
    has_window: bool = False

    def check_batch(self, batch: Sequence[BatchToken]) -> None:
        """Check every token of a batch, and the logits of each pass. Raises ContextFull beyond the context's end."""
        if not batch:
            raise ConfigError("batch: has no tokens; give at least one")
        for token in batch:
            _check("token", token.token, 0, self.vocabulary - 1)
            if not _is_whole(token.position) or not 0 <= token.position < self.context_tokens:
                self._refuse_position(token.position)
            self.check_sequences((token.sequence,))
            if token.branches:
                self.check_branches(token.sequence, token.branches)
        for start in range(0, len(batch), self.micro_batch_tokens):
            self.check_shape(self.shape_of(batch[start : start + self.micro_batch_tokens]))

    def shape_of(self, tokens: Sequence[BatchToken]) -> PassShape:
        """Return the shape of the pass that runs `tokens`."""
        outputs = sum(bool(token.wants_logits) for token in tokens)
        if self.has_padding:
            return PassShape(max(LEAST_TOKENS, len(tokens)), max(LEAST_TOKENS, outputs) if outputs else 0)
        return PassShape(len(tokens), outputs)

    def check_shape(self, shape: PassShape) -> None:
        """Check the numbers of tokens and of rows of logits of a pass."""
        _check("tokens in a pass", shape.tokens, 1, self.micro_batch_tokens)
        if not _is_whole(shape.outputs) or not 0 <= shape.outputs <= min(shape.tokens, self.outputs_per_pass):
            raise ConfigError(
                f"batch: asks for the logits of {_shown(shape.outputs)} tokens in one pass of {shape.tokens}, the "
                f"model was opened for {self.outputs_per_pass}; open it with more (outputs_per_pass)",
                found=shape.outputs,
                needed=self.outputs_per_pass,
            )

    def check_sequences(self, sequences: Iterable[int]) -> None:
        """Check that the context has these sequences."""
        for sequence in sequences:
            _check("sequence", sequence, 0, self.sequences - 1)

    def check_branches(self, sequence: int, branches: Sequence[int]) -> None:
        """Check that `branches` are different sequences, none of them `sequence`."""
        if not self.can_branch:
            raise ConfigError("batch: has branches, which this model or context cannot share a beginning with")
        if len(branches) >= self.sequences:
            raise ConfigError(f"batch: {len(branches)} branches of a sequence, the context has {self.sequences} in all")
        self.check_sequences((sequence, *branches))
        if len({sequence, *branches}) <= len(branches):
            raise ConfigError(f"batch: branches {branches} of sequence {sequence}: one is named twice")

    def check_keep(self, sequence: int, branch: int, branches: Sequence[int]) -> None:
        """Check that `sequence` can continue as `branch` does, and that `branches` can be emptied."""
        if branch != sequence:
            self.check_branches(sequence, (branch,))
        self.check_sequences((sequence, *branches))

    def check_position(self, position: int) -> None:
        """Check a position where a sequence is cut, which may be its end."""
        _check("position", position, 0, self.context_tokens)

    def refuse_more(self, context_tokens: int = 0) -> NoReturn:
        """Raise ContextFull. context_tokens: of what is full, where it is not one sequence."""
        context_tokens = context_tokens or self.context_tokens
        raise ContextFull(
            f"context of {context_tokens} tokens is full; start a new conversation, or raise "
            + (f"{option('memory')}, which has no room for more" if self.is_short else option("context_tokens")),
            context_tokens=context_tokens,
        )

    def _refuse_position(self, position: object) -> None:
        if _is_whole(position) and isinstance(position, int) and position >= self.context_tokens:
            self.refuse_more()
        _check("position", position, 0, self.context_tokens - 1)


def _check(what: str, value: object, least: int, most: int) -> None:
    if not _is_whole(value) or not least <= value <= most:  # type: ignore[operator]
        raise ConfigError(f"batch: {what} {_shown(value)}: must be {least} to {most}")


def _is_whole(value: object) -> bool:
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def _shown(value: object) -> str:
    return repr(value)[:40]
