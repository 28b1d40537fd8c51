"""How likely tokens were, as OpenAI's APIs and llama-server's say it."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from edge_run.base.results import TokenLogprobs

LEAST_LOGPROB = -9999.0  # of what cannot be: JSON has no infinity

Spell: TypeAlias = Callable[[int], bytes]


class Letters:
    """Counts the letters of an answer, a token after the other: a character may be of several tokens."""

    def __init__(self) -> None:
        self._decoder, self._n_letters = codecs.getincrementaldecoder("utf-8")(errors="replace"), 0

    def place(self, token: bytes) -> int:
        """Take the next token; return how many letters come before the character that it begins or goes on with."""
        if self._decoder.getstate()[0] and not 0x80 <= (token or b"\x80")[0] < 0xC0:
            self._n_letters += len(self._decoder.decode(b"", final=True))  # the character before is broken off
        before = self._n_letters
        self._n_letters += len(self._decoder.decode(token))
        return before


def chat_logprobs(found: Sequence[TokenLogprobs], spell: Spell) -> dict[str, Any] | None:
    """Return what chat completions say of tokens; None where nothing was asked for.

    spell: returns the bytes of a token.
    """
    if not found:
        return None
    content = [
        {**_token(*one[0], spell), "top_logprobs": [_token(token, value, spell) for token, value in one[1:]]}
        for one in found
    ]
    return {"content": content, "refusal": None}


def text_logprobs(found: Sequence[TokenLogprobs], spell: Spell, letters: Letters) -> dict[str, Any] | None:
    """Return what text completions say of tokens; None where nothing was asked for.

    spell: as above. letters: those of the tokens before.
    """
    if not found:
        return None
    tokens = [spell(one[0][0]) for one in found]
    return {
        "tokens": [_name(token) for token in tokens],
        "token_logprobs": [_finite(one[0][1]) for one in found],
        "top_logprobs": [_by_name(one, spell) for one in found],
        "text_offset": [letters.place(token) for token in tokens],
    }


def native_probabilities(found: Sequence[TokenLogprobs], spell: Spell) -> dict[str, Any]:
    """Return what llama-server says of tokens; nothing where nothing was asked for. spell: as above."""
    if not found:
        return {}

    def token(identity: int, value: float) -> dict[str, Any]:
        return {"id": identity, **_token(identity, value, spell)}

    told = [{**token(*one[0]), "top_logprobs": [token(*other) for other in one[1:]]} for one in found]
    return {"completion_probabilities": told}


def _token(token: int, value: float, spell: Spell) -> dict[str, Any]:
    return {"token": _text(token, spell), "logprob": _finite(value), "bytes": list(spell(token))}


def _text(token: int, spell: Spell) -> str:
    return spell(token).decode("utf-8", "replace")


def _by_name(one: TokenLogprobs, spell: Spell) -> dict[str, float]:
    """Return how likely tokens were, the likeliest first, and then the chosen one where it is none of them."""
    named: dict[str, float] = {}
    for token, value in (*one[1:], one[0]):
        named.setdefault(_name(spell(token)), _finite(value))
    return named


def _name(token: bytes) -> str:
    """Return what OpenAI calls a token in text completions: its text, or its bytes where it is none."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return f"bytes:{token.decode('ascii', 'backslashreplace')}"


def _finite(value: float) -> float:
    return max(LEAST_LOGPROB, value)
