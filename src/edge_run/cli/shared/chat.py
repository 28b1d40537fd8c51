"""A chat at a terminal: reads lines, shows answers, keeps the conversation. Ctrl-C stops an answer, never the chat."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

from edge_run.base.errors import ConfigError, ContextFull, EdgeRunError
from edge_run.base.units import format_count
from edge_run.cli.shared import figures
from edge_run.cli.shared.answer import NOTICE, say_figures, say_notices, show
from edge_run.cli.shared.conversation_book import ConversationBook
from edge_run.cli.shared.talks import PlainTalk, Talk
from edge_run.cli.shared.terminal import Terminal

if TYPE_CHECKING:
    from edge_run.runtime.generation.model import Model
    from edge_run.runtime.keeping.conversations import Conversation

PROMPT, MORE_PROMPT = "> ", ". "
EXITS = ("/exit", "/quit", "/bye")
HELP = """\
/clear  forget the conversation
/drop   leave out the oldest turns of a conversation that is too long; then the message that had no room is answered
/stats  figures since the start
/save NAME, /load NAME  keep the conversation under a name; go on with one that was kept
/exit   leave (or Ctrl-D)
A backslash at the end of a line continues it on the next. Ctrl-C stops an answer; what it said stays."""


class Chat:
    """The loop of a chat. `run` returns when the user leaves.

    book: keeps the conversation as it goes on; None keeps none.
    """

    def __init__(self, model: Model, talk: Talk, terminal: Terminal, book: ConversationBook | None = None) -> None:
        self._model, self._talk, self._terminal, self._book = model, talk, terminal, book
        self._n_notices = len(model.notices)
        self._unanswered: str | None = None  # the last message, where it had no room

    def resume(self, conversation: Conversation) -> None:
        """Go on with a conversation that was kept. Raises ConfigError where it is of another kind."""
        self._talk.resume(conversation.parts)
        if self._book:
            self._book.resume(conversation)
        self._terminal.say(f"Going on with {conversation.name}, {len(conversation.tokens)} tokens.", NOTICE)

    def run(self, first: str | None = None) -> None:
        """Answer `first`, where there is one, then what the user writes, until the user leaves."""
        self._terminal.say(self._talk.hint, NOTICE)
        is_leaving = False
        while True:
            try:
                text = self._next(first)
                first, is_leaving = None, False
                if text.strip() in EXITS:
                    break
                self._handle(text)
            except EOFError:
                self._terminal.say("")
                break
            except KeyboardInterrupt:
                self._terminal.say("")
                if is_leaving:
                    break
                is_leaving = True
                self._terminal.say("Ctrl-C again or Ctrl-D leaves.", NOTICE)
        if self._model.stats.generations:
            self._say_stats()

    def _next(self, first: str | None) -> str:
        if first is None:
            return read_message(self._terminal)
        self._terminal.say_lines(f"{PROMPT}{first}")
        return first

    def _handle(self, text: str) -> None:
        command = text.strip()
        if command == "/help":
            self._terminal.say_lines(HELP)
        elif command == "/clear":
            self._talk.clear()
            self._unanswered = None
            if self._book:
                self._book.begin()
            self._terminal.say("The conversation is empty again.", NOTICE)
        elif command == "/drop":
            self._drop()
        elif command == "/stats":
            self._say_stats()
        elif command.partition(" ")[0] in ("/save", "/load"):
            self._keep_or_load(*command.split(maxsplit=1))
        elif command.startswith("/") and command[1:].isalpha():
            self._terminal.say(f"{command}: no such command; /help lists them. A space before it makes it text.")
        elif command or isinstance(self._talk, PlainTalk):
            self._answer(text)

    def _keep_or_load(self, command: str, name: str = "") -> None:
        try:
            if self._book is None:
                raise ConfigError("nothing is kept of this chat; --prompt-cache on does")
            if command == "/save":
                self._book.name_it(name, self._talk.parts)
                self._terminal.say(f"Kept as {name}.", NOTICE)
            else:
                self.resume(self._book.conversations.load(name))
        except EdgeRunError as error:
            self._terminal.say(f"{command}: {error}")

    def _drop(self) -> None:
        """Leave out the oldest turns; what had no room before is answered then."""
        text, self._unanswered = self._unanswered, None
        n_dropped = self._talk.drop(text)
        if not n_dropped:
            self._terminal.say("/drop: there is no turn that could be left out; /clear begins anew.")
            return
        kept = ""
        if self._book:  # under its own name the conversation stays whole
            kept = f"; {self._book.name} has them all"
            self._book.begin()
        self._terminal.say(f"{format_count(n_dropped, 'message')} left out, the rest is read anew{kept}.", NOTICE)
        if text is not None:
            self._answer(text)

    def _say_stats(self) -> None:
        for line in figures.describe_stats(self._model.plan, self._model.stats):
            self._terminal.say(line, NOTICE)

    def _answer(self, text: str) -> None:
        self._unanswered = None
        try:
            answer = show(self._talk.ask(text), self._model, self._terminal)
        except ContextFull as error:
            self._unanswered = text
            self._terminal.say(
                f"{error}; {self._talk.when_full}. Your text was not added: the arrow up brings it back."
            )
            return
        except EdgeRunError as error:
            self._terminal.say(f"{error}. The chat is as it was before.")
            return
        if answer.text:
            self._talk.keep(text, answer.text)
            self._write_down()
        self._n_notices = say_notices(self._model, self._terminal, self._n_notices)
        say_figures(answer, self._terminal, self._talk.when_full)

    def _write_down(self) -> None:
        """Keep the conversation as it is now; where that fails, say so, and go on."""
        try:
            if self._book:
                self._book.write(self._talk.parts)
        except EdgeRunError as error:
            self._terminal.say(str(error))


def read_message(terminal: Terminal) -> str:
    """Return what the user writes, several lines where they end in a backslash. Raises EOFError, KeyboardInterrupt."""
    lines = [_read_line(terminal, PROMPT)]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(_read_line(terminal, MORE_PROMPT))
    return "\n".join(lines)


def _read_line(terminal: Terminal, prompt: str) -> str:
    """Read a line, with line editing and history where Python has them; the prompt never goes into a file."""
    if terminal.shows_answer:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  input() uses it once it is imported
        return input(prompt)
    print(prompt, end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n")
