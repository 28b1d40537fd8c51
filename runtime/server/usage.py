"""What answers took, in the words of the APIs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edge_run.base.results import Generation, Progress
from edge_run.runtime.server.generating import FinishedAnswer


def openai_usage(outcomes: Sequence[FinishedAnswer], choices: int | None = None) -> dict[str, Any]:
    """Return OpenAI's counts: each prompt once, what was cached of it when it first was read, all answers.

    choices: how many answers each prompt has; None: all are of one.
    """
    size = choices or len(outcomes)
    groups = [outcomes[start : start + size] for start in range(0, len(outcomes), size)]
    prompt = sum(group[0].generation.prompt_tokens for group in groups)
    completion = sum(outcome.generation.completion_tokens for outcome in outcomes)
    cached = sum(min(outcome.generation.cached_tokens for outcome in group) for group in groups)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": sum(outcome.reasoning_tokens for outcome in outcomes)},
    }


def timings(generation: Generation) -> dict[str, Any]:
    """Return llama-server's times of an answer, and of what was read for it."""
    read = generation.prompt_tokens - generation.cached_tokens
    decoded = max(0, generation.completion_tokens - 1)
    prefill, decode = generation.prefill_tokens_per_s, generation.decode_tokens_per_s
    guesses = generation.speculation
    return {
        "cache_n": generation.cached_tokens,
        "prompt_n": read,
        "prompt_ms": 1000 * read / prefill if prefill else 0.0,
        "prompt_per_token_ms": 1000 / prefill if prefill else 0.0,
        "prompt_per_second": prefill,
        "predicted_n": generation.completion_tokens,
        "predicted_ms": 1000 * decoded / decode if decode else 0.0,
        "predicted_per_token_ms": 1000 / decode if decode else 0.0,
        "predicted_per_second": decode,
        **({"draft_n": guesses.drafted, "draft_n_accepted": guesses.accepted} if guesses.drafted else {}),
        "bytes_read": generation.io.bytes_read,
        "finish_reason": generation.finish_reason,
    }


def llama_progress(progress: Progress) -> dict[str, Any]:
    """Return llama-server's word on how far a prompt is, with what we know besides."""
    return {
        "total": progress.all_tokens,
        "cache": 0,
        "processed": progress.done_tokens,
        "time_ms": round(progress.elapsed_s * 1000),
        "stage": progress.stage,
        "share": progress.share,
        "remaining_s": progress.remaining_s,
    }
