"""`edge-run serve` as clients of Anthropic's API meet it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from edge_run import Model
from served import EXACTLY, TEMPLATE, Served, served

MESSAGES: Any = [{"role": "user", "content": "Tell me of the fox."}]
TOOL = {
    "name": "paint",
    "description": "Paints the wall.",
    "input_schema": {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]},
}


@pytest.fixture(scope="module")
def server(kit: Path) -> Iterator[Served]:
    with served(kit, *EXACTLY, "--chat-template", TEMPLATE, "--temp", 0) as server:
        yield server


@pytest.fixture(scope="module")
def anthropic() -> Any:
    """The client's package, which takes more than a second to load: not where others only collect these tests."""
    return pytest.importorskip("anthropic")


@pytest.fixture(scope="module")
def client(anthropic: Any, server: Served) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=server.url, api_key="none needed", max_retries=0, timeout=60) as client:
        yield client


def test_a_message(client: Any, model: Model) -> None:
    wanted = model.chat([{"role": "system", "content": "Be kind."}, *MESSAGES], max_tokens=12, temperature=0)
    found = client.messages.create(model="any", max_tokens=12, messages=MESSAGES, system="Be kind.")
    assert [block.text for block in found.content] == [wanted.text]
    assert (found.stop_reason, found.usage.output_tokens) == ("max_tokens", 12)
    again = client.messages.create(model="any", max_tokens=1, messages=MESSAGES, system="Be kind.")
    assert again.usage.cache_read_input_tokens + again.usage.input_tokens == wanted.prompt_tokens
    assert again.usage.cache_read_input_tokens


def test_a_stream(client: Any, model: Model) -> None:
    wanted = model.chat(MESSAGES, max_tokens=12, temperature=0)
    with client.messages.stream(model="any", max_tokens=12, messages=MESSAGES) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 1
    assert (final.content[0].text, final.stop_reason) == (wanted.text, "max_tokens")
    assert final.usage.output_tokens == 12


def test_a_stop_sequence_is_named(client: Any, model: Model) -> None:
    text = model.chat(MESSAGES, max_tokens=30, temperature=0).text
    word = text[8:12]
    found = client.messages.create(model="any", max_tokens=30, messages=MESSAGES, stop_sequences=["never", word])
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", word)
    assert "".join(block.text for block in found.content) == text[: text.index(word)]


def test_an_answer_goes_on_from_its_beginning(client: Any, model: Model) -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": "The fox"}]
    wanted = model.generate(model.chat_prompt(MESSAGES) + "The fox", max_tokens=8, temperature=0).result()
    assert client.messages.create(model="any", max_tokens=8, messages=begun).content[0].text == wanted.text


def test_a_tool_is_called_and_its_result_taken(client: Any) -> None:
    asked: Any = {"model": "any", "max_tokens": 60, "tools": [TOOL], "tool_choice": {"type": "any"}}
    found = client.messages.create(messages=MESSAGES, **asked)
    (call,) = found.content
    assert (found.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "paint")
    assert call.input in ({"colour": "red"}, {"colour": "blue"})
    with client.messages.stream(messages=MESSAGES, **asked) as stream:
        (streamed,) = stream.get_final_message().content
    assert streamed.input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "done"}]}
    messages = [*MESSAGES, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    asked["tool_choice"] = {"type": "none"}
    assert client.messages.create(messages=messages, **{**asked, "max_tokens": 3}).stop_reason == "max_tokens"


def test_tokens_are_counted(client: Any, model: Model) -> None:
    found = client.messages.count_tokens(model="any", messages=MESSAGES)
    assert found.input_tokens == len(model.prompt_tokens(model.chat_prompt(MESSAGES)))


def test_the_model_is_listed(client: Any) -> None:
    (model,) = client.models.list()
    assert (model.id, model.type) == ("kit-dense-q4_0", "model")
    assert client.models.retrieve(model.id).created_at == model.created_at


def test_errors_are_as_anthropic_says_them(client: Any, server: Served, anthropic: Any) -> None:
    image = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1:1/x.png"}}
    with pytest.raises(anthropic.BadRequestError, match="reads text only") as caught:
        client.messages.create(model="any", max_tokens=1, messages=[{"role": "user", "content": [image]}])
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    assert caught.value.body["request_id"] == caught.value.request_id
    for body in ({"messages": MESSAGES}, {"messages": MESSAGES, "max_tokens": -5}, {"max_tokens": 1, "messages": []}):
        refused = httpx.post(f"{server.url}/v1/messages", json=body, timeout=60)
        assert (refused.status_code, refused.json()["type"]) == (400, "error")
    with pytest.raises(anthropic.BadRequestError, match="the context holds"):
        client.messages.create(model="any", max_tokens=1, messages=[{"role": "user", "content": "fox " * 1000}])
