"""What of an answer is shown, and which answers a conversation goes on with: thoughts are no part of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from edge_run.base.errors import ProtocolError
from edge_run.base.results import Piece
from edge_run.base.sampling_config import SamplingConfig
from edge_run.cli.shared.answer import WrittenAnswer
from edge_run.cli.shared.chat import Chat
from edge_run.cli.shared.chat_loop import NOT_ADDED
from edge_run.cli.shared.server_chat import ServerChat
from edge_run.cli.shared.talks import TemplateTalk
from edge_run.runtime.client.answer_event import AnswerEvent
from quiet_terminal import quiet_terminal


@pytest.mark.parametrize(
    ("text", "finish_reason", "has_thoughts", "goes_on"),
    [
        ("Yes.", "stop", False, True),
        ("Ye", "cancelled", True, True),
        ("", "stop", True, True),
        ("", "stop", False, False),
        ("", "cancelled", True, False),
        ("", "length", True, False),
        ("", "context", True, False),
        ("", None, True, False),
    ],
)
def test_a_thought_that_was_cut_off_is_no_answer(
    text: str, finish_reason: str | None, has_thoughts: bool, goes_on: bool
) -> None:
    generation = SimpleNamespace(finish_reason=finish_reason) if finish_reason else None
    assert WrittenAnswer(text, generation, has_thoughts).goes_on == goes_on  # type: ignore[arg-type]


def test_thoughts_at_a_server_are_shown_between_marks_and_not_sent_along() -> None:
    sent, shown = list[Any](), list[str]()

    def answer(path: str, body: dict[str, Any]) -> Iterator[AnswerEvent]:
        sent.append(body["messages"])
        yield AnswerEvent(reasoning="H")
        yield AnswerEvent(reasoning="m.")
        if len(sent) == 1:
            yield AnswerEvent("Ye", reasoning="..")
            yield AnswerEvent("s.")
        if len(sent) == 3:
            raise ProtocolError("the server is gone")
        yield AnswerEvent(finish="length" if len(sent) == 4 else "stop")

    terminal, client = quiet_terminal(), SimpleNamespace(answer=answer)
    terminal.write_answer, terminal.end_line = shown.append, lambda: shown.append("\n")
    chat = ServerChat(client, {}, "", terminal)  # type: ignore[arg-type]
    for text in ("one", "two", "three", "four", "five"):
        chat.answer(text)
    assert "".join(shown) == "<think>\nHm...\n</think>\n\nYes.\n" + "<think>\nHm.\n" * 4
    said = [(message["role"], message["content"]) for message in sent[-1]]
    answered = [("user", "one"), ("assistant", "Yes."), ("user", "two"), ("assistant", "")]
    assert said == [*answered, ("user", "five")], "a thought that was cut off is no answer"


def test_thoughts_of_a_model_here_are_shown_so_too_and_an_empty_answer_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, shown, said = list[Any](), list[str](), list[str]()
    saying = {"one": ("Yes.", "stop"), "two": ("", "stop"), "three": ("", "length"), "four": ("", "stop")}

    def stream_chat(messages: list[dict[str, str]], **options: object) -> Iterator[Piece]:
        asked.append(messages)
        text = messages[-1]["content"]
        content, reason = saying[text]
        yield Piece("<th", (1,), None, None, "", "")
        if text != "four":
            yield Piece("ink>Hm.", (2,), None, None, "", "Hm.")
        yield Piece(content, (), SimpleNamespace(finish_reason=reason), None, content, "")  # type: ignore[arg-type]

    monkeypatch.setattr("edge_run.cli.shared.chat.say_figures", lambda *_: None)
    terminal = quiet_terminal()
    terminal.say, terminal.write_answer, terminal.end_line = lambda text, *_: said.append(text), shown.append, int
    terminal.showing = lambda describe: contextlib.nullcontext(int)
    model: Any = SimpleNamespace(notices=(), stream_chat=stream_chat, cancel=None)
    talk = TemplateTalk(model, "", None, SamplingConfig())
    chat = Chat(model, talk, terminal)
    for text in saying:
        chat.answer(text)
    assert "".join(shown) == "<think>\nHm.\n</think>\n\nYes." + "<think>\nHm." * 2
    assert talk.parts == (("user", "one"), ("assistant", "Yes."), ("user", "two"), ("assistant", ""))
    assert said == [NOT_ADDED] * 2, "of a thought that was cut off, and of nothing"
    terminal.say_lines = lambda text, *_: said.append(text)
    client: Any = SimpleNamespace(answer=lambda *_: (AnswerEvent() for _ in range(2)))
    ServerChat(client, {}, "", terminal).answer("five")
    assert said[-1] == NOT_ADDED
