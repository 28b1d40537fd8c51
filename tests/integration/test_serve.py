"""`edge-run serve` as clients of OpenAI's API meet it: the same text as `Model`, streams, counts, errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from edge_run import Model
from served import EXACTLY, served

if TYPE_CHECKING:
    import openai

PROMPT = "Once upon a time"
MESSAGES: Any = [{"role": "user", "content": "Tell me of the fox."}]


def events(response: httpx.Response) -> list[Any]:
    """Return the documents of a stream, which must end as OpenAI's do."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_completion_has_the_text_of_model(client: openai.OpenAI, model: Model) -> None:
    wanted = model.generate(PROMPT, max_tokens=12, temperature=0).result()
    found = client.completions.create(model="any", prompt=PROMPT, max_tokens=12, temperature=0)
    assert found.choices[0].text == wanted.text
    assert found.choices[0].finish_reason == "length"
    assert found.usage
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (wanted.prompt_tokens, 12)
    tokens = client.completions.create(model="any", prompt=model.tokenize(PROMPT), max_tokens=12, temperature=0)
    assert tokens.choices[0].text == wanted.text


def test_a_chat_has_the_text_of_model(client: openai.OpenAI, model: Model) -> None:
    wanted = model.chat(MESSAGES, max_tokens=12, temperature=0)
    found = client.chat.completions.create(model="any", messages=MESSAGES, max_completion_tokens=12, temperature=0)
    assert found.choices[0].message.content == wanted.text
    assert found.object == "chat.completion"
    again = client.chat.completions.create(model="any", messages=MESSAGES, max_tokens=2, temperature=0)
    assert again.usage
    assert again.usage.prompt_tokens_details
    assert again.usage.prompt_tokens_details.cached_tokens == wanted.prompt_tokens - 1


def test_a_stream_has_the_same_text_and_counts_on_request(client: openai.OpenAI, model: Model) -> None:
    wanted = model.chat(MESSAGES, max_tokens=12, temperature=0)
    options: Any = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(
            model="any", messages=MESSAGES, max_tokens=12, temperature=0, stream=True, stream_options=options
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == wanted.text
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.usage is None for c in chunks] == [True] * (len(chunks) - 1) + [False]
    assert chunks[-1].choices == []
    assert chunks[-1].usage
    assert chunks[-1].usage.completion_tokens == 12


def test_a_stream_without_usage_has_none(http: httpx.Client) -> None:
    body = {"prompt": PROMPT, "max_tokens": 3, "stream": True}
    found = events(http.post("/v1/completions", json=body))
    assert len(found) == 4
    assert not any("usage" in one for one in found)


def test_a_seed_gives_the_same_text_and_choices_differ(client: openai.OpenAI) -> None:
    def texts(seed: int) -> list[str]:
        found = client.completions.create(model="any", prompt=PROMPT, max_tokens=16, temperature=2, seed=seed, n=3)
        assert [choice.index for choice in found.choices] == [0, 1, 2]
        return [choice.text for choice in found.choices]

    assert texts(5) == texts(5)
    assert len({*texts(5), *texts(50)}) > 3


def test_choices_in_a_stream(http: httpx.Client, client: openai.OpenAI) -> None:
    body = {"prompt": PROMPT, "max_tokens": 8, "n": 2, "seed": 7}
    whole = client.completions.create(model="any", **body)  # type: ignore[arg-type]
    texts = ["", ""]
    for one in events(http.post("/v1/completions", json={**body, "stream": True})):
        texts[one["choices"][0]["index"]] += one["choices"][0]["text"]
    assert texts == [choice.text for choice in whole.choices]


