"""The chat at a terminal: what a command that fails leaves."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from edge_run.base.errors import Cancelled, ConfigError, ContextFull, EdgeRunError
from edge_run.cli.shared.chat import Chat


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
    terminal: Any = SimpleNamespace(say=lambda text, *style: said.append(text))
    chat = Chat(model, talk, terminal)  # type: ignore[arg-type]
    chat.answer("my message")
    assert chat.command("/drop", "")
    assert said[-1] == f"/drop: {error}"
    talk.error = None
    chat.command("/drop", "")
    assert talk.asked == ["my message", "my message"], "which is answered when there is room"
