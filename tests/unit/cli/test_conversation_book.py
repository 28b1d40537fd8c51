"""What is in the file of a conversation: what was said, and tokens of nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from edge_run.base.errors import ModelFileError
from edge_run.base.sampling_config import SamplingConfig
from edge_run.cli.shared.answer import WrittenAnswer
from edge_run.cli.shared.chat import Chat
from edge_run.cli.shared.conversation_book import ConversationBook
from edge_run.cli.shared.talks import PlainTalk, TemplateTalk
from edge_run.runtime.keeping.conversations import Conversation, Conversations
from edge_run.runtime.keeping.keeper import ConversationRows
from edge_run.tiers.kv.record import RowPass, reading
from quiet_terminal import quiet_terminal

THOUGHT = "Hm."


class LettersModel:
    """A model whose tokens are letters, and which keeps in its context what it was asked last, and its answer."""

    notices = ()
    has_chat_template = True

    def __init__(self) -> None:
        self.conversation_rows: ConversationRows | None = ConversationRows()
        self.expected = list[ConversationRows | None]()

    def keep_answers(self, rows: ConversationRows | None = None) -> None:
        self.expected.append(rows)

    def chat_prompt(self, messages: Sequence[dict[str, str]]) -> str:
        return "".join(f"<{one['role']}>{one['content']}" for one in messages) + "<assistant>"

    def prompt_tokens(self, text: str) -> list[int]:
        return list(text.encode())

    def stream_chat(self, messages: Sequence[dict[str, str]], **options: object) -> str:
        return self._answered(self.chat_prompt(messages))

    def generate(self, text: str, **options: object) -> str:
        return self._answered(text)

    def _answered(self, prompt: str) -> str:
        tokens = self.prompt_tokens(f"{prompt}{THOUGHT}Yes.")
        self.conversation_rows = ConversationRows(tokens, reading(len(tokens), 16))
        return "Yes."


class KeptChat:
    """A chat whose conversation is kept in a folder."""

    def __init__(self, folder: Path, book: ConversationBook, model: LettersModel, chat: Chat, said: list[str]) -> None:
        self.folder, self.book, self.model, self.chat, self.said = folder, book, model, chat, said

    @property
    def kept(self) -> Conversation:
        return Conversations(self.folder).load(self.book.name)


@pytest.fixture(params=[TemplateTalk, PlainTalk])
def kept(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KeptChat]:
    monkeypatch.setattr("edge_run.cli.shared.chat.show", lambda answer, *_: WrittenAnswer(answer, None))
    monkeypatch.setattr("edge_run.cli.shared.chat.say_notices", lambda *_: 0)
    said, terminal, model = list[str](), quiet_terminal(), LettersModel()
    terminal.say = lambda text, *style: said.append(text)
    any_model: Any = model
    talk = request.param(any_model, "", None, SamplingConfig())
    with contextlib.closing(ConversationBook(tmp_path, tmp_path / "model.gguf", any_model)) as book:
        yield KeptChat(tmp_path, book, model, Chat(any_model, talk, terminal, book), said)


def letters(conversation: Conversation) -> str:
    return bytes(conversation.tokens).decode()


def test_what_is_taken_back_is_in_no_file(kept: KeptChat) -> None:
    for text in ("one", "two", "three"):
        kept.chat.answer(text)
    assert "three" in letters(kept.kept)
    kept.chat.command("/undo", "")
    rows = kept.kept
    assert "three" not in letters(rows)
    assert "two" in letters(rows), "what is left is not read anew"
    assert rows.passes
    assert rows.passes[-1].start < len(rows.tokens) <= sum(rows.passes[-1])
    kept.chat.command("/undo", "")
    kept.chat.command("/undo", "")
    assert not [word for word in ("one", "two", THOUGHT) if word in letters(kept.kept)]
    kept.chat.answer("four")
    assert "four" in letters(kept.kept)


def test_where_nothing_can_be_rendered_no_token_stays(kept: KeptChat, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object) -> str:
        raise ModelFileError("the template fails")

    kept.chat.answer("one")
    monkeypatch.setattr(kept.model, "chat_prompt", refuse)
    monkeypatch.setattr(kept.model, "prompt_tokens", refuse)
    kept.chat.command("/undo", "")
    assert not kept.kept.tokens
    assert not kept.kept.passes


@pytest.mark.parametrize("command", ["/clear", "/load"])
def test_a_name_is_given_to_a_conversation_and_not_to_the_one_before(kept: KeptChat, command: str) -> None:
    parts = (("text", "fox"),) if isinstance(kept.chat._talk, PlainTalk) else (("user", "fox"), ("assistant", "Yes."))
    fox = Conversation("fox", str(kept.folder / "model.gguf"), parts, (1, 2, 3), [RowPass(0, 3)])
    kept.book.conversations.save(fox)
    kept.chat.answer("one")
    if command == "/clear":
        kept.chat.clear()
    else:
        kept.chat.command("/load", "fox")
    kept.chat.command("/save", "wolf")
    assert tuple(kept.kept.tokens) == (() if command == "/clear" else fox.tokens)
    assert "anew" not in " ".join(kept.said)


def test_a_conversation_of_another_model_is_read_anew_and_said_to_be(kept: KeptChat) -> None:
    parts = (("text", "fox"),) if isinstance(kept.chat._talk, PlainTalk) else (("user", "fox"), ("assistant", "Yes."))
    kept.book.conversations.save(Conversation("fox", "/other.gguf", parts, (1, 2, 300), [RowPass(0, 3)]))
    kept.chat.command("/load", "fox")
    assert kept.said[1:] == ["It was with /other.gguf: this model reads it anew, and has it from now on."]
    assert kept.model.expected[-1] == ConversationRows()
    kept.chat.command("/save", "fox")
    assert (kept.kept.model, kept.kept.tokens) == (str(kept.folder / "model.gguf"), ())


def test_a_conversation_of_this_model_under_another_name_is_this_model_s(kept: KeptChat) -> None:
    (kept.folder / "link.gguf").symlink_to(kept.folder / "model.gguf")
    assert not kept.book.is_of_other_model(Conversation("fox", str(kept.folder / "link.gguf"), (), (), ()))
    assert kept.book.is_of_other_model(Conversation("fox", str(kept.folder / "other.gguf"), (), (), ()))


@pytest.mark.parametrize(
    ("tokens", "wanted", "passes"),
    [
        ([1, 2, 3, 4, 5, 6], 6, [RowPass(0, 4), RowPass(4, 2)]),
        ([1, 2, 3, 4, 5, 6, 7], 6, [RowPass(0, 4), RowPass(4, 2)]),
        ([1, 2, 3, 4, 9], 4, [RowPass(0, 4)]),
        ([1, 2, 9, 4, 5, 6], 2, [RowPass(0, 4)]),
        ([9], 0, []),
        ([], 0, []),
    ],
)
def test_rows_within_a_text(tokens: list[int], wanted: int, passes: list[RowPass]) -> None:
    whole = [1, 2, 3, 4, 5, 6]
    for given in (None, [RowPass(0, 4), RowPass(4, 2)]):
        found = ConversationRows(whole, given).within(tokens)
        assert found == ConversationRows(whole[:wanted], None if given is None else passes)
