"""Which texts a vocabulary can write: llama.cpp ends the process over a character that it has no tokens for.

That is so of vocabularies of the SPM kind (SentencePiece) that lack byte tokens; small models for a narrow purpose have
such. Others have a token for every byte, or one for what they do not know.
"""

from __future__ import annotations

from typing import Any

from edge_run.base.errors import ConfigError
from edge_run.runtime.llama import _ggml as ggml
from edge_run.runtime.llama._ggml import L

_BYTE_TOKENS = frozenset(b"<0x%02X>" % byte for byte in range(256))
_USUALLY_AMONG = 1024  # the first tokens, in nearly all vocabularies
_SPECIAL = L.LLAMA_TOKEN_ATTR_CONTROL | L.LLAMA_TOKEN_ATTR_USER_DEFINED
_SPACE = "\u2581"  # what SentencePiece writes for a space


class Spelling:
    """What a vocabulary can write. Looked up when first asked; thread-safe."""

    def __init__(self, vocab: Any) -> None:
        self._vocab = vocab
        self._texts: frozenset[bytes] | None = None
        self._special: tuple[str, ...] = ()

    def check(self, text: str) -> None:
        """Raise ConfigError when `text` has a character that cannot be written."""
        if missing := self.missing(text):
            names = ", ".join(f"{character!r} (U+{ord(character):04X})" for character in missing[:3])
            others = f" and {len(missing) - 3} others" if len(missing) > 3 else ""
            raise ConfigError(f"the model's vocabulary has no token for {names}{others}; leave out or replace them")

    def missing(self, text: str) -> list[str]:
        """Return the characters of `text` that cannot be written, each once, in order."""
        if self._texts is None:
            self._look_up()
        if not self._texts:
            return []
        for special in self._special:
            text = text.replace(special, "")
        return [character for character in dict.fromkeys(text) if not self._can_write(character, self._texts)]

    def _look_up(self) -> None:
        n_tokens = L.llama_vocab_n_tokens(self._vocab)
        is_complete = L.llama_vocab_type(self._vocab) != L.LLAMA_VOCAB_TYPE_SPM
        is_complete = is_complete or set(ggml.token_texts(self._vocab, min(n_tokens, _USUALLY_AMONG))) >= _BYTE_TOKENS
        texts = [] if is_complete else ggml.token_texts(self._vocab, n_tokens)
        if is_complete or (known := frozenset(texts)) >= _BYTE_TOKENS:
            self._texts = frozenset()
            return
        special = (token for token in range(n_tokens) if L.llama_vocab_get_attr(self._vocab, token) & _SPECIAL)
        self._special = tuple(text for token in special if (text := texts[token].decode("utf-8", "replace")))
        self._texts = known  # last: another thread that finds it takes the rest to be there too

    @staticmethod
    def _can_write(character: str, texts: frozenset[bytes]) -> bool:
        data = (_SPACE if character == " " else character).encode("utf-8", "surrogateescape")
        return data in texts or all(b"<0x%02X>" % byte in texts or bytes([byte]) in texts for byte in data)