def test_several_prompts_have_answers_of_their_own(client: openai.OpenAI, http: httpx.Client) -> None:
    prompts = ["Once upon a time", "The fox", "A king"]
    body: Any = {"max_tokens": 6, "seed": 7, "n": 2, "temperature": 1}
    alone = [
        [choice.text for choice in client.completions.create(model="any", prompt=prompt, **body).choices]
        for prompt in prompts
    ]
    found = client.completions.create(model="any", prompt=prompts, **body)
    assert [choice.index for choice in found.choices] == list(range(6))
    assert [choice.text for choice in found.choices] == [text for texts in alone for text in texts]
    assert found.usage
    assert found.usage.completion_tokens == 36
    tokens = [http.post("/tokenize", json={"content": text, "add_special": True}).json()["tokens"] for text in prompts]
    assert found.usage.prompt_tokens == sum(map(len, tokens))
    texts = [""] * 6
    for one in events(http.post("/v1/completions", json={**body, "prompt": tokens, "stream": True})):
        for choice in one["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [text for texts in alone for text in texts]
    for wrong in ([], ["a"] * 65, [[1], 2], [[]]):
        assert http.post("/v1/completions", json={"prompt": wrong}).status_code == 400, wrong


def test_a_salt_keeps_beginnings_apart(http: httpx.Client) -> None:
    def cached(path: str, **body: Any) -> int:
        found = http.post(path, json={"max_tokens": 1, **body}).json()["usage"]
        return int(found["prompt_tokens_details"]["cached_tokens"])

    text = "A long story of a fox and a king, which begins as none before"
    assert cached("/v1/completions", prompt=text, cache_salt="a") == 0
    assert cached("/v1/completions", prompt=text, cache_salt="a") > 0
    assert cached("/v1/completions", prompt=text, cache_salt="b") == 0
    assert cached("/v1/completions", prompt=text) == 0
    assert cached("/v1/chat/completions", messages=MESSAGES, cache_salt="c") == 0


def test_a_stop_string_ends_it(client: openai.OpenAI, model: Model) -> None:
    text = model.generate(PROMPT, max_tokens=30, temperature=0).result().text
    stop = text[10:14]
    found = client.completions.create(model="any", prompt=PROMPT, max_tokens=30, temperature=0, stop=[stop])
    assert found.choices[0].text == text[: text.index(stop)]
    assert found.choices[0].finish_reason == "stop"


def test_an_answer_follows_a_schema(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    found = client.chat.completions.create(model="any", messages=MESSAGES, response_format=form, max_tokens=60)
    assert set(json.loads(found.choices[0].message.content or "")) == {"ok"}


TOOLS: Any = [
    {"type": "function", "function": {"name": "now", "description": "What time it is."}},
    {
        "type": "function",
        "function": {
            "name": "paint",
            "parameters": {
                "type": "object",
                "properties": {"colour": {"enum": ["red", "blue"]}},
                "required": ["colour"],
            },
        },
    },
]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "paint"}}])
def test_a_tool_that_must_be_called_is_called(client: openai.OpenAI, choice: Any) -> None:
    asked: Any = {"model": "any", "messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "seed": 1}
    found = client.chat.completions.create(**asked).choices[0]
    assert found.finish_reason == "tool_calls"
    (call,) = found.message.tool_calls or ()
    allowed = {"paint": ({"colour": "red"}, {"colour": "blue"}), "now": ({},)}
    assert json.loads(call.function.arguments) in allowed[call.function.name]
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    (streamed,) = [one for chunk in chunks for one in chunk.delta.tool_calls or ()]
    assert (streamed.index, streamed.function.name) == (0, call.function.name)
    assert streamed.function.arguments == call.function.arguments
    assert chunks[-1].finish_reason == "tool_calls"


def test_the_result_of_a_tool_goes_on_with_the_conversation(client: openai.OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages: Any = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    ]
    found = client.chat.completions.create(model="any", messages=messages, tools=TOOLS, max_tokens=4)
    assert found.usage
    assert found.usage.completion_tokens


def test_a_schema_that_cannot_be_used_is_refused_also_in_a_stream(client: openai.OpenAI) -> None:
    import openai

    form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "no such type"}}}
    asked: dict[str, Any] = {"model": "any", "messages": MESSAGES, "response_format": form}
    with pytest.raises(openai.BadRequestError, match="JSON schema"):
        client.chat.completions.create(**asked)
    refusals = list[type[openai.APIError]]()
    while openai.BadRequestError not in refusals and len(refusals) < 20:
        with pytest.raises(openai.APIError, match="JSON schema") as caught:
            list(client.chat.completions.create(**asked, stream=True))
        refusals.append(caught.type)
    assert openai.BadRequestError in refusals, "what is found at once, as on a machine that is not busy, has a status"


