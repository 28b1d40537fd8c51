"""The chat at a terminal: what a command is, and what one that fails leaves."""

from __future__ import annotations

import contextlib
import errno
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest

from edge_run.base.errors import Cancelled, ConfigError, ContextFull, EdgeRunError
from edge_run.base.sampling_config import SamplingConfig
from edge_run.cli.commands.chat import _model_names
from edge_run.cli.shared.answer import WrittenAnswer
from edge_run.cli.shared.chat import Chat
from edge_run.cli.shared.chat_loop import ChatLoop
from edge_run.cli.shared.conversation_book import ConversationBook
from edge_run.cli.shared.server_chat import ServerTalk
from edge_run.cli.shared.talks import PlainTalk, TemplateTalk
from edge_run.cli.shared.terminal import OutputError
from edge_run.runtime.keeping import conversations
from edge_run.runtime.keeping.conversations import Conversation, Conversations
from quiet_terminal import piped, quiet_terminal


class FullTalk:
    """A talk whose context is full; dropping turns of it fails at first."""

    hint, when_full = "Write.", "/drop"

    def __init__(self, error: EdgeRunError) -> None:
        self.error: EdgeRunError | None = error
        self.asked: list[str] = []

    def ask(self, text: str) -> Iterator[Any]:
        self.asked.append(text)
        raise ContextFull("the context is full", prompt_tokens=9, context_tokens=8)

    def drop(self, text: str | None) -> int:
        if self.error:
            raise self.error
        return 2


@pytest.mark.parametrize("error", [ConfigError("the template refuses these messages"), Cancelled("stopped")])
def test_turns_that_cannot_be_dropped_leave_the_chat_and_the_message(error: EdgeRunError) -> None:
    said, model, talk = list[str](), SimpleNamespace(notices=()), FullTalk(error)
    terminal: Any = SimpleNamespace(say=lambda text, *style: said.append(text), can_ask=True)
    chat = Chat(model, talk, terminal)  # type: ignore[arg-type]
    chat.answer("my message")
    assert chat.command("/drop", "")
    assert said[-1] == f"/drop: {error}"
    talk.error = None
    chat.command("/drop", "")
    assert talk.asked == ["my message", "my message"], "which is answered when there is room"


class Notes(ChatLoop):
    """A chat that notes what it is asked for, and fails where it has an error."""

    def __init__(self, terminal: Any, error: EdgeRunError | None = None) -> None:
        super().__init__(terminal, ServerTalk(""))
        self.error = error
        self.noted: list[str] = []

    def answer(self, text: str) -> None:
        self.noted.append(text)
        if self.error:
            self.say_failed(self.error, ".")

    def clear(self) -> None:
        self.noted.append("cleared")

    def say_stats(self) -> None:
        pass


