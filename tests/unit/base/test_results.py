"""Results as a program has them: what is shown of one, and what goes from one process to another."""

from __future__ import annotations

import json
import pickle
from dataclasses import fields

import numpy as np
import pytest

from edge_run.base.errors import ConfigError
from edge_run.base.replay import PolicyReplay, Replay
from edge_run.base.results import Backend, Generation, IoUse, MemoryUse, Numerics, Plan, PlanItem
from edge_run.base.strict_json import to_json
from edge_run.runtime.embedding.results import Embeddings

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


@pytest.mark.parametrize(("pooling", "rows"), [("mean", [[0], [1]]), ("none", [[0, 1, 2], [3]])])
def test_the_vectors_of_a_text_are_those_of_one_that_is_there(pooling: str, rows: list[list[int]]) -> None:
    """Of another number there were none, and with pooling `none` those of several texts for -1."""
    given = {field.name: getattr(GENERATION, field.name, 0) for field in fields(Embeddings)}
    vectors = np.arange(sum(map(len, rows)), dtype=np.float32)[:, None]
    found = Embeddings(**{**given, "vectors": vectors, "tokens": (3, 1), "pooling": pooling})
    assert [found.of(number)[:, 0].tolist() for number in (0, 1)] == rows
    for number in (-1, 2):
        with pytest.raises(ConfigError, match=f"^text {number}: there are 2, numbered from 0$"):
            found.of(number)


def test_a_policy_that_was_not_replayed_is_told_with_those_that_were() -> None:
    one = PolicyReplay("lru", 100, 4, 2, 0.5, 200, 50.0, 0)
    found = Replay("trace.csv", "model", 1, 4, 2, 400, 1, 4, (one,))
    assert found.of("lru", 100) is one
    with pytest.raises(ConfigError, match=r"^policy 'lru' under 50 bytes: was not replayed; there are lru"):
        found.of("lru", 50)
