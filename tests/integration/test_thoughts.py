"""What a model thinks before it answers: told apart from what it says, and not told again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_run import Generation, Model, Request, SamplingConfig
from edge_run.cli.shared.chat import Chat
from edge_run.cli.shared.talks import TemplateTalk
from edge_run.cli.shared.terminal import Terminal

REFUSING = (  # what it would refuse is told apart by it
    "{%% for m in messages %%}{%% if '%s' in m.content %%}{{ raise_exception('no thoughts') }}{%% endif %%}"
    "{{ m.role }}: {{ m.content }} {%% endfor %%}assistant: "
)
WRITTEN = {
    "<think>": "<think>Hm.</think>Yes.",
    "<|channel|>": "<|end|><|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>Yes.",
}
SHOWN = "<think>\nHm.\n</think>\n\nYes.\n"


@pytest.fixture(scope="module", params=WRITTEN)
def thinking(request: pytest.FixtureRequest, kit: Path) -> Iterator[tuple[Model, SamplingConfig]]:
    """The bundled model with a template of one that thinks, and what makes it write like that one."""
    with Model(kit, context_tokens=512, threads=1, sequences=2, chat_template=REFUSING % request.param) as model:
        yield model, SamplingConfig(grammar=f'root ::= "{WRITTEN[request.param]}"')


def test_a_chat_goes_on_with_what_was_said(
    thinking: tuple[Model, SamplingConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    model, sampling = thinking
    talk = TemplateTalk(model, "", None, sampling)
    chat = Chat(model, talk, Terminal())
    for _ in range(2):
        chat.answer("Is it?")
    assert capsys.readouterr().out == SHOWN * 2
    assert talk.parts == (("user", "Is it?"), ("assistant", "Yes.")) * 2


def test_pieces_and_answers_in_python(thinking: tuple[Model, SamplingConfig]) -> None:
    model, sampling = thinking
    messages = [{"role": "user", "content": "Is it?"}]
    stream = model.stream_chat(messages, sampling=sampling)
    pieces = list(stream)
    answer = stream.result()
    assert (answer.content, answer.reasoning) == ("Yes.", "Hm.")
    assert "".join(piece.content or "" for piece in pieces) == "Yes."
    assert "".join(piece.reasoning or "" for piece in pieces) == "Hm."
    assert "".join(piece.text for piece in pieces) == answer.text
    conversation = [*messages, answer.message, *messages]
    for again in model.generate_many([Request(conversation, sampling=sampling)] * 2).results():
        assert isinstance(again, Generation)
        assert again.message == {"role": "assistant", "content": "Yes."}
    plain = list(model.generate("Once", max_tokens=2))
    assert {(piece.content, piece.reasoning) for piece in plain} == {(None, None)}, "a text is no conversation"
