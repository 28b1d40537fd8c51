"""`edge-run serve` as clients of Ollama's API meet it."""

from __future__ import annotations

import json
from typing import Any

import httpx

from edge_run import Model
from served import TEMPLATE, Served

MESSAGES: Any = [{"role": "user", "content": "Tell me of the fox."}]
GREEDY = {"temperature": 0, "num_predict": 10}
TOOL = {"type": "function", "function": {"name": "now", "description": "What time it is."}}


def post(server: Served, path: str, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json={"model": "kit", **body}, timeout=60)


def lines(response: httpx.Response) -> list[Any]:
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


def test_a_chat_is_a_stream_unless_it_is_told_not_to(server: Served, model: Model) -> None:
    wanted = model.chat(MESSAGES, max_tokens=10, temperature=0)
    whole = post(server, "/api/chat", messages=MESSAGES, options=GREEDY, stream=False).json()
    assert whole["message"] == {"role": "assistant", "content": wanted.text}
    assert (whole["done"], whole["done_reason"], whole["eval_count"]) == (True, "length", 10)
    assert whole["prompt_eval_count"] == wanted.prompt_tokens
    streamed = lines(post(server, "/api/chat", messages=MESSAGES, options=GREEDY))
    assert "".join(line["message"]["content"] for line in streamed) == wanted.text
    assert [line["done"] for line in streamed] == [False] * (len(streamed) - 1) + [True]


def test_a_prompt_is_answered_or_continued(server: Served, model: Model) -> None:
    conversation = [{"role": "system", "content": "Be kind."}, *MESSAGES]
    wanted = model.chat(conversation, max_tokens=10, temperature=0).text
    asked = {"prompt": MESSAGES[0]["content"], "options": GREEDY, "stream": False}
    assert post(server, "/api/generate", system="Be kind.", **asked).json()["response"] == wanted
    wanted = model.generate(asked["prompt"], max_tokens=10, temperature=0).result().text
    assert post(server, "/api/generate", raw=True, **asked).json()["response"] == wanted


def test_forms(server: Served) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    found = post(server, "/api/chat", messages=MESSAGES, format=schema, stream=False).json()
    assert set(json.loads(found["message"]["content"])) == {"ok"}
    assert post(server, "/api/chat", messages=MESSAGES, format="xml").status_code == 400


def test_conversations_with_tools_go_on(server: Served) -> None:
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "now", "arguments": {}}}]},
        {"role": "tool", "content": "noon", "tool_name": "now"},
    ]
    found = post(server, "/api/chat", messages=messages, tools=[TOOL], options=GREEDY, stream=False).json()
    assert found["done"]


def test_what_there_is(server: Served, model: Model) -> None:
    (listed,) = server.get("/api/tags").json()["models"]
    assert listed["name"] == "kit-dense-q4_0:latest"
    assert listed["details"]["family"]
    assert server.get("/api/ps").json()["models"][0]["name"] == listed["name"]
    shown = post(server, "/api/show").json()
    assert shown["template"] == TEMPLATE
    assert "tools" in shown["capabilities"]
    assert shown["model_info"][f"{listed['details']['family']}.context_length"] == model.context_tokens
    assert server.get("/api/version").json()["version"].count(".") == 2


def test_without_a_prompt_it_says_that_the_model_is_loaded(server: Served) -> None:
    assert post(server, "/api/generate").json()["done_reason"] == "load"
    assert post(server, "/api/chat", messages=[]).json()["done_reason"] == "load"


def test_null_is_nothing(server: Served) -> None:
    """Ollama's own program begins with such a request."""
    null: dict[str, Any] = dict.fromkeys(("options", "system", "template", "format", "images", "stream", "keep_alive"))
    assert post(server, "/api/generate", prompt="", **null).json()["done_reason"] == "load"
    assert lines(post(server, "/api/generate", prompt="Hi", **{**null, "options": GREEDY}))[-1]["eval_count"] == 10


def test_errors_are_as_ollama_says_them(server: Served) -> None:
    for path, body in (
        ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}),
        ("/api/chat", {"messages": MESSAGES, "options": {"temperature": -1}}),
        ("/api/generate", {"prompt": "x", "options": {"num_predict": -9}}),
        ("/api/generate", {"prompt": "x", "suffix": "y"}),
        ("/api/generate", {"prompt": "fox " * 2000}),
    ):
        refused = post(server, path, **body)
        assert (refused.status_code, [*refused.json()]) == (400, ["error"]), body
    for path in ("/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete", "/api/blobs/sha256:0"):
        assert post(server, path).status_code == 404, "nothing is fetched or written for a request"
