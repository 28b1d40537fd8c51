"""What an event of a stream of OpenAI's API says of an answer, whoever sent it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MOST_TOKENS = 1 << 40  # more than any answer has, and few enough for any sum and speed


@dataclass(frozen=True, slots=True)
class AnswerEvent:
    """What came since the one before, or 0 and empty: text, why the answer ended, its tokens, and how fast it was."""

    text: str = ""
    finish: str = ""
    completion_tokens: int = 0
    prompt_tokens: int = 0
    tokens_per_s: float = 0.0


def answer_event(document: Any) -> AnswerEvent:
    """Return what the document of an event says. Raises ValueError where it is not as that API has it."""
    try:
        choices, usage = document.get("choices") or (), document.get("usage") or {}
        texts = [choice.get("text") or (choice.get("delta") or {}).get("content") or "" for choice in choices]
        return AnswerEvent(
            "".join(texts),
            "".join(str(choice.get("finish_reason") or "") for choice in choices),
            _count(usage.get("completion_tokens")),
            _count(usage.get("prompt_tokens")),
            float((document.get("timings") or {}).get("predicted_per_second") or 0.0),
        )
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise ValueError("not an event of OpenAI's API") from error


def _count(value: Any) -> int:
    """Return how many tokens `value` says, 0 for nothing. Raises ValueError, TypeError or OverflowError."""
    number = int(value or 0)
    if not 0 <= number <= MOST_TOKENS:
        raise ValueError("no answer has so many tokens")
    return number
