"""`edge-run serve` as clients of llama-server meet it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from edge_run import Model
from served import EXACTLY, TEMPLATE, Served, served

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def server(kit: Path) -> Iterator[Served]:
    with served(kit, *EXACTLY, "--chat-template", TEMPLATE, "-n", 40, "--metrics") as server:
        yield server


def post(server: Served, path: str, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=60)


def test_a_completion(server: Served, model: Model) -> None:
    wanted = model.generate(PROMPT, max_tokens=12, temperature=0).result()
    found = post(server, "/completion", prompt=PROMPT, n_predict=12, temperature=0, return_tokens=True).json()
    assert (found["content"], tuple(found["tokens"])) == (wanted.text, wanted.token_ids)
    assert (found["stop"], found["stop_type"], found["tokens_predicted"]) == (True, "limit", 12)
    assert found["generation_settings"]["temperature"] == 0
    assert found["timings"]["predicted_n"] == 12


def test_a_completion_in_a_stream_that_a_word_ends(server: Served, model: Model) -> None:
    text = model.generate(PROMPT, max_tokens=30, temperature=0).result().text
    word = text[8:12]
    found = post(server, "/completion", prompt=PROMPT, n_predict=30, temperature=0, stop=["never", word], stream=True)
    events = [json.loads(line.removeprefix("data: ")) for line in found.text.splitlines() if line]
    assert "".join(one["content"] for one in events) == text[: text.index(word)]
    assert (events[-1]["stop"], events[-1]["stop_type"], events[-1]["stopping_word"]) == (True, "word", word)


def test_the_most_that_an_answer_may_have_is_the_servers(server: Served) -> None:
    for wanted in ({}, {"n_predict": -1}, {"n_predict": 10_000}):
        assert post(server, "/completion", prompt=PROMPT, seed=1, **wanted).json()["tokens_predicted"] <= 40


def test_tokens(server: Served, model: Model) -> None:
    tokens = model.tokenize(PROMPT, add_special=False)
    assert post(server, "/tokenize", content=PROMPT).json() == {"tokens": tokens}
    assert post(server, "/tokenize", content=PROMPT, add_special=True).json() == {"tokens": model.tokenize(PROMPT)}
    pieces = post(server, "/tokenize", content=PROMPT, with_pieces=True).json()["tokens"]
    assert "".join(piece["piece"] for piece in pieces).strip() == PROMPT
    assert post(server, "/detokenize", tokens=tokens).json() == {"content": model.detokenize(tokens)}
    assert post(server, "/detokenize", tokens=[10**9]).status_code == 400
    assert post(server, "/detokenize", tokens=[-1]).status_code == 400


def test_templates(server: Served, model: Model) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    assert post(server, "/apply-template", messages=messages).json() == {"prompt": model.chat_prompt(messages)}


def test_what_it_says_of_itself(server: Served, model: Model) -> None:
    props = httpx.get(f"{server.url}/props").json()
    assert props["default_generation_settings"]["n_ctx"] == model.context_tokens
    assert props["default_generation_settings"]["params"]["n_predict"] == 40
    assert props["chat_template"] == TEMPLATE
    slots = httpx.get(f"{server.url}/slots").json()
    assert slots == [
        {"id": n, "n_ctx": model.context_tokens, "is_processing": False} for n in range(props["total_slots"])
    ]


def test_the_status_adds_up(server: Served) -> None:
    before = httpx.get(f"{server.url}/edge-run/status").json()
    post(server, "/completion", prompt=PROMPT, n_predict=7, ignored=True)
    after = httpx.get(f"{server.url}/edge-run/status").json()
    assert after["tokens"]["generated"] - before["tokens"]["generated"] <= 7
    assert sum(after["requests"]["finished"].values()) == sum(before["requests"]["finished"].values()) + 1
    assert sum(item["size_bytes"] for item in after["memory"]["items"]) <= after["memory"]["budget_bytes"]
    assert after["model"]["mode"] == "resident"
    assert after["now_s"] > before["now_s"]


def test_metrics(server: Served) -> None:
    def figures() -> dict[str, float]:
        answer = httpx.get(f"{server.url}/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        lines = [line.rpartition(" ") for line in answer.text.splitlines() if not line.startswith("#")]
        return {key.partition("{")[0] + key.partition("finished_reason")[2]: float(value) for key, _, value in lines}

    before = figures()
    found = post(server, "/completion", prompt=PROMPT, n_predict=7, temperature=0).json()
    after = figures()

    def change(key: str) -> float:
        return after[key] - before.get(key, 0.0)

    assert change("vllm:generation_tokens_total") == found["tokens_predicted"]
    assert change("vllm:prompt_tokens_total") == found["tokens_evaluated"]
    assert change('vllm:request_success_total="length",model_name="kit-dense-q4_0"}') == 1
    assert change("vllm:time_to_first_token_seconds_count") == 1
    assert after["vllm:num_requests_running"] == 0
    assert after["vllm:spec_decode_num_draft_tokens_total"] == 0  # no guesses are asked for here
    assert 0 < after["edge_run:resident_bytes"] <= after["edge_run:budget_bytes"]


def test_without_the_flag_there_are_no_metrics(kit: Path) -> None:
    with served(kit, "-c", 128, "-t", 1) as server:
        assert httpx.get(f"{server.url}/metrics").status_code == 404
