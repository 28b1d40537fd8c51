"""Guesses of a draft model that has another vocabulary: its text and the target's are one through their bytes.

The target's tokens become text and the draft model's tokens of it; what that one guesses becomes text again, and the
target's tokens of it (Timor et al., 2025, and what transformers calls universal assisted generation; here with trees).
A guess in the target's tokens is worth what the shortest path of the draft model's is that has all of its bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from itertools import accumulate

from edge_run.base.errors import ConfigError
from edge_run.runtime.llama import _ggml as ggml
from edge_run.runtime.llama.model import LlamaModel
from edge_run.runtime.speculation.drafting import Guess, Guesses, Path

BLOCK_TOKENS = 64  # of the target, translated at once: a text that grows is not translated anew
KNOWN_BLOCKS = 4096
LEAD = "\n"  # no vocabulary joins it to what follows, but for another line break


class Translation:
    """Between the tokens of a draft model and those of a target. One thread at a time.

    is_possible: whether both have text.
    """

    def __init__(self, draft: LlamaModel, target: LlamaModel) -> None:
        self._draft, self._target = _Vocabulary(draft), _Vocabulary(target)
        self.is_possible = self._draft.has_text and self._target.has_text
        self._beginning = draft.tokenize("", add_special=True, parse_special=False)
        self._block = functools.lru_cache(KNOWN_BLOCKS)(self._translated)

    def text(self, tokens: Sequence[int]) -> list[int] | None:
        """Return the draft model's tokens of a text; None where it ends inside a character, or cannot be written."""
        if _whole(self._target.bytes_of(tokens[-8:])) is None:
            return None
        found = list(self._beginning)
        for start in range(0, len(tokens), BLOCK_TOKENS):
            block = self._block(tuple(tokens[start : start + BLOCK_TOKENS]))
            if block is None:
                return None
            found += block
        return found

    def guesses(self, guesses: Guesses, most_depth: int) -> Guesses:
        """Return guesses of a text in the target's tokens, at most `most_depth` deep, each with its beginnings."""
        found: dict[Path, Guess] = {}
        for leaf in _leaves(guesses):
            for path, guess in self._of_path(leaf, guesses, most_depth):
                if path not in found or found[path].value < guess.value:
                    found[path] = guess
        return found

    def _of_path(self, leaf: Path, guesses: Guesses, most_depth: int) -> Iterator[tuple[Path, Guess]]:
        """Yield the target's tokens of one path, with the guess whose bytes each ends in."""
        ends = list(accumulate(len(self._draft.bytes_of((token,))) for token in leaf))
        tokens = self._target.tokens_of(self._draft.bytes_of(leaf).decode("utf-8", "ignore")) or ()
        end = 0
        for depth, token in enumerate(tokens[:most_depth], 1):
            end += len(self._target.bytes_of((token,)))
            n_draft = next((n for n, its_end in enumerate(ends, 1) if its_end >= end), None)
            if n_draft is None:
                return
            yield tuple(tokens[:depth]), guesses[leaf[:n_draft]]

    def _translated(self, block: Sequence[int]) -> list[int] | None:
        return self._draft.tokens_of(self._target.bytes_of(block).decode("utf-8", "ignore"))


class _Vocabulary:
    """The tokens of a model as bytes, and text as its tokens. has_text: whether text is what it reads and writes."""

    def __init__(self, model: LlamaModel) -> None:
        self._model = model
        self._bytes = functools.lru_cache(None)(lambda token: ggml.token_bytes(model.vocab, token, False))
        self._lead: list[int] = []
        found = self.bytes_of(self.tokens_of("a") or ())
        self.has_text = found.strip() == b"a"
        if self.has_text and found != b"a":  # it begins any text with a space
            self._lead = self._tokenize(LEAD)

    def bytes_of(self, tokens: Sequence[int]) -> bytes:
        """Return what tokens stand for; control tokens for nothing."""
        return b"".join(map(self._bytes, tokens))

    def tokens_of(self, text: str) -> list[int] | None:
        """Return the tokens of a text that goes on another; None where the vocabulary cannot write it."""
        try:
            found = self._tokenize(LEAD + text if self._lead else text)
        except ConfigError:
            return None
        n_lead = len(self._lead)
        return found[n_lead:] if found[:n_lead] == self._lead else self._tokenize(text)

    def _tokenize(self, text: str) -> list[int]:
        return self._model.tokenize(text, add_special=False, parse_special=False)


def _leaves(guesses: Guesses) -> list[Path]:
    """Return the paths that no other one goes on."""
    beginnings = {path[:-1] for path in guesses}
    return [path for path in guesses if path not in beginnings]


def _whole(data: bytes) -> str | None:
    """Return bytes as text, None where they end inside a character."""
    text = data.decode("utf-8", "surrogateescape")
    return None if text and "\udc80" <= text[-1] <= "\udcff" else text
