"""What requests say: fields of the right kind within bounds, the rest refused by name, unknown ones ignored."""

from __future__ import annotations

import errno
import json
from typing import Any, cast

import msgspec
import pytest

from chat_requests import HELLO, chat, refused
from edge_run.base.errors import BudgetError, ContextFull, EdgeRunError, MeshError, NotSupported, TierReadError
from edge_run.base.sampling_config import SamplingConfig
from edge_run.runtime.server import bodies
from edge_run.runtime.server.apis.anthropic_messages import CountRequest, MessagesRequest
from edge_run.runtime.server.apis.embeddings import (
    EmbeddingRequest,
    NativeEmbeddingRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
)
from edge_run.runtime.server.apis.keep_alive import rest_s
from edge_run.runtime.server.apis.llama_server import DetokenizeRequest, NativeCompletionRequest, TokenizeRequest
from edge_run.runtime.server.apis.ollama import OllamaChatRequest, OllamaGenerateRequest, ShowRequest
from edge_run.runtime.server.apis.openai_chat import ChatRequest
from edge_run.runtime.server.apis.openai_completions import CompletionRequest
from edge_run.runtime.server.apis.responses import ResponsesRequest
from edge_run.runtime.server.bodies import convert, decode
from edge_run.runtime.server.refusals import Refusal, anthropic_error, openai_error, refusal_of


def test_sampling() -> None:
    defaults = SamplingConfig(temperature=0.3, top_k=7)
    assert chat().sampling(defaults) == defaults
    request = chat(temperature=0, top_p=0.5, top_k=-1, min_p=0.1, seed=5, stop="END", max_tokens=3)
    assert request.sampling(defaults) == SamplingConfig(
        temperature=0, top_p=0.5, top_k=0, min_p=0.1, seed=5, stop=("END",)
    )
    assert chat(stop=["a", "", "b"]).sampling(defaults).stop == ("a", "b")
    seeded = SamplingConfig(seed=5)
    assert chat().sampling(seeded).seed == 5
    for drawn in (-1, 2**32 - 1):
        assert (chat(seed=drawn).sampling(defaults).seed, chat(seed=drawn).sampling(seeded).seed) == (None, None)
    assert 0 <= (chat(seed=2**63 - 1).sampling(defaults).seed or -1) < 2**32 - 1
    assert chat(top_p=0).sampling(defaults).top_p > 0


def test_unknown_fields_are_ignored() -> None:
    assert chat(user="me", metadata={"a": {}}, store=False, service_tier="auto", made_up=[1]).messages[0].role == "user"


def test_null_is_the_same_as_nothing_said_to_templates_too() -> None:
    assert chat(chat_template_kwargs={"enable_thinking": None, "reasoning_effort": "low"}).variables() == {
        "reasoning_effort": "low"
    }


def test_no_effort_is_no_thought_unless_the_template_is_told_otherwise() -> None:
    kinds = (
        (chat(reasoning_effort="none"), False),
        (chat(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True}), True),
        (chat(reasoning_effort="high"), True),
        (convert({"input": "x", "reasoning": {"effort": "none"}}, ResponsesRequest), False),
        (convert({"input": "x", "reasoning": {"effort": "high"}}, ResponsesRequest), True),
    )
    assert [asked.task().variables["enable_thinking"] for asked, _ in kinds] == [thinks for _, thinks in kinds]
    told = chat(reasoning_effort="none", chat_template_kwargs={"reasoning_effort": "low"}).variables()
    assert told["reasoning_effort"] == "low"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": 1e9}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 2**40}, "top_k"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"max_tokens": 10**12}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"seed": 2**70}, "seed"),
        ({"repeat_last_n": -2147483648}, "repeat_last_n"),
        ({"stop": ["x" * 5000]}, "stop[0]"),
        ({"stop": ["x"] * 100}, "stop"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "no role"}]}, "messages[0].role"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [HELLO, {"role": "user", "content": 7}]}, "messages[1].content"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"enable_thinking": {"a": 1}}}, "chat_template_kwargs.enable_thinking"),
        ({"chat_template_kwargs": {"reasoning_effort": "x" * 1000}}, "chat_template_kwargs.reasoning_effort"),
        ({"logit_bias": [1]}, "logit_bias[0]"),
        ({"logit_bias": [[1, True]]}, "logit_bias"),
        ({"logit_bias": [[-1, 1]]}, "logit_bias[0][0]"),
        ({"logit_bias": [[1, 1]] * 1025}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias[...]"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields) == (400, param)


@pytest.mark.parametrize(
    ("value", "param"),
    [({}, "body.messages"), ([], "body"), ({"messages": [{"role": 3}]}, "body.messages[0].role")],
)
def test_a_part_of_a_document_is_named_by_its_place_there(value: Any, param: str) -> None:
    for where, named in (("body", param), ("", param.removeprefix("body").removeprefix("."))):
        with pytest.raises(Refusal) as caught:
            convert(value, ChatRequest, where)
        assert caught.value.param == (named or None)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"functions": [{"name": "f"}]}, "functions"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
            "messages[0].content[0].type",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields) == (400, param)
    neutral = {name: type(value)() for name, value in fields.items() if name != "messages"}
    chat(**neutral)