def test_a_prompt_that_is_too_long_is_refused(client: openai.OpenAI) -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match="the context holds 511") as caught:
        client.completions.create(model="any", prompt="fox " * 1000)
    assert caught.value.code == "context_length_exceeded"
    found = client.completions.create(model="any", prompt="fox " * 80, max_tokens=4000)
    assert found.choices[0].finish_reason == "length"
    assert found.usage
    assert found.usage.total_tokens <= 513


def test_errors_are_as_openai_says_them(client: openai.OpenAI, http: httpx.Client) -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match="modalities") as caught:
        client.chat.completions.create(model="any", messages=MESSAGES, modalities=["audio"])
    assert caught.value.param == "modalities"
    assert caught.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-17")
    assert http.get("/v1/nothing").status_code == 404
    assert http.get("/v1/completions").status_code == 405


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embedding", "/api/embed"])
def test_a_model_for_text_makes_no_embeddings(http: httpx.Client, path: str) -> None:
    refused = http.post(path, json={"input": "x"})
    assert (refused.status_code, "serve it with --embeddings" in refused.text) == (400, True)


def test_how_likely_tokens_were(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "any", "messages": MESSAGES, "max_tokens": 6, "temperature": 0, "logprobs": True}
    whole = client.chat.completions.create(**asked, top_logprobs=2)
    assert whole.choices[0].logprobs
    found = whole.choices[0].logprobs.content
    assert found
    assert "".join(one.token for one in found) == whole.choices[0].message.content
    assert all(one.token == one.top_logprobs[0].token and len(one.top_logprobs) == 2 for one in found)
    assert all(bytes(one.bytes or ()).decode() == one.token for one in found)
    chunks = list(client.chat.completions.create(**asked, stream=True))
    parts = [choice.logprobs.content or [] for chunk in chunks for choice in chunk.choices if choice.logprobs]
    assert [one.token for part in parts for one in part] == [one.token for one in found]
    text = client.completions.create(model="any", prompt="The fox", max_tokens=4, temperature=0, logprobs=1)
    told = text.choices[0].logprobs
    assert told
    assert told.tokens
    assert "".join(told.tokens) == text.choices[0].text
    assert told.text_offset == [sum(map(len, told.tokens[:i])) for i in range(len(told.tokens))]
    assert told.top_logprobs
    assert [[*one] for one in told.top_logprobs] == [[token] for token in told.tokens]


def test_biases_and_penalties(client: openai.OpenAI, http: httpx.Client) -> None:
    import openai

    asked: dict[str, Any] = {"model": "any", "prompt": "The fox", "max_tokens": 12, "temperature": 0}
    plain = client.completions.create(**asked).choices[0].text
    (first,) = http.post("/tokenize", json={"content": plain, "add_special": False}).json()["tokens"][:1]
    banned = client.completions.create(**asked, logit_bias={str(first): -100}).choices[0].text
    assert banned[:2] != plain[:2]
    assert client.completions.create(**asked, logit_bias={str(first): 100}).choices[0].text != plain
    assert client.completions.create(**asked, frequency_penalty=2, presence_penalty=2).choices[0].text != plain
    with pytest.raises(openai.BadRequestError, match="outside the vocabulary"):
        client.completions.create(**asked, logit_bias={"99999999": 1})


def test_models_and_health(client: openai.OpenAI, http: httpx.Client) -> None:
    (model,) = client.models.list().data
    assert model.id == "kit-dense-q4_0"
    assert client.models.retrieve(model.id).owned_by == "edge-run"
    assert http.get("/health").json() == {"status": "ok"}


def test_the_machine_at_work(http: httpx.Client) -> None:
    before, after = (http.get("/edge-run/status").json() for _ in range(2))
    assert after["now_s"] > before["now_s"]
    assert 0 < sum(item["size_bytes"] for item in after["memory"]["items"]) <= after["memory"]["budget_bytes"]
    assert after["sampling"]["temperature"] == 0.8
    assert after["mesh"] is None


def test_a_model_without_a_template_only_completes(kit: Path) -> None:
    with served(kit, *EXACTLY) as server:
        asked = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": MESSAGES}, timeout=60)
        assert asked.status_code == 400
        assert "no chat template" in asked.json()["error"]["message"]
        assert str(kit) not in asked.text
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": PROMPT}, timeout=60).status_code == 200
