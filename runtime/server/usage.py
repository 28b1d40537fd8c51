"""What answers took, and how far their prompts are, in the words of the APIs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(slots=True)
class PromptReading:
    """How far the prompt of an answer is read.

    n_tokens: of the prompt. n_cached: those that were there already. n_read: those that are there by now.
    began_s: when it began to be read. share: of the time that it takes, as it was last told; it never falls.
    """

    n_tokens: int
    n_cached: int
    n_read: int
    began_s: float
    share: float = 0.0

    def llama_progress(self, work: Progress | None, now_s: float) -> dict[str, Any]:
        """Return llama-server's word on it, with what we know besides: how far the passes at hand are.

        work: what the model computes; of its tokens as many are taken for this prompt's as it has left.
        """
        begun = until = self.n_read  # where the work at hand begins in the prompt, and where it ends
        if work is not None:
            begun = max(self.n_cached, self.n_read - work.done_tokens)
            until = min(self.n_tokens, begun + work.all_tokens)
        done = begun - self.n_cached + (work.share * (until - begun) if work else 0)
        self.share = max(self.share, max(done, self.n_read - self.n_cached) / max(1, self.n_tokens - self.n_cached))
        return {
            "total": self.n_tokens,
            "cache": self.n_cached,
            "processed": self.n_read,
            "time_ms": round((now_s - self.began_s) * 1000),
            "stage": work.stage if work else "prompt",
            "share": self.share,
            "remaining_s": work.remaining_s if work and self.n_read < until == self.n_tokens else None,
        }
