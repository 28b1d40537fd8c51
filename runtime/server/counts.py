"""What the server counts since it started, for the status page and for metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from edge_run.base.results import Generation

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0)


class Spread:
    """How often values of each size came: a histogram with fixed bounds."""

    def __init__(self, bounds: tuple[float, ...] = _SECONDS) -> None:
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[sum(value > bound for bound in self.bounds)] += 1
        self.total += value


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast an answer was, in tokens a second, and how long its first token took."""

    decode_tokens_per_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    first_token_s: float = 0.0


@dataclass(slots=True)
class Counts:
    """Figures of all requests. generated_tokens grows with each token, the others when a request ends.

    drafted_tokens: guesses that were verified; accepted_tokens: those that came true and were used.
    finished: requests by how they ended: `stop`, `length`, `tool_calls`, `abort` (the client went away, or the server
    ended it), `error`. latest: of the answer that was finished last; nothing else of an answer is kept.
    """

    finished: dict[str, int] = field(default_factory=dict)
    generated_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    latest: Speed = field(default_factory=Speed)
    first_token_s: Spread = field(default_factory=Spread)
    request_s: Spread = field(default_factory=Spread)
    token_s: Spread = field(default_factory=Spread)

    @classmethod
    def together(cls, many: Iterable[Counts]) -> Counts:
        """Return the sums of the figures of several models, but for spreads and the latest answer."""
        found, finished = cls(), Counter[str]()
        for one in many:
            finished.update(one.finished)
            found.generated_tokens += one.generated_tokens
            found.prompt_tokens += one.prompt_tokens
            found.cached_tokens += one.cached_tokens
        found.finished = dict(finished)
        return found

    def end(self, reason: str) -> None:
        """Count a request that ended without an answer."""
        self.finished[reason] = self.finished.get(reason, 0) + 1

    def answer(self, generation: Generation, reason: str) -> None:
        """Count an answer."""
        self.end(reason)
        self.prompt_tokens += generation.prompt_tokens
        self.cached_tokens += generation.cached_tokens
        self.drafted_tokens += generation.speculation.drafted
        self.accepted_tokens += generation.speculation.accepted
        self.latest = Speed(generation.decode_tokens_per_s, generation.prefill_tokens_per_s, generation.ttft_s)
        if generation.decode_tokens_per_s:
            self.token_s.add(1 / generation.decode_tokens_per_s)
