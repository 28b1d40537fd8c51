"""Answers in shared passes, with real llama.cpp: each is what it is alone, and what they share is computed once."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_run import EdgeRunError, Generation, Model, Request, SamplingConfig
from edge_run.base.protocols import BatchToken, Decoder, Logits
from edge_run.base.results import Piece
from edge_run.runtime.decoding.one_at_a_time import OneAtATime
from edge_run.runtime.decoding.session import Session
from edge_run.runtime.generation import scheduled_passes
from edge_run.runtime.generation.batched_answers import BatchedAnswers
from edge_run.runtime.generation.continuation import Continuation
from edge_run.runtime.generation.meter import Meter
from edge_run.runtime.generation.request import Turn
from exactness import open_at
from in_child import in_child
from kit_models import streamed
from sabotage import sabotage
from tiny_models import make_model

OPTIONS: dict[str, Any] = {"threads": 1, "context_tokens": 2048, "micro_batch_tokens": 64, "sequences": 6}
GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0}
NOISE = 0.3  # between passes of different widths, on these models
NOISE_OF_EXPERTS = 1.5  # where two experts are nearly equally likely, and another one is chosen


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, ...], list[Logits]]:
    """The logits by which each token was chosen, by the prompt."""
    monkeypatch.setattr(Continuation, "choose", Continuation.choose)  # which is put back
    return watch_rows()


def watch_rows() -> dict[tuple[int, ...], list[Logits]]:
    """Keep the logits by which each token is chosen from now on, by the prompt."""
    choose, seen = Continuation.choose, dict[tuple[int, ...], list[Logits]]()

    def watch(self: Continuation, logits: Logits) -> Piece | None:
        seen.setdefault(tuple(self.prompt), []).append(logits.copy())
        return choose(self, logits)

    Continuation.choose = watch  # type: ignore[method-assign]
    return seen


def make_prompts(n_prompts: int) -> list[list[int]]:
    """Prompts of various lengths, some of which begin alike."""
    chance = random.Random(1)
    begin = [chance.randrange(3, 300) for _ in range(90)]
    return [
        begin[: chance.choice([0, 20, 90])] + [chance.randrange(3, 300) for _ in range(chance.randrange(1, 70))]
        for _ in range(n_prompts)
    ]


def check_alike(
    noise: float,
    prompt: list[int],
    found: Generation,
    rows: list[Logits],
    wanted: Generation,
    wanted_rows: list[Logits],
) -> None:
    """Check that an answer is the one wanted, but for near ties: after one the answers have parted."""
    for i, (ours, theirs) in enumerate(zip(rows, wanted_rows, strict=False)):
        assert np.abs(ours - theirs).max() < noise, (prompt, i)
        if found.token_ids[i : i + 1] != wanted.token_ids[i : i + 1]:
            best = np.sort(theirs)[-2:]
            assert best[1] - best[0] < noise, (prompt, i)
            return
    assert found.token_ids == wanted.token_ids
    assert found.finish_reason == wanted.finish_reason


def check_many(
    path: Path, rows: dict[tuple[int, ...], list[Logits]], n_prompts: int = 14, noise: float = NOISE, **options: Any
) -> None:
    """Check answers in shared passes against the same one by one."""
    prompts = make_prompts(n_prompts)
    with Model(path, **{**OPTIONS, **options}) as model:
        found = model.generate_many(prompts, **GREEDY).results()
        shared = dict(rows)
        rows.clear()
        alone = [model.generate(prompt, **GREEDY).result() for prompt in prompts]
    for prompt, one, wanted in zip(prompts, found, alone, strict=True):
        assert isinstance(one, Generation)
        assert one.numerics.batching == "unified"
        assert wanted.numerics.batching == ""
        check_alike(noise, prompt, one, shared[tuple(prompt)], wanted, rows[tuple(prompt)])


@pytest.mark.parametrize(
    ("name", "quantisation"),
    [("llama", "Q4_0"), ("gemma3", None), ("mamba", None), ("falcon-h1", None), ("lfm2", None), ("qwen3moe", None)],
)
def test_answers_are_those_of_each_prompt_alone(
    name: str, quantisation: str | None, rows: dict[tuple[int, ...], list[Logits]], folder: Path
) -> None:
    """Dense, with a sliding window, recurrent, hybrids, a mixture."""
    noise = NOISE_OF_EXPERTS if "moe" in name else NOISE
    check_many(make_model(name, folder, quantisation=quantisation), rows, noise=noise)


def test_answers_over_streamed_weights(rows: dict[tuple[int, ...], list[Logits]], grown: Path) -> None:
    check_many(
        grown, rows, n_prompts=5, **{**streamed(), "context_tokens": 2048, "micro_batch_tokens": 64, "sequences": 4}
    )


def test_a_pass_reads_for_all_what_it_reads_for_one(grown: Path) -> None:
    with Model(grown, **{**streamed(), "sequences": 8, "context_tokens": 512}) as model:
        alone = model.generate([5, 6, 7], max_tokens=16, temperature=0).result()
        many = model.generate_many([[5, 6, 7 + i] for i in range(8)], max_tokens=16, temperature=0).results()
    assert all(isinstance(one, Generation) for one in many)
    read = sum(one.io.bytes_per_token for one in many if isinstance(one, Generation)) / 8
    assert read < 0.2 * alone.io.bytes_per_token  # an eighth, and a little for keys and values


@pytest.mark.parametrize("share", [0, 2])
@pytest.mark.parametrize(
    ("name", "quantisation"),
    [("llama", "Q4_0"), ("llama", "Q4_K_M"), ("gemma3", "Q8_0"), ("qwen3moe", "Q8_0"), ("mamba", None)],
)
@in_child
def test_with_exact_no_bit_depends_on_who_shares_the_passes(
    name: str, quantisation: str | None, share: int, folder: Path
) -> None:
    """Requests that come at random and are cancelled at random, against each alone; streamed, and all in memory."""
    chance, seen = random.Random(5), watch_rows()
    prompts = [*make_prompts(6 if name == "mamba" else 20), [7], [8, 9], make_prompts(1)[0][:1] * 65]
    threads = 2 if share or quantisation == "Q4_0" else 1  # they wait for each other at each chunk: of one model only
    options = {**OPTIONS, "threads": threads, "exact": True, "repack": "off"}
    engine = open_at(make_model(name, folder, quantisation=quantisation), share, options)
    assert engine.config.sequences == (1 if name == "mamba" else 6)
    batch = BatchedAnswers(engine, Meter(engine), engine.config.sequences)

    def submit(prompt: list[int]) -> int:
        greedy = SamplingConfig(temperature=0)
        return batch.submit(Continuation(engine.model, prompt, 9, greedy, engine.context_tokens), Turn())

    waiting, left, at_once = list(prompts), set[int](), 0
    while waiting or not batch.is_idle:
        if waiting and chance.random() < 0.4:
            left.add(submit(waiting.pop()))
        if left and chance.random() < 0.1:
            batch.cancel(chance.choice(sorted(left)))
        left -= {event.request for event in batch.advance() if event.is_last}
        at_once = max(at_once, batch.n_running)
    assert at_once == (1 if name == "mamba" else 6)
    shared = dict(seen)
    seen.clear()
    for prompt in prompts:
        submit(prompt)
        while not batch.is_idle:
            batch.advance()
    batch.close()
    logits, _ = Session(engine.front).feed(prompts[-1])  # whose last pass has one token
    assert np.array_equal(logits, seen[tuple(prompts[-1])][0])
    engine.close()
    assert sum(map(len, shared.values())) > 4 * len(prompts)
    for key, found in shared.items():
        assert np.array_equal(found, seen[key][: len(found)]), key


class InFlight(OneAtATime):
    """Passes whose rows are handed out later, as a mesh does. Each is computed when it is begun."""

    most_in_flight = 5

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder)
        self._begun = deque[Logits]()

    def begin(self, batch: Sequence[BatchToken]) -> None:
        super().begin(batch)
        self._begun.append(super().finish().copy())

    def finish(self) -> Logits:
        return self._begun.popleft()


def test_when_memory_runs_out_the_youngest_waits_and_nothing_is_lost(
    rows: dict[tuple[int, ...], list[Logits]], folder: Path
) -> None:
    """300 cells for six answers that come to 90 tokens each."""
    check_short(folder, rows, [(30, 60)] * 6)


def test_who_gives_way_while_its_token_is_in_flight_gets_it_once(
    rows: dict[tuple[int, ...], list[Logits]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third prompt takes the cells of the fourth, which is computed again as soon as the first two have ended."""
    monkeypatch.setattr(scheduled_passes, "pass_queue", InFlight)
    check_short(folder, rows, [(64, 1), (64, 1), (120, 8), (64, 8)])


