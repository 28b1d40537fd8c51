"""`edge-run serve` as clients of OpenAI's Responses API meet it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from edge_run import Model

if TYPE_CHECKING:
    import openai

INPUT = "Tell me of the fox."
MESSAGES: Any = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": INPUT}]
TOOL: Any = {
    "type": "function",
    "name": "paint",
    "parameters": {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]},
}


@pytest.fixture(scope="module")
def wanted(model: Model) -> str:
    return model.chat(MESSAGES, max_tokens=12, temperature=0).text


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": "any", "input": INPUT, "instructions": "Be kind.", "temperature": 0, **fields}


def test_a_response(client: openai.OpenAI, wanted: str) -> None:
    found = client.responses.create(**asked(max_output_tokens=12, reasoning={"effort": "low"}))
    assert found.output_text == wanted
    assert [item.to_dict()["status"] for item in found.output] == ["incomplete"]
    assert found.reasoning
    assert found.reasoning.effort == "low"
    assert (found.status, found.incomplete_details and found.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )
    assert found.usage
    assert found.usage.output_tokens == 12
    conversation: Any = [{"role": "user", "content": [{"type": "input_text", "text": INPUT}]}]
    assert client.responses.create(**asked(input=conversation, max_output_tokens=12)).output_text == wanted


def test_a_stream(client: openai.OpenAI, wanted: str) -> None:
    events = list(client.responses.create(**asked(max_output_tokens=12, stream=True)))
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert events[0].type == "response.created"
    assert events[0].response.output == []
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == wanted
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == wanted
    with client.responses.stream(**asked(max_output_tokens=12)) as stream:
        assert [event.type for event in stream] == [event.type for event in events]


def test_a_tool_is_called_and_its_result_taken(client: openai.OpenAI) -> None:
    forced = asked(tools=[TOOL], tool_choice="required")
    found = client.responses.create(**forced)
    (call,) = found.output
    assert (found.status, call.type) == ("completed", "function_call")
    assert json.loads(call.arguments)["colour"] in ("red", "blue")  # type: ignore[union-attr]
    events = list(client.responses.create(**forced, stream=True))
    assert events[-1].response.output[0].arguments == call.arguments  # type: ignore[union-attr]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}  # type: ignore[union-attr]
    conversation = [{"role": "user", "content": INPUT}, call.to_dict(), output]
    again = client.responses.create(**asked(input=conversation, tools=[TOOL], max_output_tokens=2))
    assert again.usage
    assert again.usage.input_tokens > (found.usage.input_tokens if found.usage else 0)


def test_the_oldest_turns_go_only_where_that_was_asked_for(client: openai.OpenAI, wanted: str) -> None:
    import openai

    long = [{"role": "user", "content": "A fox. " * 150}, {"role": "assistant", "content": "Yes."}] * 2
    conversation = [*long, {"role": "user", "content": INPUT}]
    with pytest.raises(openai.BadRequestError, match="the context holds"):
        client.responses.create(**asked(input=conversation))
    found = client.responses.create(**asked(input=conversation, truncation="auto", max_output_tokens=12))
    assert (found.output_text, found.truncation) == (wanted, "auto")


def test_an_answer_follows_a_schema(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    form = {"format": {"type": "json_schema", "name": "answer", "schema": schema}}
    assert set(json.loads(client.responses.create(**asked(text=form)).output_text)) == {"ok"}


@pytest.mark.parametrize(
    "fields",
    [
        {"previous_response_id": "resp_1"},
        {"background": True},
        {"tools": [{"type": "web_search"}]},
        {"input": []},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]},
        {"text": {"format": {"type": "json_schema", "schema": 7}}},
        {"max_output_tokens": -3},
    ],
)
def test_what_cannot_be_is_refused(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    import openai

    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**asked(**fields))
    assert caught.value.param