def test_schemas_are_bounded() -> None:
    text = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["x" * 70_000]}}}
    assert refused(response_format=text) == (400, "response_format")
    request = chat(response_format={"type": "json_object"})
    assert request.response_format
    assert json.loads(request.response_format.text() or "") == {"type": "object"}
    assert chat(response_format={"type": "text"}).response_format.text() is None  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"\xff",
        b'{"messages": NaN}',
        b'{"messages": [], "messages": []}',
        b'{"messages": "\\ud800"}',
        b'{"messages": ' + b"[" * 100_000,
        b'{"a": ' + b"[" * 80 + b"]" * 80 + b"}",
        b'{"temperature": ' + b"9" * 100_000 + b"}",
        b'{"temperature": 1e999}',
    ],
    ids=range(12),
)
def test_bodies_that_are_not_right(body: bytes) -> None:
    with pytest.raises(Refusal) as caught:
        decode(body, ChatRequest)
    assert caught.value.status == 400
    assert len(caught.value.message) < 300


def test_null_is_what_a_client_in_go_writes_for_what_is_not_set() -> None:
    null = dict.fromkeys(("model", "stream", "format", "options", "think", "keep_alive"))
    asked = decode(json.dumps({**null, "messages": None, "tools": None}).encode(), OllamaChatRequest)
    assert (asked.is_stream, asked.said.num_predict, asked.messages) == (True, None, None)
    assert decode(json.dumps({**null, "prompt": None, "raw": None}).encode(), OllamaGenerateRequest).is_stream


FUNCTION = {"function": {"name": "f"}}
REQUESTS: list[tuple[type[msgspec.Struct], dict[str, Any]]] = [
    (
        ChatRequest,
        {
            "messages": [
                {"role": "user", "content": [{"type": "text"}]},
                {"role": "assistant", "tool_calls": [FUNCTION]},
            ],
            "stream_options": {},
            "tools": [FUNCTION],
            "tool_choice": FUNCTION,
            "response_format": {"type": "json_schema", "json_schema": {}},
        },
    ),
    (CompletionRequest, {"prompt": "x", "stream_options": {}, "response_format": {"type": "text"}}),
    (
        MessagesRequest,
        {
            "messages": [{"role": "user", "content": [{"type": "tool_result"}]}],
            "max_tokens": 1,
            "system": [{"type": "text"}],
            "tools": [{"name": "f"}],
            "tool_choice": {},
            "thinking": {},
            "output_config": {},
        },
    ),
    (CountRequest, {"messages": [HELLO]}),
    (
        ResponsesRequest,
        {
            "input": [{"type": "message", "content": [{"type": "text"}]}, {"role": "user"}],
            "tools": [{"type": "function"}],
            "text": {},
            "reasoning": {},
        },
    ),
    (NativeCompletionRequest, {"prompt": {"prompt_string": "x"}}),
    (TokenizeRequest, {"content": "x"}),
    (DetokenizeRequest, {"tokens": [1]}),
    (OllamaChatRequest, {"messages": [{"role": "user", "tool_calls": [FUNCTION]}], "tools": [FUNCTION], "options": {}}),
    (OllamaGenerateRequest, {"options": {}}),
    (ShowRequest, {}),
    (EmbeddingRequest, {"input": "x"}),
    (NativeEmbeddingRequest, {}),
    (OllamaEmbedRequest, {}),
    (OllamaEmbeddingsRequest, {}),
]


def with_nulls(document: Any, asked: Any) -> Any:
    """Return a document with null for each field that it could have, and has not."""
    if isinstance(asked, list):
        return [with_nulls(one, part) for one, part in zip(document, asked, strict=True)]
    if not isinstance(asked, msgspec.Struct):
        return document
    fields = [field.encode_name for field in msgspec.structs.fields(asked)]
    return {name: with_nulls(document[name], getattr(asked, name)) if name in document else None for name in fields}


