"""ChatTemplate: the templates in use render as Hugging Face renders them, and broken ones end in one clear line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from edge_run.base.errors import ConfigError, ModelFileError
from edge_run.runtime.generation.chat import ChatTemplate, in_turns, plain_messages, template_cell
from edge_run.runtime.processes.cell import Cell, Overrun

CHATML = """{% for message in messages %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""

LLAMA_3 = """{{- bos_token }}
{%- if tools is not none %}{{- raise_exception("no tools here") }}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today: " + strftime_now("%d %b %Y") + "\\n\\n" }}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

ALTERNATING = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate\nuser/assistant/user/...') }}
{% endif %}
{% if message['role'] == 'user' %}[INST] {{ message['content'] }} [/INST]
{%- else %} {{ message['content'] }}{{ eos_token }}{% endif %}
{% endfor %}"""

USER = {"role": "user", "content": " Hello "}
SYSTEM = {"role": "system", "content": "Be brief."}
ASSISTANT = {"role": "assistant", "content": "Hi."}


CELL = template_cell()  # one for all, as each takes longer to start than a test


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, "<s>", "</s>", now=lambda: datetime(2024, 7, 26), cell=CELL)


def metadata(source: str | None) -> Callable[[str], str | None]:
    return lambda key: source if key == "tokenizer.chat_template" else None


def test_chatml() -> None:
    text = template(CHATML).render([SYSTEM, USER])
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n Hello <|im_end|>\n<|im_start|>assistant\n"
    )
    assert template(CHATML).render([USER], add_generation_prompt=False) == "<|im_start|>user\n Hello <|im_end|>\n"


def test_the_day_is_told_as_llama_cpp_tells_it() -> None:
    told = (
        "{% if not date_string is defined %}{% set date_string = 'none' %}{% endif %}{{ date_string }}, {{ datetime }}"
    )
    assert template(told).render([USER]) == "26 Jul 2024, Jul 26 2024"


def test_llama_3_with_and_without_a_system_message() -> None:
    opening = "<s><|start_header_id|>system<|end_header_id|>\n\nToday: 26 Jul 2024\n\n"
    rest = (
        "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHello<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert template(LLAMA_3).render([SYSTEM, USER]) == opening + "Be brief." + rest
    assert template(LLAMA_3).render([USER]) == opening + rest


def test_raise_exception_is_about_the_messages() -> None:
    alternating = template(ALTERNATING)
    assert alternating.render([USER, ASSISTANT]) == "<s>[INST]  Hello  [/INST] Hi.</s>"
    with pytest.raises(ConfigError, match=r"refuses .* must alternate user/assistant") as caught:
        alternating.render([USER, ASSISTANT, ASSISTANT])
    assert "\n" not in str(caught.value)
    assert alternating.render([USER, USER, ASSISTANT]) == "<s>[INST]  Hello \n\n Hello  [/INST] Hi.</s>"


@pytest.mark.parametrize(
    "source",
    [ALTERNATING, "<s>{% for m in messages if m.role != 'system' %}[INST] {{ m.content }} [/INST]{% endfor %}"],
)
def test_a_template_that_knows_no_system_is_told_it_as_llama_cpp_tells_it(source: str) -> None:
    assert template(source).render([SYSTEM, USER]) == "<s>[INST] Be brief.\n Hello  [/INST]"


def test_where_a_template_takes_the_system_first_only_what_it_says_later_is_told_in_its_place() -> None:
    strict = template(
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('at the beginning') }}"
        "{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    later, result = {"role": "system", "content": "Stop."}, {"role": "tool", "content": "4"}
    begun = strict.render([SYSTEM, later, USER, later])
    assert begun == "system: Be brief.\n\nStop.\nuser:  Hello \n\n<system>\nStop.\n</system>\n"
    rest = [ASSISTANT, later, USER, ASSISTANT, result, later]
    assert strict.render([SYSTEM, later, USER, later, *rest]) == (
        f"{begun}assistant: Hi.\nuser: <system>\nStop.\n</system>\n\n Hello \n"
        "assistant: Hi.\ntool: 4\n\n<system>\nStop.\n</system>\n"
    )
    assert template(CHATML).render([USER, later]).count("<|im_start|>system\nStop.<|im_end|>") == 1
    with pytest.raises(ConfigError, match="never"):
        template("{{ raise_exception('never') }}").render([USER, later])


