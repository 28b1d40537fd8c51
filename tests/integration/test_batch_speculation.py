"""Guesses in passes that several requests share, with real llama.cpp: the same answers, whoever comes and goes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eager import Eager
from edge_run import Generation, Model, Request, SamplingConfig
from edge_run.base.protocols import Logits
from edge_run.base.results import Piece
from edge_run.runtime.generation import speculation_setup
from edge_run.runtime.generation.continuation import Continuation
from edge_run.runtime.generation.request import Turn
from edge_run.runtime.speculation.overlap import Overlap
from kit_models import KIT
from tiny_models import make_model

OPTIONS: dict[str, Any] = {"threads": 1, "context_tokens": 1024, "micro_batch_tokens": 32, "sequences": 3}
NOISE = 0.3  # between passes of different widths, on these models


@pytest.fixture(autouse=True)
def _eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every pass have guesses that can."""
    monkeypatch.setattr(speculation_setup, "WidthControl", Eager)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[Logits]]:
    """The logits by which each token was chosen, by the seeds of the answers."""
    choose, seen = Continuation.choose, dict[int, list[Logits]]()

    def watch(self: Continuation, logits: Logits) -> Piece | None:
        seen.setdefault(self.seed, []).append(logits.copy())
        return choose(self, logits)

    monkeypatch.setattr(Continuation, "choose", watch)
    return seen


def requests(model: Model) -> list[Request]:
    """Greedy, drawn, with penalties, of a grammar, with logprobs, and with an end in the text; some begin alike."""
    settings: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.7},
        {"temperature": 0, "repeat_penalty": 1.3, "frequency_penalty": 0.5},
        {"temperature": 0, "grammar": 'root ::= ("a " | "b " | "the ")+'},
        {"temperature": 0.5, "top_logprobs": 2},
        {"temperature": 0, "stop": ["e,", " of"]},
        {"temperature": 0},
    ]
    begin = "Once upon a time, in a small town by the sea, there was"
    prompts = [begin, "The fox", begin + " a dog", "One day", begin, begin[:30], "The " * 9]
    return [
        Request(model.prompt_tokens(prompt), 5 + 4 * number, SamplingConfig(seed=number, **chosen))
        for number, (prompt, chosen) in enumerate(zip(prompts, settings, strict=True))
    ]


def answered(model: Model, asked: list[Request], chance: random.Random) -> dict[int, Generation]:
    """Have requests come at random, and some be cancelled; return the answers of the others, by their seeds."""
    batch, waiting, found = model.open_batch(), list(asked), dict[int, Generation]()
    numbers: dict[int, int] = {}
    while waiting or not batch.is_idle:
        if waiting and chance.random() < 0.5:
            request = waiting.pop()
            numbers[batch.submit(model.begin(request), Turn())] = request.sampling.seed or 0
        if chance.random() < 0.1:
            batch.cancel(batch.submit(model.begin(Request("Once", 50, SamplingConfig(seed=99))), Turn()))
        for event in batch.advance():
            if event.request in numbers and event.is_last:
                assert event.piece
                assert event.piece.generation
                found[numbers[event.request]] = event.piece.generation
    return found


def told(generation: Generation) -> tuple[Any, ...]:
    return generation.text, generation.token_ids, generation.finish_reason, generation.logprobs


@pytest.mark.parametrize("draft", [KIT, None])
def test_with_exact_no_bit_depends_on_guesses_or_on_others(
    kit: Path, draft: Path | None, rows: dict[int, list[Logits]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor on guesses that are made beside passes, where one request is alone."""
    monkeypatch.setattr(Overlap, "is_on", True)
    options = {**OPTIONS, "exact": True}
    with Model(kit, **{**options, "sequences": 1}) as model:
        wanted = {
            request.sampling.seed: model.generate(
                request.prompt, max_tokens=request.max_tokens, sampling=request.sampling
            ).result()
            for request in requests(model)
        }
    wanted_rows = {seed: np.array(found) for seed, found in rows.items()}
    rows.clear()
    with Model(kit, **options, draft=draft, speculate="auto" if draft else "ngram", draft_tokens=20) as model:
        found = answered(model, requests(model), random.Random(7))
        figures = model.speculation
    assert {seed: told(one) for seed, one in found.items()} == {seed: told(one) for seed, one in wanted.items()}
    assert all(np.array_equal(np.array(rows[seed]), wanted_rows[seed]) for seed in wanted_rows)
    assert figures.accepted > (10 if draft else 0)
    assert figures.drafted >= figures.accepted
    assert (figures.noise, figures.near_ties) == (0, 0)


@pytest.mark.parametrize(("name", "mode"), [("llama", "draft+ngram"), ("gemma3", "draft+ngram"), ("mamba", "off")])
def test_answers_are_those_without_guesses_but_for_near_ties(
    name: str, mode: str, folder: Path, rows: dict[int, list[Logits]]
) -> None:
    """Trees, chains of a model with a sliding window, and none of one whose state cannot be cut."""
    path = make_model(name, folder)
    draft = make_model("llama" if name == "mamba" else name, folder, quantisation="Q8_0")
    begin = [3 + 7 * i % 300 for i in range(40)]
    prompts = [begin, begin[:25], [5, 6, 7], begin[10:]]
    asked = [Request(prompt, 24, SamplingConfig(temperature=0, seed=i)) for i, prompt in enumerate(prompts)]
    with Model(path, **OPTIONS) as model:
        wanted = answered(model, asked, random.Random(3))
    wanted_rows = {seed: np.array(found) for seed, found in rows.items()}
    rows.clear()
    with Model(path, **OPTIONS, draft=draft, draft_tokens=12) as model:
        found = answered(model, asked, random.Random(3))
        figures = model.speculation
    assert figures.mode == mode
    assert (figures.accepted > 20) == (mode != "off"), figures
    for seed, one in found.items():
        ours, theirs = one.token_ids, wanted[seed].token_ids
        same = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), 24)
        assert np.abs(np.array(rows[seed])[:same] - wanted_rows[seed][:same]).max() < NOISE
        if same < 24:
            second, best = np.sort(wanted_rows[seed][same])[-2:]
            assert best - second < NOISE


def test_guesses_give_way_where_cells_are_few(folder: Path) -> None:
    """300 cells for answers that come to 90 tokens each: guesses never make one wait that would not wait without."""
    prompts = [[3 + (7 * i + 11 * k) % 290 for i in range(30)] for k in range(4)]
    path = make_model("llama", folder)
    options = {**OPTIONS, "context_tokens": 256, "sequences": 4}
    with Model(path, **options, draft=make_model("llama", folder, quantisation="Q8_0")) as model:
        found = model.generate_many(prompts, max_tokens=60, temperature=0).results()
        assert model.speculation.accepted > 20
    assert [one.completion_tokens for one in found if isinstance(one, Generation)] == [60] * 4
