"""Speculation that does not pay is left alone, by the times of real passes."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from edge_run import Model
from edge_run.runtime.generation import speculation_setup
from edge_run.runtime.speculation.session import SpeculativeSession
from edge_run.runtime.speculation.shared_drafters import SharedDrafters
from edge_run.runtime.speculation.shared_guesses import SharedGuesses
from edge_run.runtime.speculation.tally import SpeculationTally

PROMPT = "Once upon a time, in a small town by the sea, there was"
RESIDENT: dict[str, Any] = {"threads": 1, "context_tokens": 256, "micro_batch_tokens": 32, "draft_tokens": 15}
LONG = 200


def test_the_controller_lets_alone_what_does_not_pay(kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter is as slow as the model here: after the first passes nothing is verified any more.

    Times are those of the processor, all threads together: what others take of it is no time of a pass.
    """
    widths, passed = list[int](), SpeculationTally.passed

    def noted(tally: SpeculationTally, width: int, wall_s: float, plain_s: float) -> None:
        widths.append(width)
        passed(tally, width, wall_s, plain_s)

    monkeypatch.setattr(SpeculationTally, "passed", noted)
    for of in (SpeculativeSession, SharedGuesses, SharedDrafters):
        monkeypatch.setattr(speculation_setup, of.__name__, partial(of, clock=time.process_time))
    with Model(kit, draft=kit, speculate="draft", **RESIDENT) as model:
        did = model.generate(PROMPT, max_tokens=LONG, temperature=0).result().speculation
    assert did.switched_off_share > 0.5
    assert did.widths[1] > LONG / 2
    assert set(widths[len(widths) // 2 :]) == {1}