@pytest.mark.parametrize(
    ("line", "noted"),
    [
        ("/clear", ["cleared"]),
        ("/clear  ", ["cleared"]),
        (" /clear", [" /clear"]),
        ("/clear now", []),
        ("/claer", []),
        ("/save fox", []),
        ("/etc is a folder", ["/etc is a folder"]),
        ("/etc\\\nis a folder", ["/etc\nis a folder"]),
        ("/help me", []),
        ("/exit", []),
        (" /exit", [" /exit"]),
        ("/usr/bin is what?", ["/usr/bin is what?"]),
        ("/", ["/"]),
        (" ", []),
    ],
)
def test_a_command_is_alone_or_has_its_words_and_all_else_is_text(
    monkeypatch: pytest.MonkeyPatch, line: str, noted: list[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", piped(f"{line}\n"))
    loop = Notes(quiet_terminal())
    loop.run()
    assert loop.noted == noted


@pytest.mark.parametrize("can_ask", [False, True])
def test_where_nobody_can_ask_again_the_chat_ends_with_the_first_error(
    monkeypatch: pytest.MonkeyPatch, can_ask: bool
) -> None:
    monkeypatch.setattr(sys, "stdin", piped("one\ntwo\n"))
    first = ConfigError("the first")
    loop = Notes(quiet_terminal(can_ask=can_ask), first)
    if can_ask:
        loop.run()
    else:
        with pytest.raises(click.exceptions.Exit) as raised:  # the error itself would be said a second time
            loop.run()
        assert raised.value.exit_code == first.exit_code
    assert loop.noted == ["one", "two"]


@pytest.mark.parametrize(("error", "code"), [(None, 0), (ContextFull("the context is full"), 8)])
def test_a_message_that_is_answered_after_all_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, error: EdgeRunError | None, code: int
) -> None:
    class Talk(FullTalk):
        def ask(self, text: str) -> Iterator[Any]:
            if not self.asked or error:
                return super().ask(text)
            return iter(())

    talk: Any = Talk(ConfigError(""))
    talk.error = None
    answer = WrittenAnswer("", SimpleNamespace(finish_reason="stop"))  # type: ignore[arg-type]
    monkeypatch.setattr(sys, "stdin", piped("one\n/drop\n"))
    monkeypatch.setattr("edge_run.cli.shared.chat.show", lambda *_: answer)
    monkeypatch.setattr("edge_run.cli.shared.chat.say_notices", lambda *_: 0)
    monkeypatch.setattr("edge_run.cli.shared.chat.say_figures", lambda *_: None)
    model: Any = SimpleNamespace(notices=(), stats=SimpleNamespace(generations=0))
    chat = Chat(model, talk, quiet_terminal(can_ask=False))
    with pytest.raises(click.exceptions.Exit) if code else contextlib.nullcontext() as raised:
        chat.run()
    assert raised is None or raised.value.exit_code == code


@pytest.mark.parametrize("text", ["Once", ""])
def test_ctrl_c_ends_a_chat_that_nobody_writes(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    asked: list[str] = []
    talk: Any = SimpleNamespace(asked=asked, ask=asked.append, keep=lambda *_: None)
    talk.hint, talk.when_full = "Write.", "/drop"
    monkeypatch.setattr(sys, "stdin", piped("one\ntwo\n"))
    monkeypatch.setattr("edge_run.cli.shared.chat.show", lambda *_: WrittenAnswer(text, None))
    monkeypatch.setattr("edge_run.cli.shared.chat.say_notices", lambda *_: 0)
    model: Any = SimpleNamespace(notices=(), stats=SimpleNamespace(generations=0))
    with pytest.raises(Cancelled):
        Chat(model, talk, quiet_terminal(can_ask=False)).run()
    assert talk.asked == ["one"]
    monkeypatch.setattr(sys, "stdin", piped("one\ntwo\n"))
    Chat(model, talk, quiet_terminal()).run()
    assert talk.asked == ["one", "one", "two"]


def test_ctrl_c_while_a_pipe_says_nothing_ends_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    def readline(*given: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=SimpleNamespace(readline=readline)))
    with pytest.raises(Cancelled):
        Notes(quiet_terminal(can_ask=False)).run()


@pytest.mark.parametrize(
    ("text", "noted", "is_refused"),
    [
        ("12345678\nb\n", ["12345678", "b"], False),
        ("12345678", ["12345678"], False),
        ("a\n123456789\n", ["a"], True),
        ("1234\\\n123\n", ["1234\n123"], False),
        ("1234\\\n1234\n", [], True),
        ("1234\r\nb\r\n", ["1234", "b"], False),
        ("C:\\", ["C:\\"], False),
        ("a\\\nC:\\\n", ["a\nC:\\"], False),
        ("\u20ac\u20ac", ["\u20ac\u20ac"], False),
        ("\u20ac\u20ac\u20ac", [], True),
    ],
)
def test_a_message_from_a_pipe_has_an_end(
    text: str, noted: list[str], is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_run.cli.shared.chat_loop.MOST_PROMPT_BYTES", 8)
    monkeypatch.setattr(sys, "stdin", piped(text))
    loop = Notes(quiet_terminal(can_ask=False))
    with pytest.raises(ConfigError, match="message: longer than 8 B") if is_refused else contextlib.nullcontext():
        loop.run()
    assert loop.noted == noted


def test_a_backslash_before_ctrl_d_is_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", piped("never mind \\\n"))
    loop = Notes(quiet_terminal())
    loop.run()
    assert loop.noted == []


def test_messages_from_a_pipe_are_utf_8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", piped(b"one\ncaf\xe9\n"))
    loop = Notes(quiet_terminal(can_ask=False))
    with pytest.raises(ConfigError, match="message: not UTF-8 text") as raised:
        loop.run()
    assert (loop.noted, raised.value.exit_code) == (["one"], 2)


def test_a_chat_without_standard_input_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    loop = Notes(quiet_terminal())
    loop.run("one")
    assert loop.noted == ["one"]


def test_an_answer_that_cannot_be_written_ends_the_chat() -> None:
    class Lost(FullTalk):
        def ask(self, text: str) -> Iterator[Any]:
            raise OutputError("standard output: cannot be written")

    chat = Chat(SimpleNamespace(notices=()), Lost(ConfigError("")), quiet_terminal())  # type: ignore[arg-type]
    with pytest.raises(OutputError):
        chat.answer("my message")


def test_a_conversation_that_goes_on_has_its_own_system_prompt_and_no_message_from_before() -> None:
    model: Any = SimpleNamespace(notices=())
    talk = TemplateTalk(model, "Be brief.", None, SamplingConfig())
    parts = (("system", "Be kind."), ("user", "Hello"), ("assistant", "Yes?"))
    talk.resume(parts)
    assert talk.parts == parts
    talk.clear()
    assert list(talk.parts) == [parts[0]]

    full: Any = FullTalk(ConfigError(""))
    full.resume = lambda parts: None
    chat = Chat(model, full, quiet_terminal())
    chat.answer("has no room")
    chat.resume(Conversation("other", "model.gguf", parts))
    full.error = None
    chat.command("/drop", "")
    assert full.asked == ["has no room"]


@pytest.mark.parametrize("kind", [TemplateTalk, PlainTalk])
def test_the_last_turn_is_taken_back_or_answered_anew(
    kind: type[TemplateTalk] | type[PlainTalk], monkeypatch: pytest.MonkeyPatch
) -> None:
    said, terminal, asked = list[str](), quiet_terminal(), list[str]()
    terminal.say = lambda text, *style: said.append(text)
    model: Any = SimpleNamespace(notices=(), stats=SimpleNamespace(generations=0))
    talk = kind(model, "Be kind.", None, SamplingConfig())
    answers = iter((" Yes?", " No.", " Well.", ""))
    monkeypatch.setattr(talk, "ask", asked.append)
    monkeypatch.setattr("edge_run.cli.shared.chat.show", lambda *_: WrittenAnswer(next(answers), None))
    monkeypatch.setattr("edge_run.cli.shared.chat.say_notices", lambda *_: 0)
    monkeypatch.setattr(sys, "stdin", piped("/undo\none\ntwo\n/retry\n/retry\n/undo now\n"))
    chat = Chat(model, talk, terminal)
    chat.run()
    assert asked == ["one", "two", "two", "two"]
    words = [word for _, text in talk.parts for word in text.split()]
    assert words == ["Be", "kind.", "one", "Yes?", "two", "Well."], "an answer that says nothing takes no other's place"
    assert said.count("The answer before stays.") == 1
    monkeypatch.setattr(sys, "stdin", piped("/undo\n/undo\n/undo\n"))
    chat.run()
    assert [text for _, text in talk.parts] == ["Be kind."]
    refusals = [text for text in said if text.endswith("no message of this chat that could be taken back.")]
    assert len(refusals) == 2


@pytest.mark.parametrize(("has_template", "how"), [(True, "-cnv"), (False, "the --chat-template that it had")])
def test_a_chat_goes_on_as_a_chat_with_its_template_where_the_model_has_none(has_template: bool, how: str) -> None:
    model: Any = SimpleNamespace(has_chat_template=has_template)
    talk = PlainTalk(model, "", None, SamplingConfig())
    with pytest.raises(ConfigError, match=f"go on with it with {how}$"):
        talk.resume((("user", "Hello"), ("assistant", "Yes?")))


@pytest.mark.parametrize("command", ["/save", "/load"])
def test_a_chat_that_is_not_kept_says_why(command: str) -> None:
    said, terminal = list[str](), quiet_terminal()
    terminal.say = lambda text, *style: said.append(text)
    chat = Chat(SimpleNamespace(notices=()), FullTalk(ConfigError("")), terminal)  # type: ignore[arg-type]
    chat.command(command, "fox")
    assert said == [f"{command}: nothing is kept of this chat, as of any over a mesh or with --prompt-cache off"]


@pytest.mark.parametrize("added", [(), (("user", "Bye"), ("assistant", "Bye"))])
def test_what_another_chat_added_since_a_conversation_was_read_stays(
    added: tuple[tuple[str, str], ...], tmp_path: Path
) -> None:
    model: Any = SimpleNamespace(keep_answers=lambda *_: None, conversation_rows=None)
    first = (("user", "Hello"), ("assistant", "Yes?"))
    other = ConversationBook(tmp_path, tmp_path / "model.gguf", model)
    other.name_it("fox", first)
    read = other.conversations.load("fox")
    other.write((*first, *added))
    other.close()
    with contextlib.closing(ConversationBook(tmp_path, tmp_path / "model.gguf", model)) as book:
        book.resume(read)
        assert (book.name == "fox") is not bool(added)
        assert tuple(book.conversations.load("fox").parts) == (*first, *added)


def test_a_folder_that_cannot_be_written_is_said_once_and_read_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: object, **options: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    fox = (("user", "Hello"), ("assistant", "Yes?"))
    Conversations(tmp_path).save(Conversation("fox", str(tmp_path / "model.gguf"), fox))
    monkeypatch.setattr(conversations, "LivingFile", refuse)
    monkeypatch.setattr(conversations, "whole_file", refuse)
    model: Any = SimpleNamespace(notices=(), keep_answers=lambda *_: None, conversation_rows=None)
    talk, said, terminal = TemplateTalk(model, "", None, SamplingConfig()), list[str](), quiet_terminal()
    terminal.say = lambda text, *style: said.append(text)
    chat = Chat(model, talk, terminal, ConversationBook(tmp_path, tmp_path / "model.gguf", model))
    chat.command("/load", "fox")
    assert said.pop() == "Going on with fox, 0 tokens."
    assert tuple(talk.parts) == fox
    for _ in range(2):
        chat._write_down()
    (told,) = said
    assert "cannot be kept (Permission denied); choose another folder with --prompt-cache" in told
    chat.command("/save", "wolf")
    assert "/save: " in said[-1]


def test_a_folder_that_cannot_be_looked_into_ends_no_chat(tmp_path: Path) -> None:
    """Its path is too long here; a drive that fails, or refuses, answers alike."""
    folder, said, terminal = tmp_path / ("x" * 300), list[str](), quiet_terminal()
    terminal.say = lambda text, *style: said.append(text)
    model: Any = SimpleNamespace(notices=(), keep_answers=lambda *_: None, conversation_rows=None)
    talk = TemplateTalk(model, "", None, SamplingConfig())
    chat = Chat(model, talk, terminal, ConversationBook(folder, tmp_path / "model.gguf", model))
    for command in ("/load", "/save"):
        chat.command(command, "fox")
        assert said[-1].startswith(f"{command}: {folder}")
        assert said[-1].endswith("fox.json: cannot be read (File name too long)")


@pytest.mark.parametrize(
    "odd", [None, [], "text", {}, {"data": None}, {"data": "text"}, {"data": ["text", None]}, {"data": [{"id": 5}]}]
)
def test_a_list_of_models_that_is_none_names_none(odd: object) -> None:
    assert _model_names(odd) == []
    assert _model_names({"data": [{"id": "a"}, odd, {"id": "b"}]}) == ["a", "b"]
    loaded = {"id": "b", "status": {"value": "loaded"}}
    assert _model_names({"data": [{"id": "a", "status": {"value": "unloaded"}}, loaded]}) == ["b", "a"]
