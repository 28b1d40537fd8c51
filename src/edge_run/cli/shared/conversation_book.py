"""Keeps the conversation of a chat as it goes on, so that another process can go on with it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edge_run.runtime.keeping.conversations import Conversation, Conversations

if TYPE_CHECKING:
    from edge_run.runtime.generation.model import Model


class ConversationBook:
    """The conversation of one chat, in a file that is written anew after each answer.

    conversations: all that are kept.
    """

    def __init__(self, folder: Path, path: Path, model: Model) -> None:
        """Keep conversations in `folder`; path: of the model."""
        self.conversations = Conversations(folder)
        self._path, self._model = path, model
        self._name = _new_name()
        model.keep_answers()

    @property
    def name(self) -> str:
        """What the conversation is kept as."""
        return self._name

    def begin(self) -> None:
        """Another conversation begins; the one so far stays as it is."""
        self._name = _new_name()

    def resume(self, conversation: Conversation) -> None:
        """Go on with `conversation`, under its name."""
        self._name = conversation.name
        self._model.keep_answers(conversation.rows)

    def name_it(self, name: str, parts: Sequence[tuple[str, str]]) -> None:
        """Keep what was said under `name` from here on. Raises ConfigError for what cannot be a name, TierReadError."""
        before = self._name
        self._write(name, parts)
        if before != name:
            self.conversations.remove(before)
        self._name = name

    def write(self, parts: Sequence[tuple[str, str]]) -> None:
        """Keep what was said so far. Raises TierReadError."""
        self._write(self._name, parts)

    def _write(self, name: str, parts: Sequence[tuple[str, str]]) -> None:
        rows = self._model.conversation_rows
        tokens, passes = (rows.tokens, rows.passes) if rows else ((), None)
        self.conversations.save(Conversation(name, str(self._path.resolve()), tuple(parts), tokens, passes))


def _new_name() -> str:
    return time.strftime("%Y-%m-%d-%H%M%S-") + secrets.token_hex(2)
