"""A chat with a model of this process, which is kept as it goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from edge_run.base.errors import ConfigError, ContextFull, EdgeRunError
from edge_run.cli.shared import figures
from edge_run.cli.shared.answer import NOTICE, say_figures, say_notices, show
from edge_run.cli.shared.chat_loop import NOT_ADDED, TURNS_HELP, TYPING_HELP, ChatLoop
from edge_run.cli.shared.conversation_book import ConversationBook
from edge_run.cli.shared.talks import PlainTalk, Talk
from edge_run.cli.shared.terminal import OutputError, Terminal

if TYPE_CHECKING:
    from edge_run.runtime.generation.model import Model
    from edge_run.runtime.keeping.conversations import Conversation

HELP = f"""\
{TURNS_HELP}
/save NAME, /load NAME  keep the conversation under a name; go on with one that was kept
{TYPING_HELP}"""


class Chat(ChatLoop):
    """The loop of a chat. book: keeps the conversation as it goes on; None keeps none."""

    help = HELP

    def __init__(self, model: Model, talk: Talk, terminal: Terminal, book: ConversationBook | None = None) -> None:
        super().__init__(terminal, talk)
        self._model, self._talk, self._book = model, talk, book
        self._n_notices = len(model.notices)
        self._is_kept = True  # as far as is known
        self.hint, self.takes_empty = talk.hint, isinstance(talk, PlainTalk)

    def resume(self, conversation: Conversation) -> None:
        """Go on with a conversation that was kept. Raises ConfigError where it is of another kind."""
        self._talk.resume(conversation.parts)
        self._unanswered = None
        self._terminal.say(f"Going on with {conversation.name}, {len(conversation.tokens)} tokens.", NOTICE)
        if self._book:
            if self._book.is_of_other_model(conversation):
                self._terminal.say(
                    f"It was with {conversation.model}: this model reads it anew, and has it from now on."
                )
            self._book.resume(conversation)
            if self._book.name != conversation.name:
                self._terminal.say(
                    f"Another chat went on with {conversation.name}: this one is kept as {self._book.name}."
                )

    def clear(self) -> None:
        """Forget the conversation; what was kept of it stays."""
        super().clear()
        if self._book:
            self._book.begin()

    def note_taken_back(self) -> str:
        """Keep the conversation without what was taken back."""
        if self._book:
            try:
                tokens = self._talk.tokens()
            except EdgeRunError:  # there is nothing left that the model would read, or it would not
                tokens = []
            self._write_down(tokens)
        return ""

    def note_dropped(self) -> str:
        """Keep what follows under another name: under its own the conversation stays whole."""
        if not self._book:
            return ""
        name = self._book.name
        self._book.begin()
        return f"; {name} has them all"

    def command(self, name: str, rest: str) -> bool:
        """Obey also what keeps the conversation under a name, or goes on with one that was kept."""
        if name not in ("/save", "/load"):
            return super().command(name, rest)
        self._keep_or_load(name, rest)
        return True

    def say_stats(self) -> None:
        """Say what the model did since it was opened."""
        if self._model.stats.generations:
            for line in figures.describe_stats(self._model.plan, self._model.stats):
                self._terminal.say(line, NOTICE)

    def _keep_or_load(self, command: str, name: str) -> None:
        try:
            if self._book is None:
                raise ConfigError("nothing is kept of this chat, as of any over a mesh or with --prompt-cache off")
            if command == "/save":
                self._book.name_it(name, self._talk.parts)
                self._terminal.say(f"Kept as {name}.", NOTICE)
            else:
                self.resume(self._book.conversations.load(name))
        except EdgeRunError as error:
            self._terminal.say(f"{command}: {error}")

    def answer(self, text: str, *, keeps_part: bool = True) -> None:
        """Answer what the user wrote; what fails leaves the conversation as it was, whatever `keeps_part` says."""
        self._unanswered = None
        try:
            answer = show(self._talk.ask(text), self._model, self._terminal)
        except ContextFull as error:
            self.say_no_room(text, error)
            return
        except OutputError:
            raise
        except EdgeRunError as error:
            self.say_failed(error, ". The chat is as it was before.")
            return
        if answer.goes_on:
            self._talk.keep(text, answer.text)
            self._write_down()
        self._n_notices = say_notices(self._model, self._terminal, self._n_notices)
        say_figures(answer, self._terminal, self._talk.when_full)
        if not answer.goes_on:
            self._terminal.say(NOT_ADDED)
        if answer.is_stopped:
            self.end_unless_asked()

    def _write_down(self, left: Sequence[int] | None = None) -> None:
        """Keep the conversation as it is now; where that fails, say so once, and go on.

        left: the tokens of what is left of it, where something was taken back.
        """
        if self._book is None:
            return
        try:
            if left is None:
                self._book.write(self._talk.parts)
            else:
                self._book.take_back(self._talk.parts, left)
            self._is_kept = True
        except EdgeRunError as error:
            if self._is_kept:
                self._terminal.say(f"{error}; choose another folder with --prompt-cache, or --prompt-cache off")
            self._is_kept = False
