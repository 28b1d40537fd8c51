"""What an event of a stream of OpenAI's API says of an answer, whoever sent it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MOST_TOKENS = 1 << 40  # more than any answer has, and few enough for any sum and speed


@dataclass(frozen=True, slots=True)
class AnswerEvent:
    """What came since the one before, or 0 and empty.

    text: what the answer says. finish: why it ended. reasoning: what the model thinks.
    """

    text: str = ""
    finish: str = ""
    completion_tokens: int = 0
    prompt_tokens: int = 0
    tokens_per_s: float = 0.0
    reasoning: str = ""


def answer_event(document: Any) -> AnswerEvent:
    """Return what the document of an event says. Raises ValueError where it is not as that API has it."""
    try:
        choices, usage = document.get("choices") or (), document.get("usage") or {}
        deltas = [choice.get("delta") or {} for choice in choices]
        texts = [*(choice.get("text") or "" for choice in choices), *(delta.get("content") or "" for delta in deltas)]
        thoughts = [delta.get("reasoning_content") or delta.get("reasoning") or "" for delta in deltas]  # or as vLLM
        return AnswerEvent(
            "".join(texts),
            "".join(str(choice.get("finish_reason") or "") for choice in choices),
            _count(usage.get("completion_tokens")),
            _count(usage.get("prompt_tokens")),
            float((document.get("timings") or {}).get("predicted_per_second") or 0.0),
            "".join(thoughts),
        )
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise ValueError("not an event of OpenAI's API") from error


def _count(value: Any) -> int:
    """Return how many tokens `value` says, 0 for nothing. Raises ValueError, TypeError or OverflowError."""
    number = int(value or 0)
    if not 0 <= number <= MOST_TOKENS:
        raise ValueError("no answer has so many tokens")
    return number
