"""Whatever a request says, of every API: it is understood, or refused with status 400 and a short message."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge_run.base.errors import ConfigError
from edge_run.base.sampling_config import SamplingConfig
from edge_run.runtime.formats.tool_format import HERMES
from edge_run.runtime.server.apis.anthropic_messages import MessagesRequest
from edge_run.runtime.server.apis.llama_server import NativeCompletionRequest
from edge_run.runtime.server.apis.ollama import OllamaChatRequest, OllamaGenerateRequest
from edge_run.runtime.server.apis.openai_chat import ChatRequest
from edge_run.runtime.server.apis.openai_completions import CompletionRequest
from edge_run.runtime.server.apis.responses import ResponsesRequest
from edge_run.runtime.server.bodies import decode
from edge_run.runtime.server.refusals import Refusal

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SAMPLING = {"temperature": 1, "top_p": 0.5, "top_k": 4, "min_p": 0.1, "seed": 3, "stop": ["a"], "repeat_penalty": 1.1}


def as_chat(asked: Any) -> None:
    asked.check()
    asked.sampling(SamplingConfig())
    task = asked.task()
    task.toolbox.check()
    task.toolbox.told(task.messages)


def as_completion(asked: Any) -> None:
    asked.check()
    asked.sampling(SamplingConfig())


def as_task(asked: Any) -> None:
    asked.sampling(SamplingConfig())
    task = asked.task()
    task.toolbox.check()
    if task.toolbox.is_forced:
        task.toolbox.forced_schema(HERMES)


def as_response(asked: Any) -> None:
    asked.check()
    as_task(asked)


def as_generate(asked: Any) -> None:
    asked.check()
    asked.sampling(SamplingConfig())
    asked.variables()


KINDS: dict[str, tuple[Any, Callable[[Any], None], dict[str, Any]]] = {
    "chat": (
        ChatRequest,
        as_chat,
        {
            **SAMPLING,
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": [{"type": "text", "text": "u"}]},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "1", "content": "t"},
            ],
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
            "chat_template_kwargs": {"enable_thinking": True},
            "stream_options": {"include_usage": True},
            "n": 2,
            "max_tokens": 5,
        },
    ),
    "completion": (
        CompletionRequest,
        as_completion,
        {**SAMPLING, "prompt": "p", "n": 2, "max_tokens": 4, "best_of": 1},
    ),
    "native": (
        NativeCompletionRequest,
        as_completion,
        {**SAMPLING, "prompt": [1, 2], "n_predict": 4, "json_schema": SCHEMA},
    ),
    "messages": (
        MessagesRequest,
        as_task,
        {
            "max_tokens": 5,
            "system": [{"type": "text", "text": "s"}],
            "messages": [
                {"role": "user", "content": "u"},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}}]},
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "t"}]},
                        {"type": "thinking", "thinking": "h"},
                    ],
                },
            ],
            "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
            "tool_choice": {"type": "tool", "name": "f"},
            "stop_sequences": ["a"],
            "thinking": {"type": "enabled"},
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        },
    ),
    "responses": (
        ResponsesRequest,
        as_response,
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "u"}]},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "t"},
                {"type": "reasoning", "summary": []},
            ],
            "instructions": "i",
            "tools": [{"type": "function", **FUNCTION}],
            "tool_choice": {"type": "function", "name": "f"},
            "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
            "reasoning": {"effort": "low"},
            "max_output_tokens": 4,
        },
    ),
    "ollama chat": (
        OllamaChatRequest,
        as_task,
        {
            "messages": [
                {"role": "user", "content": "u"},
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]},
                {"role": "tool", "content": "t", "tool_name": "f"},
            ],
            "tools": [{"type": "function", "function": FUNCTION}],
            "options": {**SAMPLING, "num_predict": 4},
            "format": SCHEMA,
            "think": "low",
        },
    ),
    "ollama generate": (
        OllamaGenerateRequest,
        as_generate,
        {"prompt": "p", "system": "s", "options": SAMPLING, "think": True},
    ),
}
_NUMBERS = st.sampled_from([0, 1, -1, 2, 0.5, -0.5, 1e308, 2**31, 2**63, -(2**63), 2**64, 10**30])
_TEXTS = st.sampled_from(["", "a", "user", "function", "json_schema", "x" * 300, "\0", "\ud83d\ude00", "{", "none"])
_LEAVES = st.one_of(st.none(), st.booleans(), _NUMBERS, _TEXTS)
VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_TEXTS, inner, max_size=3)),
    max_leaves=5,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values in a document but the document itself."""
    parts = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    return [place for key, inner in parts for place in ((*path, key), *places(inner, (*path, key)))]


def holder(document: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        document = document[key]
    return document


@pytest.mark.parametrize("name", KINDS)
def test_the_document_that_is_changed_is_right(name: str) -> None:
    kind, use, document = KINDS[name]
    use(decode(json.dumps(document).encode(), kind))


@given(name=st.sampled_from([*KINDS]), data=st.data())
@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
def test_what_is_changed_is_understood_or_refused(name: str, data: st.DataObject, outcomes: Counter[str]) -> None:
    kind, use, document = KINDS[name]
    document = copy.deepcopy(document)
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(places(document) or [()]))
        if not path:
            break
        if data.draw(st.integers(0, 4)):
            holder(document, path)[path[-1]] = data.draw(VALUES)
        else:
            del holder(document, path)[path[-1]]
    refusal = refused(lambda: use(decode(json.dumps(document).encode(), kind)))
    outcomes["refused" if refusal else "taken"] += 1
    if refusal:
        assert refusal.status == 400
        assert 0 < len(refusal.message) < 500
        assert len(refusal.param or "") < 200


def refused(action: Callable[[], None]) -> Refusal | None:
    try:
        action()
    except Refusal as refusal:
        return refusal
    except ConfigError as error:  # of tools, which `ChatTask.job` refuses
        return Refusal(400, str(error))
    return None
