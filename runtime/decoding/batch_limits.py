"""What an open context can be asked for, checked before anything is written into memory that is not Python's.

llama.cpp's batch is a handful of C arrays, made for so many tokens and so many sequences each, and ctypes writes where
it is told to, cutting numbers to 32 bits. So everything that comes to a decoder goes through `Limits` first, whoever
sends it: a member of a mesh, or a caller of ours. What llama.cpp itself refuses (positions with gaps) is left to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral

from edge_run.base.errors import ConfigError, ContextFull
from edge_run.base.protocols import BatchToken
from edge_run.runtime.decoding.driver import PassShape


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one open context. All methods raise ConfigError for what is beyond them, and change nothing.

    micro_batch_tokens: in one pass. outputs_per_pass: of these, whose logits may be asked for. can_branch: tokens may
    belong to several sequences. has_padding: a pass of a single token is made one of two (`LocalDecoder`).
    """

    context_tokens: int
    vocabulary: int
    micro_batch_tokens: int
    sequences: int
    outputs_per_pass: int
    can_branch: bool
    has_padding: bool = False

    def check_batch(self, batch: Sequence[BatchToken]) -> None:
        """Check every token of a batch, and the logits that its passes are asked for; ContextFull beyond the end."""
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
        """Return the shape of the pass that `tokens` are run in."""
        outputs = sum(bool(token.wants_logits) for token in tokens)
        is_padded = self.has_padding and len(tokens) == 1
        return PassShape(2, 2 * outputs) if is_padded else PassShape(len(tokens), outputs)

    def check_shape(self, shape: PassShape) -> None:
        """Check how wide a pass is, and how many rows of logits it gives."""
        _check("tokens in a pass", shape.tokens, 1, self.micro_batch_tokens)
        if not _is_whole(shape.outputs) or not 0 <= shape.outputs <= min(shape.tokens, self.outputs_per_pass):
            raise ConfigError(
                f"batch: asks for the logits of {_shown(shape.outputs)} tokens in one pass of {shape.tokens}, the "
                f"model was opened for {self.outputs_per_pass}; open it with more (outputs_per_pass)",
                found=shape.outputs,
                needed=self.outputs_per_pass,
            )

    def check_sequences(self, sequences: Iterable[int]) -> None:
        """Check that the context has them."""
        for sequence in sequences:
            _check("sequence", sequence, 0, self.sequences - 1)

    def check_branches(self, sequence: int, branches: Sequence[int]) -> None:
        """Check that `branches` may hold what `sequence` does: others than it, each once."""
        if not self.can_branch:
            raise ConfigError("batch: has branches, which this model or context cannot share a beginning with")
        if len(branches) >= self.sequences:
            raise ConfigError(f"batch: {len(branches)} branches of a sequence, the context has {self.sequences} in all")
        self.check_sequences((sequence, *branches))
        if len({sequence, *branches}) <= len(branches):
            raise ConfigError(f"batch: branches {branches} of sequence {sequence}: one is named twice")

    def check_keep(self, sequence: int, branch: int, branches: Sequence[int]) -> None:
        """Check that `sequence` may go on as `branch` does, and that `branches` may be emptied."""
        if branch != sequence:
            self.check_branches(sequence, (branch,))
        self.check_sequences((sequence, *branches))

    def check_position(self, position: int) -> None:
        """Check a position that a sequence is cut at, which may be the end."""
        _check("position", position, 0, self.context_tokens)

    def _refuse_position(self, position: object) -> None:
        if _is_whole(position) and isinstance(position, int) and position >= self.context_tokens:
            raise ContextFull(
                f"context of {self.context_tokens} tokens is full; start a new conversation, or raise -c",
                context_tokens=self.context_tokens,
            )
        _check("position", position, 0, self.context_tokens - 1)


def _check(what: str, value: object, least: int, most: int) -> None:
    if not _is_whole(value) or not least <= value <= most:  # type: ignore[operator]
        raise ConfigError(f"batch: {what} {_shown(value)}: must be {least} to {most}")


def _is_whole(value: object) -> bool:
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def _shown(value: object) -> str:
    return repr(value)[:40]
