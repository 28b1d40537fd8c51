"""How far a prompt is read, with real llama.cpp: of an answer alone, and of each of many in shared passes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from edge_run import Generation, Model, Request, SamplingConfig
from served import TEMPLATE, Served, served

WIDTH = 32  # tokens of a pass
OPTIONS: dict[str, Any] = {"threads": 1, "context_tokens": 1024, "micro_batch_tokens": WIDTH}


def prompt_of(n_tokens: int, first: int = 5) -> list[int]:
    """Return so many tokens; prompts with another first one share nothing."""
    return [first, *(5 + 7 * number % 200 for number in range(1, n_tokens))]


def test_an_answer_alone_says_what_is_there_and_then_each_pass(kit: Path) -> None:
    told, prompt = list[int](), prompt_of(100)
    with Model(kit, **OPTIONS) as model:
        model.generate(prompt, max_tokens=2, on_read=told.append).result()
        assert told == [0, 32, 64, 96, 100]
        told.clear()
        again = model.generate([*prompt[:50], *prompt], max_tokens=2, on_read=told.append).result()
        assert again.cached_tokens == 50
        assert told == [50, 82, 114, 146, 150]
        told.clear()
        again = model.generate([*prompt[:50], *prompt], max_tokens=2, on_read=told.append).result()
        assert told == [149, 150]


@pytest.mark.parametrize("options", [{}, {"exact": True}])
def test_answers_that_share_passes_say_it_each_for_itself(kit: Path, options: dict[str, Any]) -> None:
    prompts = [prompt_of(n, first) for first, n in enumerate((100, 70, 5, 90, 1, 130), 300)]
    told = [list[int]() for _ in prompts]
    requests = [Request(prompt, max_tokens=6, on_read=one.append) for prompt, one in zip(prompts, told, strict=True)]
    with Model(kit, **{**OPTIONS, "context_tokens": 2048}, sequences=3, **options) as model:
        found = model.generate_many(requests).results()
    for prompt, answer, one in zip(prompts, found, told, strict=True):
        assert isinstance(answer, Generation)
        assert (one[0], one[-1]) == (answer.cached_tokens, len(prompt))
        steps = [after - before for before, after in itertools.pairwise(one)]
        assert min(steps) > 0
        assert max(steps) <= WIDTH


def test_a_prompt_that_gave_way_is_not_told_of_anew(kit: Path) -> None:
    """With room for one and a half of the answers, the second one is computed again when the first has ended."""
    told = [list[int](), list[int]()]
    sampling = SamplingConfig(temperature=0, ignore_eos=True)
    requests = [
        Request(prompt_of(100, first), 100, sampling, on_read=one.append) for first, one in enumerate(told, 300)
    ]
    with Model(kit, **{**OPTIONS, "context_tokens": 256}, sequences=2) as model:
        found = model.generate_many(requests).results()
    assert all(isinstance(answer, Generation) and answer.completion_tokens == 100 for answer in found)
    for one in told:
        assert one == sorted(set(one))
        assert one[-1] == 100


@pytest.fixture(scope="module", params=[1, 3])
def server(kit: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    """A server whose answers are computed one by one, and one whose answers share passes."""
    parallel = ("--parallel", request.param, "--chat-template", TEMPLATE)
    with served(kit, "-c", 1024, "-t", 1, "-ub", WIDTH, *parallel) as server:
        yield server


def events_of(server: Served, path: str, **body: Any) -> list[dict[str, Any]]:
    found = httpx.post(server.url + path, json={"return_progress": True, **body}, timeout=60)
    assert found.status_code == 200, found.text
    lines = [line.removeprefix("data: ") for line in found.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def check(events: list[dict[str, Any]], total: int | None = None) -> int:
    """Check what a stream says of one prompt, which may have `total` tokens; return what was cached of it."""
    told = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    processed = [one["processed"] for one in told]
    assert len({(one["total"], one["cache"]) for one in told}) == 1
    assert processed[0] == told[0]["cache"]
    assert processed[-1] == told[0]["total"] == (total or told[0]["total"])
    steps = {after - before for before, after in itertools.pairwise(processed)}
    steps.discard(0)  # a second has passed within a pass
    assert min(steps) > 0
    assert max(steps) <= WIDTH
    for key in ("time_ms", "share"):
        assert [one[key] for one in told] == sorted(one[key] for one in told)
    assert told[-1]["share"] == 1
    said = [number for number, event in enumerate(events) if "prompt_progress" in event]
    assert said == [*range(said[0], said[-1] + 1)], "all of it comes before the first piece"
    return int(told[0]["cache"])


def test_a_stream_says_how_far_its_prompt_is_before_its_first_piece(server: Served) -> None:
    asked = {"prompt": prompt_of(150, 310), "stream": True, "cache_prompt": True}
    first = events_of(server, "/completion", **asked, n_predict=3)
    assert check(first, 150) == 0
    assert first[0]["prompt_progress"]["processed"] == 0, "the first one comes before the first pass"
    assert len(first) >= 6
    again = events_of(server, "/completion", **asked, n_predict=3)
    assert check(again, 150) == again[-1]["timings"]["cache_n"] == 149
    assert check(events_of(server, "/v1/completions", **asked, max_tokens=3), 150) == 149


def test_a_chat_says_it_too(server: Served) -> None:
    messages = [{"role": "user", "content": "A fox and a bear. " * 20}]
    events = events_of(server, "/v1/chat/completions", messages=messages, stream=True, max_tokens=3)
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    check(events)
    told = [event for event in events if "prompt_progress" in event]
    assert len(told) >= 3
    assert {event["choices"][0]["index"] for event in told} == {0}
    assert all(event["choices"][0]["delta"] == {} for event in told)


def test_many_at_once_are_told_each_of_its_own(server: Served) -> None:
    sizes = (150, 40, 90)
    with ThreadPoolExecutor(len(sizes)) as pool:
        asking = [
            pool.submit(partial(events_of, server, "/completion", prompt=prompt_of(n, first), stream=True, n_predict=3))
            for first, n in enumerate(sizes, 320)
        ]
    for n, one in zip(sizes, asking, strict=True):
        assert check(one.result(), n) == 0


def test_prompts_of_one_request_are_told_of_by_their_numbers(server: Served) -> None:
    sizes = (100, 45, 70)
    prompts = [prompt_of(n, first) for first, n in enumerate(sizes, 330)]
    events = events_of(server, "/completion", prompt=prompts, stream=True, n_predict=3)
    for number, n in enumerate(sizes):
        assert check([event for event in events if event["index"] == number], n) == 0


def test_who_asked_for_no_stream_hears_nothing_of_it(server: Served) -> None:
    for path, asked in (
        ("/completion", {"prompt": prompt_of(40, 340)}),
        ("/v1/completions", {"prompt": prompt_of(40, 340)}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
    ):
        body = {**asked, "max_tokens": 3, "return_progress": True}
        found = httpx.post(server.url + path, json=body, timeout=60)
        assert found.status_code == 200
        assert "prompt_progress" not in found.text