@pytest.mark.parametrize(("kind", "document"), REQUESTS)
def test_null_is_a_field_that_is_not_there(kind: type[msgspec.Struct], document: dict[str, Any]) -> None:
    asked = convert(document, kind)
    assert convert(with_nulls(document, asked), kind) == asked


def test_null_stays_where_it_is_no_field_of_ours() -> None:
    schema = {"properties": {"x": {"enum": [1.0, None], "default": None}}}
    function = {"name": "f", "parameters": schema}
    asked = chat(stream_options={"include_usage": None}, tools=[{"type": None, "function": function}])
    assert asked.tools
    assert asked.tools[0].function.parameters == schema
    assert refused(messages=None) == (400, "messages")


def test_a_whole_number_may_have_a_point() -> None:
    asked = chat(max_tokens=10.0, seed=3.0, temperature=1.0, logit_bias=[[5, 1.0]])
    assert (asked.max_tokens, asked.seed, asked.temperature, asked.logit_bias) == (10, 3, 1.0, [(5, 1.0)])
    assert isinstance(asked.max_tokens, int)
    assert convert({"input": [1.0, 2]}, EmbeddingRequest).input == [1, 2]
    assert chat(logit_bias=[[5.0, 1.0], [6.0, False]]).logit_bias == [(5, 1.0), (6, False)]
    assert refused(logit_bias=[[5.0, 1.0, 2]]) == (400, "logit_bias[0]")


def test_what_a_request_may_say_is_looked_at_once() -> None:
    """Where it is not understood as it is: looking takes milliseconds."""
    looked = cast("Any", bodies)._type_info
    chat(max_tokens=10.0)
    before = looked.cache_info()
    chat(max_tokens=10.0)
    after = looked.cache_info()
    assert after.misses == before.misses
    assert after.hits > before.hits


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"type": "xml"}, "text.format.type"),
        ({"type": "json_schema"}, "text.format.schema"),
        ({"type": "json_schema", "schema": {"enum": ["x" * 70_000]}}, "text.format"),
    ],
)
def test_the_form_of_a_response_is_refused_by_the_name_that_it_has_there(form: dict[str, Any], param: str) -> None:
    asked = decode(json.dumps({"input": "x", "text": {"format": form}}).encode(), ResponsesRequest)
    with pytest.raises(Refusal, match=f"^{param}: ") as caught:
        asked.sampling(SamplingConfig())
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("given", "seconds"),
    [(None, None), (0, 0), (5, 5), (-1, None), ("1h30m", 5400), ("90", 90), ("-1s", None), ("250ms", 0.25)],
)
def test_how_long_a_model_stays(given: Any, seconds: float | None) -> None:
    assert rest_s(given) == seconds


def test_anthropics_clients_are_told_once_what_is_wrong() -> None:
    for message in ("max_tokens: is missing", "is missing"):
        said = anthropic_error(Refusal(400, message, param="max_tokens"))
        assert said["error"]["message"] == "max_tokens: is missing"


def test_anthropics_clients_know_a_prompt_that_is_too_long_by_its_words() -> None:
    refusal = refusal_of(ContextFull("no room", prompt_tokens=4096, context_tokens=4096), "messages")
    said = anthropic_error(refusal)["error"]
    assert said == {
        "type": "invalid_request_error",
        "message": "prompt is too long: 4096 tokens > 4095 maximum (no room)",
    }


def test_what_is_told_of_a_file_whose_name_is_no_text_is_text() -> None:
    """Else it could be neither sent, nor kept among the results of a batch."""
    refusal = refusal_of(NotSupported("mod\udce9l.gguf: has no chat template"))
    assert msgspec.json.decode(msgspec.json.encode(openai_error(refusal)))["error"]["message"] == (
        "mod\ufffdl.gguf: has no chat template"
    )


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (BudgetError("the memory is full"), 503),
        (TierReadError("the drive is full", errno=errno.ENOSPC), 503),
        (TierReadError("the drive failed", errno=errno.EIO), 500),
        (MeshError("a device is gone"), 503),
    ],
)
def test_what_may_work_later_is_to_be_asked_again(error: EdgeRunError, status: int) -> None:
    refusal = refusal_of(error)
    assert (refusal.status, refusal.headers()["x-should-retry"]) == (status, "true" if status == 503 else "false")


def test_completions_that_cannot_be() -> None:
    for fields, param in (({"echo": True}, "echo"), ({"best_of": 3}, "best_of")):
        with pytest.raises(Refusal) as caught:
            decode(json.dumps({"prompt": "x", **fields}).encode(), CompletionRequest).check()
        assert caught.value.param == param
