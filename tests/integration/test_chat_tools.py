"""Tools that an answer may call, from Python: the conversation is told of them, and calls come back parsed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from edge_run import AsyncModel, ConfigError, Generation, Model, Request, SamplingConfig, to_json
from edge_run.runtime.formats.tool_format import FORMATS, ToolFormat
from edge_run.runtime.formats.tools import Toolbox
from edge_run.runtime.generation import chat
from served import TEMPLATE

if TYPE_CHECKING:
    import openai

OPTIONS: Any = {"context_tokens": 512, "threads": 1, "exact": True}
SHARED: Any = {**OPTIONS, "context_tokens": 1024, "chat_template": TEMPLATE}
MESSAGES = [{"role": "user", "content": "Paint my wall."}]
COLOURS = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}
TOOLS: Any = [
    {"type": "function", "function": {"name": "now"}},
    {"type": "function", "function": {"name": "paint", "parameters": COLOURS}},
]
PAINT = {"type": "function", "function": {"name": "paint"}}
ALLOWED: dict[str, Any] = {"paint": ({"colour": "red"}, {"colour": "blue"}), "now": ({},)}
KNOWS_TOOLS = (  # and writes calls as Hermes's models do
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} {{ c.function.arguments.colour }}</tool_call>"
    "{% endfor %}. {% endfor %}assistant:"
)


@pytest.fixture(scope="module")
def knowing(kit: Path) -> Iterator[Model]:
    """The bundled model, with a template that knows tools."""
    with Model(kit, **OPTIONS, chat_template=KNOWS_TOOLS) as model:
        yield model


def check_called(answer: Generation) -> None:
    (call,) = answer.tool_calls
    assert json.loads(call.arguments) == call.parsed
    assert call.parsed in ALLOWED[call.name]
    assert (answer.finish_reason, answer.content) == ("tool_calls", "")
    assert answer.message["tool_calls"][0]["function"] == {"name": call.name, "arguments": call.arguments}
    assert json.loads(to_json(answer))["tool_calls"] == [
        {"id": call.id, "name": call.name, "arguments": call.arguments, "parsed": call.parsed}
    ]


@pytest.mark.parametrize("choice", ["required", PAINT], ids=["required", "paint"])
def test_a_call_that_must_be_made_is_the_servers(model: Model, client: openai.OpenAI, choice: Any) -> None:
    *_, last = model.stream_chat(MESSAGES, tools=TOOLS, tool_choice=choice, seed=1)
    assert last.generation
    check_called(last.generation)
    asked: Any = {"model": "any", "messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "seed": 1}
    found = client.chat.completions.create(**asked).choices[0]
    assert found.finish_reason == last.generation.finish_reason
    assert found.message.tool_calls
    wanted = found.message.tool_calls[0].function
    (call,) = last.generation.tool_calls
    assert (call.name, call.arguments) == (wanted.name, wanted.arguments)


@pytest.mark.parametrize("form", FORMATS, ids=[form.sign for form in FORMATS])
def test_a_call_in_each_format(kit: Path, form: ToolFormat) -> None:
    with Model(kit, **OPTIONS, chat_template=f"{{# {form.sign} #}}{TEMPLATE}") as model:
        check_called(model.chat(MESSAGES, tools=TOOLS, tool_choice="required", seed=1, max_tokens=300))


def test_a_conversation_is_told_of_tools_calls_and_results(knowing: Model) -> None:
    forced = knowing.chat(MESSAGES, tools=TOOLS, tool_choice=PAINT, seed=1)
    check_called(forced)
    (call,) = forced.tool_calls
    colour = call.parsed["colour"]
    result = {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "painted"}]}
    conversation = [*MESSAGES, forced.message, result]
    with knowing.begin(Request(conversation, tools=TOOLS)) as answer:
        text = knowing.detokenize(answer.prompt, has_control=True)
    said = f"user: Paint my wall.. assistant: <tool_call>paint {colour}</tool_call>. tool: painted. assistant:"
    assert text.endswith(f"[now][paint]{said}")
    with knowing.begin(Request(conversation, tools=TOOLS, tool_choice="required")) as answer:
        assert knowing.detokenize(answer.prompt).endswith("assistant:<tool_call>\n")
    with knowing.begin(Request(conversation)) as answer:
        assert knowing.detokenize(answer.prompt, has_control=True).endswith(said), "also where nothing more is called"


def test_a_template_that_knows_no_tools_is_told_in_words(model: Model) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "paint", "arguments": '{"colour": "red"}'}}
    called: Any = {"role": "assistant", "content": None, "tool_calls": [call]}
    with model.begin(Request([*MESSAGES, called, {"role": "tool", "content": "painted"}], tools=TOOLS)) as answer:
        text = model.detokenize(answer.prompt)
    assert '"name": "paint"' in text
    assert '<tool_call>\n{"name": "paint", "arguments": {"colour": "red"}}\n</tool_call>' in text
    assert "<tool_response>\npainted\n</tool_response>" in text


def test_an_answer_that_calls_nothing_is_content(model: Model) -> None:
    answer = model.chat(MESSAGES, tools=TOOLS, max_tokens=6, temperature=0)
    assert (answer.tool_calls, answer.finish_reason) == ((), "length")
    assert answer.content == answer.text
    assert answer.message == {"role": "assistant", "content": answer.text}
    plain = model.chat(MESSAGES, max_tokens=6, temperature=0)
    assert (plain.tool_calls, plain.content, plain.reasoning) == ((), plain.text, "")
    assert plain.message == {"role": "assistant", "content": plain.text}


def test_an_answer_that_was_cut_off_calls_nothing(model: Model) -> None:
    answer = model.chat(MESSAGES, tools=TOOLS, tool_choice=PAINT, seed=1, max_tokens=3)
    assert (answer.tool_calls, answer.finish_reason) == ((), "length")


def test_a_schema_or_a_call(model: Model) -> None:
    answer = model.chat(MESSAGES, tools=TOOLS, json_schema=COLOURS, seed=2, max_tokens=200)
    if answer.tool_calls:
        assert answer.tool_calls[0].name in ALLOWED
    else:
        assert json.loads(answer.content or "") in ALLOWED["paint"]
    with pytest.raises(ConfigError, match="tool_choice: a call that must be made has a form already"):
        model.chat(MESSAGES, tools=TOOLS, tool_choice="required", json_schema=COLOURS)


def test_oldest_turns_are_left_out_with_tools_counted(model: Model) -> None:
    turns = [{"role": role, "content": "Paint my wall, and then another one. " * 3} for role in ("user", "assistant")]
    answer = model.chat([*turns * 4, *MESSAGES], tools=TOOLS, drops_oldest=True, max_tokens=4)
    assert answer.dropped_messages
    assert answer.completion_tokens


@pytest.mark.parametrize("sequences", [1, 2])
def test_tasks_and_many_prompts(kit: Path, sequences: int) -> None:
    async def ask(model: AsyncModel) -> Generation:
        return await model.chat(MESSAGES, tools=TOOLS, tool_choice="required", seed=1, deadline_s=60)

    async def main() -> None:
        async with AsyncModel(kit, **SHARED, sequences=sequences) as model:
            check_called(await ask(model))
            late = await model.chat(MESSAGES, tools=TOOLS, tool_choice="required", deadline_s=1e-9)
            assert (late.finish_reason, late.tool_calls) == ("deadline", ())

    anyio.run(main)
    with Model(kit, **SHARED, sequences=sequences) as model:
        request = Request(MESSAGES, sampling=SamplingConfig(seed=1), tools=TOOLS, tool_choice=PAINT)
        for answer in model.generate_many([request, request]).results():
            assert isinstance(answer, Generation)
            check_called(answer)


@pytest.mark.parametrize("sequences", [1, 2])
def test_what_a_call_needs_is_made_once(kit: Path, sequences: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The schema of its grammar, and the messages as templates know them."""
    made, checked = list[str](), list[int]()
    forced_schema, check_message = Toolbox.forced_schema, chat._checked

    def counted_schema(toolbox: Toolbox, form: ToolFormat) -> str:
        made.append(forced_schema(toolbox, form))
        return made[-1]

    def counted_check(index: int, message: object) -> dict[str, Any]:
        checked.append(index)
        return check_message(index, message)

    async def main() -> None:
        async with AsyncModel(kit, **SHARED, sequences=sequences) as model:
            options: Any = {"tools": TOOLS, "tool_choice": "required", "drops_oldest": True}
            check_called(await model.chat(MESSAGES, temperature=0, **options))

    monkeypatch.setattr(Toolbox, "forced_schema", counted_schema)
    monkeypatch.setattr(chat, "_checked", counted_check)
    anyio.run(main)
    assert len(made) == 1
    assert checked == [0]


def test_a_form_that_is_asked_for_comes_after_the_thought_that_the_template_begins(kit: Path) -> None:
    """Without tools too: as a thought, JSON would be none of what the model says."""
    with Model(kit, **OPTIONS, chat_template=TEMPLATE + "<think>") as model:
        ended = model.tokenize("\n</think>\n\n", add_special=False)
        usual = len(model.prompt_tokens(model.chat_prompt(MESSAGES)))
        assert model.chat(MESSAGES, max_tokens=1).prompt_tokens == usual
        answer = model.chat(MESSAGES, json_schema=COLOURS, max_tokens=64)
    assert json.loads(answer.text) in ALLOWED["paint"]
    assert usual < answer.prompt_tokens <= usual + len(ended)
