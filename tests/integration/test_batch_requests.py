"""Requests in shared passes, with real llama.cpp: what one asks for, gets wrong or ends by is no other's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from edge_run import (
    AsyncModel,
    Cancelled,
    ConfigError,
    ContextFull,
    Generation,
    Model,
    Request,
    SamplingConfig,
    TierReadError,
)
from edge_run.runtime.generation.batch import Batch
from edge_run.runtime.generation.batched_answers import Event
from edge_run.runtime.generation.request import Turn
from kit_models import streamed


def test_what_is_wrong_with_one_request_ends_that_one(kit: Path) -> None:
    requests: list[Any] = [
        "Once upon",
        Request("Once", 6, SamplingConfig(temperature=0, grammar="root ::= nothing")),
        [10**6],
        [],
        None,
        "word " * 3000,
        Request("A list:", 20, SamplingConfig(temperature=0, json_schema='{"enum": ["red"]}')),
        Request("Once", 6, SamplingConfig(temperature=0, grammar='root ::= "x" root')),
    ]
    with Model(kit, context_tokens=512, threads=1, sequences=4) as model:
        found = model.generate_many(requests, max_tokens=6, temperature=0).results()
        assert [type(one) for one in found] == [
            Generation, ConfigError, ConfigError, ConfigError, ConfigError, ContextFull, Generation, Generation,
        ]  # fmt: skip
        assert isinstance(found[6], Generation)
        assert found[6].text.strip() == '"red"'
        assert isinstance(found[7], Generation)
        assert found[7].text == "xxxxxx"
        with pytest.raises(ConfigError, match="give several"):
            model.generate_many("Once")


def test_settings_are_each_requests_own(kit: Path) -> None:
    drawn = [Request("Once upon a time", 8, SamplingConfig(seed=seed)) for seed in (1, 2, 1)]
    with Model(kit, context_tokens=512, threads=1, sequences=4) as model:
        found = model.generate_many(
            [*drawn, Request("Once upon a time", 0), Request("One", 30, SamplingConfig(stop=["e"], seed=4))]
        ).results()
    texts = [one.text for one in found if isinstance(one, Generation)]
    assert texts[0] == texts[2] != texts[1]
    assert texts[3] == ""
    assert [one.seed for one in found[:3] if isinstance(one, Generation)] == [1, 2, 1]
    assert isinstance(found[4], Generation)
    assert found[4].finish_reason == "stop"
    assert "e" not in found[4].text


def test_prompts_are_taken_as_there_is_room(kit: Path) -> None:
    taken = 0

    def prompts() -> Any:
        nonlocal taken
        for i in range(40):
            taken += 1
            yield f"Number {i}"

    with Model(kit, context_tokens=512, threads=1, sequences=4) as model:
        stream = model.generate_many(prompts(), max_parallel=3, max_tokens=4, temperature=0)
        next(stream)
        assert taken == 3
        assert len(stream.results()) == 40
        with pytest.raises(ConfigError, match="max parallel 0"):
            model.generate_many([], max_parallel=0)
        assert model.generate_many([]).results() == []


def test_another_generation_ends_many_and_cancelling_ends_all(kit: Path) -> None:
    with Model(kit, context_tokens=512, threads=1, sequences=4) as model:
        stream = model.generate_many(["One", "Two"], temperature=0)
        next(stream)
        wanted = model.generate("Three", max_tokens=5, temperature=0).result()
        with pytest.raises(Cancelled, match="another answer"):
            next(stream)
        with pytest.raises(Cancelled, match="another answer"):
            stream.results()
        unbegun = model.generate_many(["One", "Two"], temperature=0)
        model.generate("Three", max_tokens=5, temperature=0).result()
        with pytest.raises(Cancelled, match="another answer"):
            unbegun.results()
        stream = model.generate_many(["One", "Two", "Three"], max_tokens=100, temperature=0)
        next(stream)
        model.cancel()
        found = stream.results()
        assert [one.finish_reason for one in found if isinstance(one, Generation)] == ["cancelled"] * 3
        stream = model.generate_many(["One", "Two", "Three"] * 3, max_parallel=2, max_tokens=100, temperature=0)
        next(stream)
        model.cancel()
        found = stream.results()
        assert [one.finish_reason for one in found if isinstance(one, Generation)] == ["cancelled"] * 2
        assert model.generate("Three", max_tokens=5, temperature=0).result().text == wanted.text


def test_a_request_that_was_cancelled_and_dropped_takes_no_other_with_it(kit: Path) -> None:
    """As a client does that leaves right when a pass has ended: its interrupt has nothing to end any more."""
    with Model(kit, context_tokens=512, threads=1, sequences=4) as model:
        batch = model.open_batch()
        for _ in range(2):
            left = batch.submit(model.begin(Request("Once", 50)), Turn())
            batch.advance()
            batch.cancel(left)
            batch.drop(left)
            stays = batch.submit(model.begin(Request("One day", 5)), Turn())
            pieces = [event.piece for event in iterated(batch) if event.request == stays]
            assert pieces[-1] is not None
            assert pieces[-1].generation is not None
            assert pieces[-1].generation.finish_reason == "length"


def iterated(batch: Batch) -> Iterator[Event]:
    while not batch.is_idle:
        yield from batch.advance()


def test_a_deadline_ends_an_answer_as_it_is(kit: Path) -> None:
    with Model(kit, context_tokens=512, threads=1, sequences=4) as model:
        requests = [Request("Once", 400, turn=Turn(deadline_s=1e-6)), Request("Once", 5)]
        late, whole = model.generate_many(requests).results()
    assert isinstance(late, Generation)
    assert late.finish_reason == "deadline"
    assert isinstance(whole, Generation)
    assert whole.completion_tokens == 5


def test_what_ends_beside_a_pass_that_fails_has_its_end(kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise TierReadError("the drive fails")

    with Model(kit, context_tokens=512, threads=1, sequences=4) as model:
        batch = model.open_batch()
        late = batch.submit(model.begin(Request("Once", 400)), Turn(deadline_s=1e-9))
        batch.submit(model.begin(Request("One day", 5)), Turn())
        monkeypatch.setattr(model._engine.decoder, "decode", fail)
        (event,) = batch.advance()
        assert event.request == late
        assert event.piece is not None
        assert event.piece.generation is not None
        assert event.piece.generation.finish_reason == "deadline"
        with pytest.raises(TierReadError, match="the drive fails"):
            batch.advance()
        monkeypatch.undo()
        assert list(iterated(batch))[-1].is_last


@pytest.mark.anyio
async def test_tasks_share_passes_and_one_that_leaves_harms_nobody(grown: Path, anyio_backend: str) -> None:
    options = {**streamed(), "sequences": 4, "context_tokens": 512}
    prompts = [f"Once upon a time there was a number {i}" for i in range(4)]
    async with AsyncModel(grown, **options) as model:
        wanted = [await text_of(model, prompt) for prompt in prompts]
        read_bytes = model.stats.io.bytes_read
        texts: dict[int, str] = {}

        async def answer(i: int) -> None:
            texts[i] = await text_of(model, prompts[i])

        async def leave() -> None:
            with anyio.move_on_after(0.05):
                async for _ in model.generate("Something else", temperature=0):
                    pass

        async with anyio.create_task_group() as group:
            for i in range(4):
                group.start_soon(answer, i)
            group.start_soon(leave)
        assert model.stats.io.bytes_read - read_bytes < read_bytes
        with pytest.raises(ConfigError, match="temperature"):
            await text_of(model, "x", temperature=-1)
        with pytest.raises(ContextFull):
            await text_of(model, [5] * 600)
        assert await text_of(model, prompts[0]) == wanted[0]
    near = sum(texts[i] == wanted[i] for i in range(4))
    assert near >= 3  # a near tie may part one


async def text_of(model: AsyncModel, prompt: Any, **options: Any) -> str:
    pieces = model.generate(prompt, **{"max_tokens": 10, "temperature": 0, **options})
    return "".join([piece.text async for piece in pieces])


@pytest.mark.parametrize("options", [{}, {"speculate": "ngram"}, {"exact": True}])
def test_a_prompt_of_which_no_answer_is_wanted_is_read_for_the_next_one(kit: Path, options: dict[str, Any]) -> None:
    """As an answer alone does it. It ended before its prompt was read, so that editors warmed nothing."""
    text = "Once upon a time there was a fox who lived in a small house at the end of the wood."
    with Model(kit, context_tokens=512, threads=1, sequences=4, **options) as model:
        wanted = model.generate(text, max_tokens=4, temperature=0).result()
        none, one, word = model.generate_many(
            [Request(text, 0), Request(text, 4, SamplingConfig(temperature=0)), Request([1], 0)], max_parallel=1
        ).results()
    for found in (none, word):
        assert isinstance(found, Generation)
        assert (found.text, found.token_ids, found.finish_reason) == ("", (), "length")
    assert isinstance(none, Generation)
    assert none.prefill_tokens_per_s > 0
    assert isinstance(one, Generation)
    assert one.token_ids == wanted.token_ids
    assert one.cached_tokens == (0 if options.get("exact") else one.prompt_tokens - 1)
