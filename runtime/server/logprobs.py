"""How likely tokens were, as OpenAI's APIs and llama-server's say it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

from edge_run.base.results import TokenLogprobs

LEAST_LOGPROB = -9999.0  # of what cannot be: JSON has no infinity

Spell: TypeAlias = Callable[[int], bytes]


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


def text_logprobs(found: Sequence[TokenLogprobs], spell: Spell, offset: int = 0) -> dict[str, Any] | None:
    """Return what text completions say of tokens; None where nothing was asked for.

    spell: as above. offset: where the first one is in the answer, in letters.
    """
    if not found:
        return None
    tokens = [_text(one[0][0], spell) for one in found]
    offsets = list(accumulate(map(len, tokens[:-1]), initial=offset))
    return {
        "tokens": tokens,
        "token_logprobs": [_finite(one[0][1]) for one in found],
        "top_logprobs": [{_text(token, spell): _finite(value) for token, value in one[1:]} for one in found],
        "text_offset": offsets,
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


def _finite(value: float) -> float:
    return max(LEAST_LOGPROB, value)
