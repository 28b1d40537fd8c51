"""Formats of calls beside Qwen's and Hermes's: Llama's, Mistral's, gpt-oss's, as their makers document them."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any

import anyio
import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_run.base.errors import ConfigError
from edge_run.base.sampling_config import SamplingConfig
from edge_run.runtime.formats.tool_format import FORMATS, HERMES, ToolFormat, format_of
from edge_run.runtime.formats.tools import FunctionTool, Toolbox
from edge_run.runtime.grammars.schema_grammar import ALTERNATIVES, schema_grammar
from edge_run.runtime.server.chat_task import ChatTask
from edge_run.runtime.server.generating import Job
from edge_run.runtime.server.refusals import Refusal
from model_output import parsed

HARMONY, _, MISTRAL_ARGS, MISTRAL, LLAMA = FORMATS
SKY, ADD = "get_sky", "add"
TOOLS = [
    FunctionTool(SKY, "The sky over a town.", {"type": "object", "properties": {"town": {"type": "string"}}}),
    FunctionTool(ADD, None, {"type": "object", "properties": {"a": {"type": "integer"}}}),
]
SKY_SCHEMA = {"type": "object", "properties": {"sky": {}}}
PARIS, ROME = {"town": "Paris"}, {"town": "Rome"}

# Each is a format, what the model writes, and what it means: content, reasoning, calls.
WRITTEN: list[tuple[ToolFormat, str, tuple[str, str, list[Any]]]] = [
    (LLAMA, '{"name": "get_sky", "parameters": {"town": "Paris"}}', ("", "", [(SKY, PARIS)])),
    (LLAMA, '<|python_tag|>{"name": "get_sky", "parameters": {"town": "Paris"}}', ("", "", [(SKY, PARIS)])),
    (
        LLAMA,
        '{"type": "function", "name": "get_sky", "parameters": {"town": "Rome"}}; {"name": "add", "parameters": {}}',
        ("", "", [(SKY, ROME), (ADD, {})]),
    ),
    (LLAMA, 'I look.<|python_tag|>{"name": "add", "parameters": {"a": 1}}', ("I look.", "", [(ADD, {"a": 1})])),
    (LLAMA, '<|python_tag|>print("no call")', ('<|python_tag|>print("no call")', "", [])),
    (LLAMA, '{"sky": "blue"}', ('{"sky": "blue"}', "", [])),
    (LLAMA, "The sky is <blue>.", ("The sky is <blue>.", "", [])),
    (MISTRAL, '[TOOL_CALLS] [{"name": "get_sky", "arguments": {"town": "Paris"}}]', ("", "", [(SKY, PARIS)])),
    (
        MISTRAL,
        '[TOOL_CALLS][{"name": "get_sky", "arguments": {"town": "Paris"}}, {"name": "add", "arguments": {"a": 2}}]',
        ("", "", [(SKY, PARIS), (ADD, {"a": 2})]),
    ),
    (MISTRAL, "A list [1, 2] and [TOOL", ("A list [1, 2] and [TOOL", "", [])),
    (
        MISTRAL,
        '[TOOL_CALLS][{"name": "rm", "arguments": {}}]',
        ('[TOOL_CALLS][{"name": "rm", "arguments": {}}]', "", []),
    ),
    (MISTRAL_ARGS, '[TOOL_CALLS]get_sky[ARGS]{"town": "Paris"}', ("", "", [(SKY, PARIS)])),
    (
        MISTRAL_ARGS,
        'Wait.[TOOL_CALLS]get_sky[CALL_ID]abcDEF123[ARGS]{"town": "[ARGS]"}[TOOL_CALLS]add[ARGS]{"a": 3}',
        ("Wait.", "", [(SKY, {"town": "[ARGS]"}), (ADD, {"a": 3})]),
    ),
    (
        HARMONY,
        "<|channel|>analysis<|message|>They ask for the sky.<|end|><|start|>assistant<|channel|>final<|message|>It is "
        "blue <|and|> wide.",
        ("It is blue <|and|> wide.", "They ask for the sky.", []),
    ),
    (
        HARMONY,
        "<|channel|>analysis<|message|>I call.<|end|><|start|>assistant<|channel|>commentary to=functions.get_sky "
        '<|constrain|>json<|message|>{"town": "Paris"}',
        ("", "I call.", [(SKY, PARIS)]),
    ),
    (
        HARMONY,
        '<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>',
        ("", "", [(ADD, {"a": 1})]),
    ),
    (
        HARMONY,
        "<|channel|>commentary<|message|>First this.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
        "<|constrain|>json<|message|>{}<|call|>",
        ("First this.", "", [(ADD, {})]),
    ),
    # where the end of a message is no part of the text, as of control tokens that are not shown
    (
        HARMONY,
        "<|channel|>analysis<|message|>Hm.<|start|>assistant<|channel|>final<|message|>Yes.",
        ("Yes.", "Hm.", []),
    ),
    (
        HARMONY,
        "<|channel|>commentary to=functions.rm<|message|>{}<|call|>",
        ("<|channel|>commentary to=functions.rm<|message|>{}", "", []),
    ),
    (HARMONY, "No marks at all", ("No marks at all", "", [])),
]


def meaning(form: ToolFormat, text: str, cuts: list[int], begins: str = "") -> tuple[str, str, list[Any]]:
    parser = form.parser(begins, form is HARMONY, Toolbox(TOOLS).schemas, 1000)
    return parsed(parser, text, cuts)


@pytest.mark.parametrize(("form", "text", "wanted"), WRITTEN)
def test_what_models_write(form: ToolFormat, text: str, wanted: tuple[str, str, list[Any]]) -> None:
    assert meaning(form, text, []) == wanted
    assert meaning(form, text, [*range(len(text))]) == wanted


@given(st.sampled_from(WRITTEN), st.lists(st.integers(0, 300), max_size=40))
def test_in_pieces(written: tuple[ToolFormat, str, tuple[str, str, list[Any]]], cuts: list[int]) -> None:
    form, text, wanted = written
    assert meaning(form, text, cuts) == wanted


@pytest.mark.parametrize("after", ["<|end|><|start|>assistant", "<|start|>assistant", ""])
def test_thoughts_of_gpt_oss_that_are_not_told_apart_stand_between_marks(after: str) -> None:
    text = f"<|channel|>analysis<|message|>Hm.{after}<|channel|>final<|message|>Yes."
    for cuts in ([], range(len(text))):
        assert parsed(HARMONY.parser("", False, (), 1), text, cuts) == ("<think>Hm.</think>Yes.", "", [])


def test_content_of_gpt_oss_comes_as_it_is_made() -> None:
    parser = HARMONY.parser("", True, (), 1)
    assert parser.push("<|channel|>final<|mess") == []
    assert [delta.content for delta in parser.push("age|>Blue")] == ["Blue"]
    assert [delta.content for delta in parser.push(" sky <|en")] == [" sky "]
    assert [delta.content for delta in parser.push("ergy|>")] == ["<|energy|>"]


WIDE = FunctionTool("wide", None, {"type": "object", "properties": {"a": {"anyOf": [{"type": "integer"}] * 5000}}})
UNNAMED = f"<tool_call>add{'<arg_key></arg_key><arg_value>' * 3000}</tool_call>"
LONG: list[tuple[ToolFormat, str, tuple[str, str, list[Any]]]] = [
    *((form, text := f"{form.begins}add{' ' * 20_000}x", (text, "", [])) for form in (MISTRAL, MISTRAL_ARGS)),
    (HERMES, UNNAMED, (UNNAMED, "", [])),
    (
        HERMES,
        f"<tool_call><function=wide>{'<parameter=a>1</parameter>' * 300}</function></tool_call>",
        ("", "", [("wide", {"a": 1})]),
    ),
]


@pytest.mark.parametrize(("form", "text", "wanted"), LONG, ids=range(len(LONG)))
def test_what_is_long_takes_no_longer_than_its_length_explains(
    form: ToolFormat, text: str, wanted: tuple[str, str, list[Any]]
) -> None:
    """Each of these took seconds or minutes, in which nobody else was answered."""
    began_s = time.process_time()
    assert parsed(form.parser("", False, Toolbox([*TOOLS, WIDE]).schemas, 1000), text) == wanted
    assert time.process_time() - began_s < 1.0


CODER_TEMPLATE = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for key, value in c.function.arguments.items() %}<parameter={{ key }}>\n{{ value }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}{% endfor %}"
)
GLM_TEMPLATE = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}\n"
    "{% for key, value in c.function.arguments.items() %}<arg_key>{{ key }}</arg_key>\n"
    "<arg_value>{{ value }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize("template", [CODER_TEMPLATE, GLM_TEMPLATE])
@pytest.mark.parametrize("n_letters", [1, 2, 3, 7, 1000])
def test_a_call_as_the_template_writes_it(template: str, n_letters: int) -> None:
    call = {"function": {"name": SKY, "arguments": PARIS}}
    text = jinja2.Template(template).render(messages=[{"role": "assistant", "tool_calls": [call]}])
    form = format_of(template)
    assert form is HERMES
    assert meaning(form, text, [*range(0, len(text), n_letters)]) == ("", "", [(SKY, PARIS)])


@pytest.mark.parametrize(
    ("part", "form"),
    [
        ("{{ '<|start|>assistant<|channel|>' }}", HARMONY),
        ("<tool_call>", HERMES),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", MISTRAL),
        ("[TOOL_CALLS] [ARGS]", MISTRAL_ARGS),
        ("Environment: ipython <|python_tag|>", LLAMA),
        ("{{ message.content }}", None),
    ],
)
def test_the_template_tells(part: str, form: ToolFormat | None) -> None:
    assert format_of(f"a {part} z") is form


def job_of(template: str, prompt: str = "user: hi", **task: Any) -> tuple[Job, str, list[Any]]:
    """Return the job of a conversation, the text that it continues, and the messages as the template has them."""
    seen: list[Any] = []

    def chat_prompt(messages: Any, variables: Any) -> str:
        seen.extend(messages)
        return prompt

    async def prepare(function: Any, *arguments: Any) -> Any:
        return function(*arguments)

    async def prompt_tokens(text: str) -> list[int]:
        return [ord(letter) for letter in text]

    served: Any = SimpleNamespace(
        model=SimpleNamespace(chat_template=template, has_chat_template=True, chat_prompt=chat_prompt),
        prepare=prepare, prompt_tokens=prompt_tokens, limit=lambda most: most, salt=lambda salt: "",
    )  # fmt: skip
    messages = task.pop("messages", [{"role": "user", "content": "hi"}])
    sampling = task.pop("sampling", SamplingConfig())
    job: Job = anyio.run(ChatTask(messages, **task).job, served, sampling, 10)
    return job, "".join(map(chr, job.tokens)), seen


@pytest.mark.parametrize(
    ("form", "end", "written"),
    [
        (LLAMA, "", '{"name": "add", "parameters": {"a": 1}}'),
        (MISTRAL, "[TOOL_CALLS]", '[{"name": "add", "arguments": {"a": 1}}]'),
        (MISTRAL_ARGS, "[TOOL_CALLS]", 'add[ARGS]{"a": 1}'),
        (HARMONY, "<|channel|>commentary to=functions.", 'add <|constrain|>json<|message|>{"a": 1}'),
        (HERMES, "<tool_call>\n", '{"name": "add", "arguments": {"a": 1}}'),
    ],
)
def test_a_call_that_must_be_made(form: ToolFormat, end: str, written: str) -> None:
    job, prompt, _ = job_of(form.sign, toolbox=Toolbox(TOOLS, "required"))
    assert prompt == f"user: hi{end}"
    assert tuple(job.marks) == form.marks
    schema = job.sampling.json_schema
    assert schema
    grammar = schema_grammar(schema)
    assert "add" in grammar
    assert "get_sky" in grammar
    parser = job.parser()
    (delta,) = [*parser.push(written), *parser.finish()]
    assert delta.call
    assert (delta.call.name, delta.call.arguments) == ("add", '{"a": 1}')


@pytest.mark.parametrize("form", FORMATS, ids=[form.sign for form in FORMATS])
def test_a_call_that_must_be_made_follows_what_the_assistant_said(form: ToolFormat) -> None:
    """It is no part of that text: as one, it would be text as well."""
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Let me see."}]
    job, prompt, told = job_of(form.sign, messages=messages, toolbox=Toolbox(TOOLS, "required"))
    fresh, fresh_prompt, _ = job_of(form.sign, toolbox=Toolbox(TOOLS, "required"))
    assert (prompt, job.sampling, job.marks) == (fresh_prompt, fresh.sampling, fresh.marks)
    assert told[-1]["content"] == "Let me see."


@pytest.mark.parametrize("form", FORMATS, ids=[form.sign for form in FORMATS])
def test_a_schema_leaves_a_call_possible(form: ToolFormat) -> None:
    sampling = SamplingConfig(json_schema=json.dumps(SKY_SCHEMA))
    job, prompt, _ = job_of(form.sign, toolbox=Toolbox(TOOLS), sampling=sampling)
    answer, *calls = json.loads(job.sampling.json_schema or "")[ALTERNATIVES]
    assert (prompt, answer) == ("user: hi", {"text": form.answer_begins, "schema": SKY_SCHEMA})
    assert all(call["text"].startswith(form.begins) for call in calls)
    assert parsed(job.parser(), f'{form.answer_begins}{{"sky": 1}}', []) == ('{"sky": 1}', "", [])
    for callable_none in (Toolbox(), Toolbox(TOOLS, "none")):
        job, prompt, _ = job_of(form.sign, toolbox=callable_none, sampling=sampling)
        assert (prompt, job.sampling) == (f"user: hi{form.answer_begins}", sampling)


def test_a_grammar_that_leaves_no_call_possible_is_refused() -> None:
    sampling = SamplingConfig(grammar='root ::= "a"')
    with pytest.raises(Refusal, match="could call no tool") as caught:
        job_of(HERMES.sign, toolbox=Toolbox(TOOLS), sampling=sampling)
    assert (caught.value.status, caught.value.param) == (400, "grammar")
    job, _, _ = job_of(HERMES.sign, toolbox=Toolbox(TOOLS, "none"), sampling=sampling)
    assert job.sampling == sampling


def test_gpt_oss_without_tools_is_parsed_and_a_form_is_of_the_final_message() -> None:
    job, prompt, _ = job_of(HARMONY.sign)
    assert (prompt, tuple(job.marks)) == ("user: hi", HARMONY.marks)
    assert [d.reasoning for d in job.parser().push("<|channel|>analysis<|message|>Hm.")] == ["Hm."]
    _, prompt, _ = job_of(HARMONY.sign, sampling=SamplingConfig(json_schema="{}"))
    assert prompt == "user: hi<|channel|>final<|message|>"
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "We"}]
    job, prompt, _ = job_of(HARMONY.sign, messages=messages)
    assert prompt == "user: hi<|channel|>final<|message|>We"
    assert [d.content for d in job.parser().push("ll.")] == ["ll."]


THINKS = "user: hi<think>\n"


@pytest.mark.parametrize("cuts", [[], [1, 4, 7]])
def test_an_answer_to_a_schema_is_no_thought_where_the_prompt_begins_one(cuts: list[int]) -> None:
    job, prompt, _ = job_of("<think>", THINKS, sampling=SamplingConfig(json_schema="{}"))
    assert prompt == "user: hi<think>\n\n</think>\n\n"
    assert parsed(job.parser(), '{"a": 1}', cuts) == ('{"a": 1}', "", [])
    job, prompt, _ = job_of("<think>", THINKS, sampling=SamplingConfig(grammar='root ::= "Hm.</think>{}"'))
    assert prompt == THINKS, "a client's own grammar may have thoughts"
    assert parsed(job.parser(), "Hm.</think>{}", cuts) == ("{}", "Hm.", [])


def test_a_beginning_that_is_given_comes_after_the_thought_that_the_prompt_begins() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "We"}]
    job, prompt, _ = job_of("<think>", THINKS, messages=messages)
    assert prompt == "user: hi<think>\n\n</think>\n\nWe"
    assert parsed(job.parser(), "ll.", []) == ("ll.", "", [])


def test_what_templates_want_of_earlier_calls() -> None:
    call = {"id": "call_0123456789", "type": "function", "function": {"name": ADD, "arguments": {}}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "call_0123456789"},
    ]
    _, _, (_, made, result) = job_of(MISTRAL.sign, messages=messages)
    assert made["tool_calls"][0]["id"] == result["tool_call_id"]
    assert len(result["tool_call_id"]) == 9
    assert result["tool_call_id"].isalnum()
    _, _, (_, made, _) = job_of(HARMONY.sign, messages=messages)
    assert made["thinking"] == "Hm."
    assert "reasoning_content" not in made


def test_the_rules_of_each_alternative_are_its_own() -> None:
    def grammar(ways: Any) -> str:
        return schema_grammar(json.dumps({ALTERNATIVES: ways}))

    found = grammar([{"text": 'a"[ARGS]', "schema": {"type": "integer"}}, {"text": "b", "schema": {"const": "root"}}])
    assert found.splitlines()[0] == r'root ::= "a\"[ARGS]" w0-root | "b" w1-root'
    assert '"\\"root\\""' in found, "what is in quotes is no name"
    for broken in (3, [3], [{"text": "a"}], [{"schema": {}}]):
        with pytest.raises(ConfigError):
            grammar(broken)
