"""How far a prompt is, by what was read of it and by what the model computes."""

from __future__ import annotations

import pytest

from edge_run.base.results import Progress
from edge_run.runtime.server.usage import PromptReading

LEFT_S = 7.0


def work(done_tokens: int, all_tokens: int, share: float, stage: str = "prompt") -> Progress:
    return Progress(stage, done_tokens, all_tokens, share, 1.0, LEFT_S)


def test_tokens_and_time_are_those_of_the_prompt() -> None:
    found = PromptReading(100, 20, 60, began_s=5.0).llama_progress(None, now_s=6.5)
    assert found == {
        "total": 100,
        "cache": 20,
        "processed": 60,
        "time_ms": 1500,
        "stage": "prompt",
        "share": 0.5,
        "remaining_s": None,
    }


@pytest.mark.parametrize(
    ("n_read", "now", "share", "left_s"),
    [
        (20, work(0, 80, 0.25, "reading"), 0.25, LEFT_S),  # an answer alone: one work is all that is to be read
        (60, work(40, 80, 0.7), 0.7, LEFT_S),
        (60, work(56, 80, 0.7), 0.7, LEFT_S),  # a pass has just ended
        (20, work(0, 32, 0.5), 0.2, None),  # in passes that answers share, each is
        (84, work(0, 32, 0.5), 0.9, LEFT_S),  # the last one, others beside it
        (100, work(0, 1, 0.5), 1.0, None),
        (100, work(64, 96, 0.9), 1.0, None),  # of others
        (100, None, 1.0, None),
    ],
)
def test_the_share_of_the_time_goes_on_within_a_pass(
    n_read: int, now: Progress | None, share: float, left_s: float | None
) -> None:
    found = PromptReading(100, 20, n_read, 0.0).llama_progress(now, 1.0)
    assert found["share"] == pytest.approx(share)
    assert found["remaining_s"] == left_s
    assert found["stage"] == (now.stage if now else "prompt")


def test_the_share_never_falls() -> None:
    reading = PromptReading(100, 20, 20, 0.0)
    assert reading.llama_progress(work(0, 96, 0.75), 1.0)["share"] == pytest.approx(0.75)  # most of it for others
    reading.n_read = 52
    assert reading.llama_progress(None, 2.0)["share"] == pytest.approx(0.75)
    reading.n_read = 100
    assert reading.llama_progress(None, 3.0)["share"] == 1
