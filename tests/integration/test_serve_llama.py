"""`edge-run serve` as clients of llama-server meet it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from edge_run import Model
from edge_run.base.results import Speculation
from edge_run.runtime.llama.model import LlamaModel
from edge_run.runtime.llama.prompt_text import GapMarks, gap_marks
from edge_run.runtime.server.apis.llama_server import MOST_LETTERS, MOST_PIECES
from edge_run.runtime.server.usage import timings
from served import EXACTLY, TEMPLATE, Served, served

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def server(kit: Path) -> Iterator[Served]:
    with served(kit, *EXACTLY, "--chat-template", TEMPLATE, "-n", 40, "--metrics", "--seed", 11) as server:
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


def test_a_prompt_that_is_only_to_be_read(server: Served, model: Model) -> None:
    """As editors ask, so that the next request finds it read."""
    text = f"{PROMPT} there was a fox who lived in a small house"
    found = post(server, "/completion", prompt=text, n_predict=0).json()
    assert (found["content"], found["stop_type"], found["tokens_predicted"]) == ("", "limit", 0)
    assert found["timings"]["prompt_n"] + found["timings"]["cache_n"] == len(model.prompt_tokens(text))
    assert found["timings"]["prompt_n"] > 0
    assert post(server, "/completion", prompt=text, n_predict=0, response_fields=[""]).json() == {}
    again = post(server, "/completion", prompt=text, n_predict=2, temperature=0).json()
    assert again["timings"]["cache_n"] > len(model.prompt_tokens(text)) / 2
    assert again["content"] == model.generate(text, max_tokens=2, temperature=0).result().text


def test_guesses_are_counted_where_there_were_any(model: Model) -> None:
    answer = model.generate(PROMPT, max_tokens=4, temperature=0).result()
    assert "draft_n" not in timings(answer)
    found = timings(replace(answer, speculation=Speculation("ngram", drafted=5, accepted=3)))
    assert (found["draft_n"], found["draft_n_accepted"]) == (5, 3)


def test_a_completion_in_a_stream_that_a_word_ends(server: Served, model: Model) -> None:
    text = model.generate(PROMPT, max_tokens=30, temperature=0).result().text
    word = text[8:12]
    found = post(server, "/completion", prompt=PROMPT, n_predict=30, temperature=0, stop=["never", word], stream=True)
    events = [json.loads(line.removeprefix("data: ")) for line in found.text.splitlines() if line]
    assert "".join(one["content"] for one in events) == text[: text.index(word)]
    assert (events[-1]["stop"], events[-1]["stop_type"], events[-1]["stopping_word"]) == (True, "word", word)


def test_a_stream_names_the_tokens_of_its_pieces_and_how_likely_they_were(server: Served, model: Model) -> None:
    wanted = model.generate(PROMPT, max_tokens=6, temperature=0, top_logprobs=3).result()
    asked = {"n_predict": 6, "temperature": 0, "n_probs": 3, "return_tokens": True}
    found = post(server, "/completions", prompt=PROMPT, stream=True, **asked)
    pieces = [json.loads(line.removeprefix("data: ")) for line in found.text.splitlines() if line]
    assert [token for piece in pieces for token in piece["tokens"]] == [*wanted.token_ids]
    told = [one for piece in pieces for one in piece.get("completion_probabilities", ())]
    assert [one["id"] for one in told] == [*wanted.token_ids]
    assert [len(one["top_logprobs"]) for one in told] == [3] * 6
    whole = post(server, "/completion", prompt=PROMPT, **asked).json()
    assert (whole["completion_probabilities"], whole["tokens"]) == (told, [*wanted.token_ids])


def test_prompts_of_every_kind(server: Served, model: Model) -> None:
    tokens = model.tokenize(PROMPT)
    kinds = [PROMPT, tokens, {"prompt_string": PROMPT}, [tokens[0], PROMPT]]
    asked = {"n_predict": 5, "temperature": 0}
    each = [post(server, "/completion", prompt=kind, **asked).json() for kind in kinds]
    assert len({one["content"] for one in each}) == 1
    together = post(server, "/completion", prompt=[PROMPT, tokens, {"prompt_string": PROMPT}], **asked).json()
    assert [one["index"] for one in together] == [0, 1, 2]
    assert {one["content"] for one in together} == {each[0]["content"]}
    pictures = {"prompt_string": PROMPT, "multimodal_data": ["iVBO"]}
    for wrong in ([], [[]], [1, {"prompt_string": PROMPT}], pictures, ["a"] * 65, [2**30, "a"]):
        assert post(server, "/completion", prompt=wrong, **asked).status_code == 400


def test_a_model_whose_vocabulary_marks_no_gaps_fills_none(server: Served) -> None:
    gap = {"input_prefix": "a = ", "input_suffix": "", "prompt": ""}
    for path, asked in (("/infill", gap), ("/v1/completions", {"prompt": "a = ", "suffix": "b"})):
        found = post(server, path, **asked)
        assert (found.status_code, found.json()["error"]["code"]) == (400, "not_supported")


def test_the_marks_of_gaps_are_those_of_the_vocabulary(kit: Path) -> None:
    names = [f"tokenizer.ggml.fim_{name}_token_id" for name in ("pre", "suf", "mid", "rep", "sep")]
    marks = {name: 20 + number for number, name in enumerate(names)}
    with LlamaModel([kit], metadata=marks, mode="vocabulary") as model:
        begins = (model.bos_token,) if model.adds_bos else ()
        assert gap_marks(model) == GapMarks(20, 21, 22, 23, 24, begins)
    with LlamaModel([kit], metadata=dict([*marks.items()][:2]), mode="vocabulary") as model:
        assert gap_marks(model) is None


def test_salts_keep_beginnings_apart_and_a_prompt_may_have_several_answers(server: Served) -> None:
    def asked(**more: Any) -> Any:
        return post(server, "/completion", prompt="A tale of salt and two answers", n_predict=3, **more).json()

    assert [asked(cache_salt=salt)["timings"]["cache_n"] > 0 for salt in "aab"] == [False, True, False]
    documents = asked(n=2, seed=5)
    assert [one["index"] for one in documents] == [0, 1]
    assert [one["generation_settings"]["seed"] for one in documents] == [5, 6]


def test_the_seed_of_requests_that_have_none_is_the_servers(server: Served) -> None:
    asked = {"prompt": PROMPT, "n_predict": 12, "temperature": 1.5}
    first, again = (post(server, "/completion", **asked).json() for _ in range(2))
    assert first["content"] == again["content"]
    assert first["generation_settings"]["seed"] == 11
    assert post(server, "/completion", **asked, seed=12).json()["content"] != first["content"]


def test_who_bans_tokens_does_not_get_them(server: Served, model: Model) -> None:
    asked = {"prompt": PROMPT, "n_predict": 1, "temperature": 0, "return_tokens": True}
    (first,) = post(server, "/completion", **asked).json()["tokens"]
    for banned in ([[first, -100]], [[first, False]], {str(first): False}):
        (other,) = post(server, "/completion", **asked, logit_bias=banned).json()["tokens"]
        assert other != first
    assert post(server, "/completion", **asked, logit_bias=[[first, True]]).status_code == 400


def test_an_answer_that_must_not_end_does_not(server: Served, model: Model) -> None:
    (end,) = model.tokenize("<|eos|>", add_special=False, parse_special=True)
    asked = {"prompt": PROMPT, "n_predict": 9, "temperature": 0, "logit_bias": {str(end): 100}}
    assert post(server, "/completion", **asked).json()["stop_type"] == "eos"
    assert post(server, "/completion", **asked, ignore_eos=True).json()["tokens_predicted"] == 9


def test_paths_without_v1(server: Served) -> None:
    assert server.get("/models").json()["data"][0]["id"] == "kit-dense-q4_0"
    messages = [{"role": "user", "content": "Hello"}]
    answer = post(server, "/chat/completions", messages=messages, max_tokens=2).json()
    for path, asked in (("/chat/completions", {"messages": messages}), ("/responses", {"input": messages})):
        for start in ("", "/v1"):
            counted = post(server, f"{start}{path}/input_tokens", **asked).json()["input_tokens"]
            assert counted == answer["usage"]["prompt_tokens"]


def test_a_prompt_that_is_too_long_says_how_long_it_is(server: Served, model: Model) -> None:
    found = post(server, "/completion", prompt="word " * 600)
    error = found.json()["error"]
    assert (found.status_code, error["type"]) == (400, "exceed_context_size_error")
    assert error["n_ctx"] in (511, 512)  # computed exactly, a padding token has a place
    assert error["n_prompt_tokens"] == len(model.tokenize("word " * 600))


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
    for longest, more in (({}, MOST_LETTERS), ({"with_pieces": True}, 3 * MOST_PIECES)):
        refused = post(server, "/tokenize", content=" a" * more, **longest)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "content")
    assert len(post(server, "/tokenize", content=" a" * MOST_PIECES).json()["tokens"]) >= MOST_PIECES
    assert len(post(server, "/detokenize", tokens=tokens[:1] * MOST_PIECES).json()["content"]) >= MOST_PIECES
    assert post(server, "/detokenize", tokens=tokens[:1] * (MOST_PIECES + 1)).status_code == 400
    assert post(server, "/detokenize", tokens=[10**9]).status_code == 400
    assert post(server, "/detokenize", tokens=[-1]).status_code == 400


def test_tokens_that_are_part_of_a_letter_or_none_of_the_text_have_their_pieces(server: Served) -> None:
    """The first were question marks, and control tokens nothing."""
    found = post(server, "/tokenize", content="🦊<|eos|>", with_pieces=True).json()["tokens"]
    pieces = [one["piece"].encode() if isinstance(one["piece"], str) else bytes(one["piece"]) for one in found]
    assert pieces[-1] == b"<|eos|>"
    assert b"".join(pieces).strip() == "🦊<|eos|>".encode()
    assert any(isinstance(one["piece"], list) for one in found)
    tokens = [one["id"] for one in found]
    assert post(server, "/detokenize", tokens=tokens).json()["content"].strip() == "🦊<|eos|>"


def test_templates(server: Served, model: Model) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    assert post(server, "/apply-template", messages=messages).json() == {"prompt": model.chat_prompt(messages)}


def test_what_it_says_of_itself(server: Served, model: Model) -> None:
    props = server.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == model.context_tokens
    assert props["default_generation_settings"]["params"]["n_predict"] == 40
    assert props["chat_template"] == TEMPLATE
    slots = server.get("/slots").json()
    assert slots == [
        {"id": n, "n_ctx": model.context_tokens, "is_processing": False} for n in range(props["total_slots"])
    ]


def test_the_status_adds_up(server: Served) -> None:
    before = server.get("/edge-run/status").json()
    post(server, "/completion", prompt=PROMPT, n_predict=7, ignored=True)
    after = server.get("/edge-run/status").json()
    assert after["tokens"]["generated"] - before["tokens"]["generated"] <= 7
    assert sum(after["requests"]["finished"].values()) == sum(before["requests"]["finished"].values()) + 1
    assert sum(item["size_bytes"] for item in after["memory"]["items"]) <= after["memory"]["budget_bytes"]
    assert after["model"]["mode"] == "resident"
    assert after["now_s"] > before["now_s"]


def test_metrics(server: Served) -> None:
    def figures() -> dict[str, float]:
        answer = server.get("/metrics")
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
        assert server.get("/metrics").status_code == 404