def check_short(folder: Path, rows: dict[tuple[int, ...], list[Logits]], lengths: Sequence[tuple[int, int]]) -> None:
    """Check answers in 256 cells against the same one by one. lengths: of prompts and answers."""
    prompts = [[3 + (7 * i + 11 * k) % 290 for i in range(n_tokens)] for k, (n_tokens, _) in enumerate(lengths)]
    greedy = SamplingConfig(temperature=0)
    asked = [Request(prompt, most, greedy) for prompt, (_, most) in zip(prompts, lengths, strict=True)]
    with Model(make_model("llama", folder), **{**OPTIONS, "context_tokens": 256}) as model:
        found = model.generate_many(asked).results()
        shared = dict(rows)
        rows.clear()
        for prompt, one, (_, most) in zip(prompts, found, lengths, strict=True):
            wanted = model.generate(prompt, max_tokens=most, temperature=0).result()
            assert isinstance(one, Generation)
            check_alike(NOISE, prompt, one, shared[tuple(prompt)], wanted, rows[tuple(prompt)])


def test_a_beginning_that_prompts_share_is_computed_once(folder: Path) -> None:
    begin = [3 + 5 * i % 200 for i in range(120)]
    with Model(make_model("llama", folder), **OPTIONS) as model:
        first = model.generate_many([begin], max_tokens=1, temperature=0).results()
        later = model.generate_many([[*begin, i] for i in range(5, 12)], max_tokens=1, temperature=0).results()
    assert [one.cached_tokens for one in first if isinstance(one, Generation)] == [0]
    cached = [one.cached_tokens for one in later if isinstance(one, Generation)]
    assert cached[0] == 0
    assert cached[6] == 120


@in_child
def test_a_drive_that_fails_is_raised_and_the_same_requests_go_on(grown: Path) -> None:
    saboteur, prompts = sabotage(), ["Once upon a time", "One day", "In a small town"]
    with Model(grown, **streamed(), sequences=4) as model:
        assert model.plan.mode == "streamed"
        wanted = [one.text for one in model.generate_many(prompts, **GREEDY).results() if isinstance(one, Generation)]
        batch = model.open_batch()
        numbers = [
            batch.submit(model.begin(Request(prompt, 12, SamplingConfig(temperature=0))), Turn()) for prompt in prompts
        ]
        texts, n_failed, at = dict.fromkeys(numbers, ""), 0, 0
        while not batch.is_idle:
            at += 1
            saboteur.set(3, 60) if at % 4 == 0 else saboteur.set(-(10**9))
            try:
                for event in batch.advance():
                    assert event.piece is not None
                    texts[event.request] += event.piece.text
            except EdgeRunError:
                n_failed += 1
        assert n_failed > 0
        assert list(texts.values()) == wanted
