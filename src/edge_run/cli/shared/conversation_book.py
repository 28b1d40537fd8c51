"""Keeps the conversation of a chat as it goes on, so that another process can go on with it."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edge_run.base.errors import ConfigError, TierReadError
from edge_run.runtime.keeping.conversations import Conversation, Conversations
from edge_run.runtime.keeping.keeper import ConversationRows

if TYPE_CHECKING:
    from edge_run.devices.host.locks import LivingFile
    from edge_run.runtime.generation.model import Model


class ConversationBook:
    """The conversation of one chat, in a file that is written anew after each answer, and by no other chat meanwhile.

    conversations: all that are kept.
    """

    def __init__(self, folder: Path, path: Path, model: Model) -> None:
        """Keep conversations in `folder`; path: of the model. `write` says where nothing can be kept there."""
        self.conversations = Conversations(folder)
        self._path, self._model = str(path.resolve()), model
        self._name = ""
        self._rows = ConversationRows()  # of the conversation, up to its last answer
        self._hold: LivingFile | None = None
        self._take(_new_name())
        model.keep_answers()

    def close(self) -> None:
        """Let other chats go on with the conversation. Idempotent."""
        if self._hold:
            self._hold.remove()

    @property
    def name(self) -> str:
        """What the conversation is kept as."""
        return self._name

    def begin(self) -> None:
        """Another conversation begins; the one so far stays as it is."""
        self._take(_new_name())
        self._rows = ConversationRows()

    def is_of_other_model(self, conversation: Conversation) -> bool:
        """Return whether a conversation was with another model than this one."""
        name = conversation.model
        return name != self._path and os.path.realpath(name) != self._path  # drives may hang: only where they are asked

    def resume(self, conversation: Conversation) -> None:
        """Go on with `conversation`, under a new name where another chat does so too, or did since it was read."""
        try:
            self._take(conversation.name)
            is_as_it_was = self.conversations.load(conversation.name) == conversation
        except (ConfigError, TierReadError):
            is_as_it_was = False
        if not is_as_it_was:
            self._take(_new_name())
        self._rows = ConversationRows() if self.is_of_other_model(conversation) else conversation.rows
        self._model.keep_answers(self._rows)

    def name_it(self, name: str, parts: Sequence[tuple[str, str]]) -> None:
        """Keep what was said under `name` from here on.

        Raises ConfigError for what cannot be a name, or is another conversation's, and TierReadError.
        """
        before = self._name
        if name != before and self.conversations.has(name):
            raise ConfigError(f"{name}: another conversation has this name; give one that edge-run sessions list lacks")
        self._take(name)
        self._save(parts)
        if name != before:
            self.conversations.remove(before)

    def write(self, parts: Sequence[tuple[str, str]]) -> None:
        """Keep what was said so far, after an answer. Raises TierReadError."""
        self._rows = self._model.conversation_rows or ConversationRows()
        self._save(parts)

    def take_back(self, parts: Sequence[tuple[str, str]], tokens: Sequence[int]) -> None:
        """Keep what is left of what was said, which has these tokens, and nothing of the rest. Raises TierReadError."""
        self._rows = self._rows.within(tokens)
        self._save(parts)

    def _save(self, parts: Sequence[tuple[str, str]]) -> None:
        rows = self._rows
        self.conversations.save(Conversation(self._name, self._path, tuple(parts), rows.tokens, rows.passes))

    def _take(self, name: str) -> None:
        """Hold the conversation `name` instead of the one so far. Raises ConfigError where another chat does."""
        if name != self._name:
            try:
                hold = self.conversations.hold(name)
            except TierReadError:  # `write` will say so
                hold = None
            self.close()
            self._name, self._hold = name, hold


def _new_name() -> str:
    return time.strftime("%Y-%m-%d-%H%M%S-") + secrets.token_hex(2)
