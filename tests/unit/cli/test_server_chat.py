"""A chat with a server: its commands are those of a chat here, but for those that keep conversations."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import click
import pytest

from edge_run.base.errors import ContextFull, EdgeRunError, ProtocolError
from edge_run.cli.shared import chat, server_chat
from edge_run.cli.shared.chat_loop import COMMANDS, EXITS
from edge_run.cli.shared.server_chat import ServerChat
from edge_run.cli.shared.terminal import OutputError
from edge_run.runtime.client.answer_event import AnswerEvent
from quiet_terminal import piped, quiet_terminal


class Server:
    """What a server was asked, and what a chat with it said. answer: makes the answer to so many letters."""

    def __init__(self, answer: Callable[[int], str] = lambda n_letters: f"{n_letters} letters") -> None:
        self.asked, self.said = list[list[str]](), list[str]()
        self._answer = answer

    def talk(self, monkeypatch: pytest.MonkeyPatch, text: str, *, can_ask: bool = True) -> None:
        """Have a chat in which the user writes these lines."""
        terminal = quiet_terminal(can_ask=can_ask)
        terminal.say = lambda text, *style: self.said.append(text)
        terminal.write_answer = terminal.end_line = lambda *_: None
        monkeypatch.setattr(sys, "stdin", piped(text))
        ServerChat(SimpleNamespace(answer=self.answer), {}, "Be kind.", terminal).run()  # type: ignore[arg-type]

    def answer(self, path: str, body: dict[str, Any]) -> Iterator[AnswerEvent]:
        contents = [message["content"] for message in body["messages"]]
        self.asked.append(contents)
        yield AnswerEvent(self._answer(sum(map(len, contents))), "stop")


def test_the_last_turn_is_taken_back_or_answered_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(("Yes?", "No.", "Well.", "So."))
    server = Server(lambda _: next(answers))
    server.talk(monkeypatch, "/undo\none\ntwo\n/retry\n/undo\nthree\n")
    before = ["Be kind.", "one", "Yes?"]
    assert server.asked == [["Be kind.", "one"], [*before, "two"], [*before, "two"], [*before, "three"]]
    assert server.said[1] == "/undo: there is no message of this chat that could be taken back."


def test_an_answer_anew_that_fails_leaves_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(_: int) -> str:
        if len(server.asked) == 2:
            raise ProtocolError("the server is gone")
        return "Yes?"

    server = Server(answer)
    server.talk(monkeypatch, "one\n/retry\ntwo\n")
    assert server.asked[-1] == ["Be kind.", "one", "Yes?", "two"]
    assert "The answer before stays." in server.said


def test_an_answer_anew_that_breaks_off_leaves_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(lambda _: "Yes?")

    def answer(path: str, body: dict[str, Any]) -> Iterator[AnswerEvent]:
        yield from Server.answer(server, path, body)
        if len(server.asked) in (2, 3):
            raise ProtocolError("the server is gone")

    monkeypatch.setattr(server, "answer", answer)
    server._answer = lambda _: ("Yes?", "We", "Oh", "So.")[len(server.asked) - 1]
    server.talk(monkeypatch, "one\n/retry\ntwo\nthree\n")
    assert server.asked[-1] == ["Be kind.", "one", "Yes?", "two", "Oh", "three"], "a first answer keeps its beginning"
    assert [text for text in server.said if "is gone" in text or "stays" in text] == [
        "the server is gone. The chat is as it was before.",
        "The answer before stays.",
        "the server is gone. What was said stays.",
    ]


@pytest.mark.parametrize("can_ask", [True, False])
def test_turns_are_dropped_and_what_had_no_room_is_answered(monkeypatch: pytest.MonkeyPatch, can_ask: bool) -> None:
    def answer(n_letters: int) -> str:
        if n_letters > 60:
            raise ContextFull("http://box:80: the context is full")
        return "a" * 8

    server = Server(answer)
    server.talk(monkeypatch, "".join(f"{letter * 10}\n" for letter in "bcde") + "/drop\n/stats\n", can_ask=can_ask)
    assert server.asked[3] == ["Be kind.", "b" * 10, "a" * 8, "c" * 10, "a" * 8, "d" * 10, "a" * 8, "e" * 10]
    assert server.asked[4:] == [["Be kind.", "d" * 10, "a" * 8, "e" * 10]], "no more than half of what the turns had"
    (advice,) = [text for text in server.said if "no room" in text or "context is full" in text]
    assert "; /drop leaves out its oldest turns, /clear begins anew. Your text was not added" in advice
    assert "4 messages left out, the rest is read anew." in server.said
    assert any(text.startswith("4 answers") for text in server.said)


def test_a_long_system_prompt_costs_no_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(lambda _: "a")
    server.talk(monkeypatch, "/drop\nb\n/drop\nc\nd\ne\n/drop\nf\n")
    assert server.asked[-1] == ["Be kind.", "d", "a", "e", "a", "f"]
    assert server.said.count("/drop: there is no turn that could be left out; /clear begins anew.") == 2


@pytest.mark.parametrize("command", ["/save fox", "/load fox", "/save", "/load"])
def test_what_keeps_conversations_says_that_nothing_is_kept(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    server = Server()
    server.talk(monkeypatch, f"{command}\n")
    assert server.said[1] == f"{command.split(maxsplit=1)[0]}: nothing is kept of a chat with a server"


def test_help_has_every_command_that_there_is() -> None:
    here, there = (set(re.findall(r"/[a-z]+", text)) for text in (chat.HELP, server_chat.HELP))
    assert here == COMMANDS - {"/help", *EXITS} | {"/exit"}
    assert here - there == {"/save", "/load"}


@pytest.mark.parametrize("error", [ProtocolError("the server is full"), OutputError("standard output: is full")])
def test_a_chat_from_a_pipe_ends_with_its_error(monkeypatch: pytest.MonkeyPatch, error: EdgeRunError) -> None:
    def answer(_: int) -> str:
        raise error

    with pytest.raises((click.exceptions.Exit, OutputError)) as raised:
        Server(answer).talk(monkeypatch, "one\n", can_ask=False)
    assert getattr(raised.value, "exit_code", None) == error.exit_code