LATER = {"role": "system", "content": "Stop."}


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            "{% if messages[0].role == 'system' %}# {{ messages[0].content }}\n{% endif %}"
            "{% for m in messages if m.role != 'system' %}{{ m.content }}|{% endfor %}",
            "# Be brief.\n\nStop.\n Hello |Hi.|<system>\nStop.\n</system>\n\n Hello |",
        ),
        (
            "{% for m in messages if m.role != 'system' %}{{ m.content }}|{% endfor %}",
            "Be brief.\n\nStop.\n Hello |Hi.|<system>\nStop.\n</system>\n\n Hello |",
        ),
        (
            "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
            "{{ m.content }}|{% endfor %}",
            "Be brief.\n\nStop.\n Hello |Hi.|<system>\nStop.\n</system>\n\n Hello |",
        ),
        (
            "{% for m in messages %}{{ m.content }}|{% endfor %}",
            "Be brief.|Stop.| Hello |Hi.|Stop.| Hello |",
        ),
    ],
)
def test_nothing_that_the_system_says_is_lost(source: str, text: str) -> None:
    assert template(source).render([SYSTEM, LATER, USER, ASSISTANT, LATER, USER]) == text


def test_what_the_user_says_in_a_row_is_one_message_only_where_that_is_refused_too() -> None:
    strict = template(
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{{ m.content }}|{% endfor %}"
    )
    assert strict.render([USER, USER, LATER]) == " Hello | Hello \n\n<system>\nStop.\n</system>|"


def test_what_the_system_says_does_not_come_between_a_call_and_its_result() -> None:
    calls, result = {**ASSISTANT, "tool_calls": [{"id": "1"}]}, {"role": "tool", "content": "4"}
    said = "<system>\nStop.\n</system>"
    told = {**result, "content": f"4\n\n{said}"}
    assert in_turns([USER, calls, LATER, result, result, ASSISTANT]) == [USER, calls, told, result, ASSISTANT]
    assert in_turns([USER, calls, LATER]) == [USER, calls, {"role": "user", "content": said}]
    after = {"role": "user", "content": f"{said}\n\n Hello "}
    assert in_turns([USER, calls, LATER, USER, USER], joins_users=False) == [USER, calls, after, USER]
    assert in_turns([USER, calls, LATER, ASSISTANT]) == [USER, calls, {"role": "user", "content": said}, ASSISTANT]


class Exhausted(Cell):
    """Reaches a limit with its first job."""

    n_asked = 0

    def ask(self, job: str, limit_s: float = 9.0, *, is_first: bool = True, **fields: Any) -> bytes:
        self.n_asked += 1
        if self.n_asked == 1:
            raise Overrun("takes more than a second")
        return CELL.ask(job, limit_s, is_first=is_first, **fields)


def test_a_limit_that_was_reached_says_nothing_of_the_template() -> None:
    chat = ChatTemplate(CHATML, "", "", cell=Exhausted("unused"))
    with pytest.raises(ModelFileError, match="more than a second"):
        chat.render([SYSTEM, USER])
    assert chat.render([SYSTEM, USER]).startswith("<|im_start|>system")


def test_what_hugging_face_adds_to_jinja() -> None:
    source = (
        "{% for n in range(9) %}{% if n == 1 %}{% continue %}{% endif %}{% if n == 3 %}{% break %}{% endif %}{{ n }}"
        "{% endfor %} {{ messages[0] | tojson }} {{ {'b': 1, 'a': '<é>'} | tojson(indent=1, sort_keys=true) }}"
        "{% generation %} kept{% endgeneration %}"
    )
    assert template(source).render([ASSISTANT]) == (
        '02 {"role": "assistant", "content": "Hi."} {\n "a": "<é>",\n "b": 1\n} kept'
    )


