"""A chat with a model of this process, which is kept as it goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_run.base.errors import ConfigError, ContextFull, EdgeRunError
from edge_run.base.units import format_count
from edge_run.cli.shared import figures
from edge_run.cli.shared.answer import NOTICE, say_figures, say_notices, show
from edge_run.cli.shared.chat_loop import NOT_ADDED, TYPING_HELP, ChatLoop
from edge_run.cli.shared.conversation_book import ConversationBook
from edge_run.cli.shared.talks import PlainTalk, Talk
from edge_run.cli.shared.terminal import OutputError, Terminal

if TYPE_CHECKING:
    from edge_run.runtime.generation.model import Model
    from edge_run.runtime.keeping.conversations import Conversation

HELP = f"""\
/clear  forget the conversation
/undo   take back the last message and its answer; /retry answers the message anew
/drop   leave out the oldest turns of a conversation that is too long; then the message that had no room is answered
/stats  figures since the start
/save NAME, /load NAME  keep the conversation under a name; go on with one that was kept
/exit   leave (or Ctrl-D)
{TYPING_HELP}"""


class Chat(ChatLoop):
    """The loop of a chat. book: keeps the conversation as it goes on; None keeps none."""

    help = HELP

    def __init__(self, model: Model, talk: Talk, terminal: Terminal, book: ConversationBook | None = None) -> None:
        super().__init__(terminal)
        self._model, self._talk, self._book = model, talk, book
        self._n_notices = len(model.notices)
        self._unanswered: str | None = None  # the last message, where it had no room
        self._is_kept = True  # as far as is known
        self.hint, self.takes_empty = talk.hint, isinstance(talk, PlainTalk)

    def resume(self, conversation: Conversation) -> None:
        """Go on with a conversation that was kept. Raises ConfigError where it is of another kind."""
        self._talk.resume(conversation.parts)
        self._unanswered = None
        self._terminal.say(f"Going on with {conversation.name}, {len(conversation.tokens)} tokens.", NOTICE)
        if self._book:
            self._book.resume(conversation)
            if self._book.name != conversation.name:
                self._terminal.say(
                    f"Another chat went on with {conversation.name}: this one is kept as {self._book.name}."
                )

    def clear(self) -> None:
        """Forget the conversation; what was kept of it stays."""
        self._talk.clear()
        self._unanswered = None
        if self._book:
            self._book.begin()

    def command(self, name: str, rest: str) -> bool:
        """Keep the conversation under a name, go on with one that was kept, or leave out some of its turns."""
        if name in ("/save", "/load"):
            self._keep_or_load(name, rest)
        elif name in ("/undo", "/retry") and not rest:
            self._take_back(name)
        elif name == "/drop" and not rest:
            self._drop()
        else:
            return False
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

    def _take_back(self, command: str) -> None:
        """Take back the last turn; with /retry its message is answered anew, and where that fails the turn stays."""
        turn = self._talk.undo()
        if turn is None:
            self._terminal.say(f"{command}: there is no message of this chat that could be taken back.")
        elif command == "/undo":
            self._unanswered = None
            self._terminal.say("The last message and its answer are taken back.", NOTICE)
            self._write_down()
        else:
            without = self._talk.parts
            try:
                self.answer(turn[0])
            finally:
                if self._talk.parts == without:
                    self._talk.keep(*turn)
                    self._unanswered = None  # which is in the chat
                    self._terminal.say("The answer before stays.", NOTICE)

    def _drop(self) -> None:
        """Leave out the oldest turns; what had no room before is answered then."""
        text = self._unanswered
        try:
            n_dropped = self._talk.drop(text)
        except EdgeRunError as error:
            self._terminal.say(f"/drop: {error}")
            return
        self._unanswered = None
        if not n_dropped:
            self._terminal.say("/drop: there is no turn that could be left out; /clear begins anew.")
            return
        kept = ""
        if self._book:  # under its own name the conversation stays whole
            kept = f"; {self._book.name} has them all"
            self._book.begin()
        self._terminal.say(f"{format_count(n_dropped, 'message')} left out, the rest is read anew{kept}.", NOTICE)
        if text is not None:
            self._failures.pop()  # that of this message, which is no failure if it is answered now
            self.answer(text)

    def answer(self, text: str) -> None:
        """Answer what the user wrote; what fails leaves the conversation as it was."""
        self._unanswered = None
        try:
            answer = show(self._talk.ask(text), self._model, self._terminal)
        except ContextFull as error:
            self._unanswered = text
            self.say_failed(error, f"; {self._talk.when_full}. Your text was not added: the arrow up brings it back.")
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

    def _write_down(self) -> None:
        """Keep the conversation as it is now; where that fails, say so once, and go on."""
        if self._book is None:
            return
        try:
            self._book.write(self._talk.parts)
            self._is_kept = True
        except EdgeRunError as error:
            if self._is_kept:
                self._terminal.say(f"{error}; choose another folder with --prompt-cache, or --prompt-cache off")
            self._is_kept = False
