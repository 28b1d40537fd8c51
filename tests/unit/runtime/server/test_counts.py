"""What the server counts of answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from edge_run.base.results import Speculation
from edge_run.runtime.server.counts import Counts, Speed


def test_guesses_of_all_answers_are_counted() -> None:
    counts = Counts()
    for drafted, accepted in ((9, 4), (0, 0), (5, 5)):
        made: Any = SimpleNamespace(
            prompt_tokens=3,
            cached_tokens=1,
            decode_tokens_per_s=2.0,
            prefill_tokens_per_s=30.0,
            ttft_s=0.5,
            text="a" * 1000,
            speculation=Speculation("draft", drafted=drafted, accepted=accepted),
        )
        counts.answer(made, "length")
    assert (counts.drafted_tokens, counts.accepted_tokens) == (14, 9)
    assert counts.finished == {"length": 3}
    assert counts.latest == Speed(2.0, 30.0, 0.5), "and nothing that grows with an answer is kept of it"