@pytest.mark.parametrize(
    ("source", "line"), [("{% for x in %}", 1), ("ok\n{{ messages", 2), ("{% endif %}", 1), ("\n\n{{ x | nosuch }}", 3)]
)
def test_a_template_that_is_not_jinja_says_where(source: str, line: int) -> None:
    from_file = template(source)  # which plain completion does without
    with pytest.raises(ModelFileError, match=f"line {line}: ") as caught:
        from_file.render([USER])
    assert "\n" not in str(caught.value)
    assert caught.value.line == line
    with pytest.raises(ConfigError, match=f"line {line}: "):
        ChatTemplate(source, "", "", is_override=True, cell=CELL)


def test_a_template_that_makes_far_more_than_it_is_told() -> None:
    with pytest.raises(ModelFileError, match=r"makes 9,000,000 characters of [\d,]+, [\d,]+ are the most"):
        template("{{ 'a' * 9000000 }}").render([USER])


@pytest.mark.parametrize(
    "source", ["{{ messages[9].content.x }}", "{{ 1 / 0 }}", "{{ messages + 1 }}", "{{ nosuch() }}"]
)
def test_a_template_that_fails_when_it_runs(source: str) -> None:
    with pytest.raises(ModelFileError, match="chat template of the model file"):
        template(source).render([USER])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ strftime_now.__closure__[0].cell_contents }}",
        "{{ ('{0.__class__.__mro__}' | string).format(messages) }}",
        "{{ messages.append(messages[0]) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ messages[0].clear() }}",
        "{% for x in range(1000000000) %}{% endfor %}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    message = dict(USER)
    with pytest.raises(ModelFileError, match=r"SecurityError|UndefinedError|OverflowError"):
        template(source).render([message])
    assert message == USER


def test_from_model() -> None:
    chat = ChatTemplate.from_model(metadata("{{ bos_token }}{{ messages[0].content }}"), "<s>", "</s>", None)
    assert chat is not None
    assert chat.render([USER]) == "<s> Hello "
    assert ChatTemplate.from_model(metadata(None), "<s>", "</s>") is None


def test_an_override_is_jinja_text_or_a_file_with_it(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("file: {{ messages[0].content }}", encoding="utf-8")
    for override, expected in (("text: {{ messages[0].content }}", "text:  Hello "), (str(file), "file:  Hello ")):
        chat = ChatTemplate.from_model(metadata("unused"), "", "", override)
        assert chat is not None
        assert chat.render([USER]) == expected


@pytest.mark.parametrize("override", ["no-such-file.jinja", "", "a\0b"])
def test_an_override_that_cannot_be_read(override: str) -> None:
    with pytest.raises(ConfigError, match="not Jinja text and not a readable file"):
        ChatTemplate.from_model(metadata(None), "", "", override)


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ({"role": "user"}, "content must be text, found none"),
        ({"role": "user", "content": None}, "content must be text, found NoneType"),
        ({"role": 3, "content": "x"}, "role must be text, found int"),
        ({"role": "", "content": "x"}, "role must not be empty"),
        ("hello", "must have a role and a content, found str"),
    ],
)
def test_messages_that_cannot_be(message: Mapping[str, str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=f"chat message 1: {complaint}"):
        plain_messages([USER, message])


def test_a_content_may_be_parts_of_text() -> None:
    kinds = ("text", "input_text", "output_text")
    parts = [*({"type": kind, "text": kind} for kind in kinds), {"type": "refusal", "refusal": "No."}]
    for content, text in ((parts, "text\ninput_text\noutput_text\nNo."), (tuple(parts[:1]), "text"), ([], "")):
        message = {"role": "user", "content": content}
        assert plain_messages([message]) == [{"role": "user", "content": text}]
        assert message["content"] is content


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "file:///x.png"}, "text": "x"},
        {"type": "text"},
        {"type": "text", "text": None},
        {"type": ["text"], "text": "x"},
        {"text": "x"},
        "x",
        5,
    ],
)
def test_parts_that_are_no_text_are_refused(part: object) -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "x"}, part]}
    with pytest.raises(ConfigError, match="chat message 1: part 1 of its content must be text, as"):
        plain_messages([USER, message])


def test_a_developer_is_the_system() -> None:
    """As at the server; few templates know the word, and some leave such a message out."""
    said = {"role": "developer", "content": "Be brief."}
    assert plain_messages([said, USER]) == [SYSTEM, USER]
    assert said["role"] == "developer", "what was given stays as it is"


def test_no_messages_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one"):
        template(CHATML).render([])
