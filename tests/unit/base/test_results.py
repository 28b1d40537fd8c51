"""Results as a program has them: what is shown of one, and what goes from one process to another."""

from __future__ import annotations

import json
import pickle

from edge_run.base.results import Backend, Generation, IoUse, MemoryUse, Numerics, Plan, PlanItem
from edge_run.base.strict_json import to_json

GENERATION = Generation(
    text="a fox.",
    token_ids=(5, 6),
    finish_reason="stop",
    seed=7,
    prompt_tokens=3,
    cached_tokens=0,
    completion_tokens=2,
    load_s=0.5,
    ttft_s=0.25,
    prefill_tokens_per_s=4.0,
    decode_tokens_per_s=2.0,
    memory=MemoryUse(100, 90, 50, 10, 20),
    io=IoUse(0, 0.0, 0.0, 1.0),
    numerics=Numerics("0.3", False, 1, "auto", "f16", "f16", 512, 1),
    plan=Plan("resident", 100, 80, 50, 50, 0, 0, 20, 256, 4, (PlanItem("weights", 50, "all of them"),)),
    backend=Backend("edge-run"),
    logprobs=(((5, -0.5),),),
)


def test_what_is_shown_of_an_answer_fits_a_screen() -> None:
    """With its plan and the other objects in it, it was pages in a notebook. They are still there, and in its JSON."""
    shown = repr(GENERATION)
    assert shown.startswith("Generation(text='a fox.', token_ids=(5, 6), finish_reason='stop', seed=7,")
    assert not any(f"{kind}(" in shown for kind in ("Plan", "Numerics", "MemoryUse", "IoUse", "Backend", "Speculation"))
    assert json.loads(to_json(GENERATION))["plan"]["items"][0]["what"] == "weights"


def test_an_answer_goes_to_another_process() -> None:
    assert pickle.loads(pickle.dumps(GENERATION)) == GENERATION
