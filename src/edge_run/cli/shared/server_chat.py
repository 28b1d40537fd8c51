"""A chat with a model that a server has: nothing is opened here."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from edge_run.base.errors import ContextFull, EdgeRunError
from edge_run.base.units import format_count
from edge_run.cli.shared.answer import NOTICE, MarkedThoughts
from edge_run.cli.shared.chat_loop import NOT_ADDED, TURNS_HELP, TYPING_HELP, ChatLoop
from edge_run.cli.shared.talks import MessageTalk
from edge_run.cli.shared.terminal import OutputError, Terminal

if TYPE_CHECKING:
    from edge_run.runtime.client.answer_event import AnswerEvent
    from edge_run.runtime.client.connection import ServerClient
    from edge_run.runtime.generation.request import Message

PATH = "/v1/chat/completions"
HELP = f"""\
{TURNS_HELP}
{TYPING_HELP}"""


class ServerTalk(MessageTalk):
    """Messages, of which only the server knows how many tokens they are."""

    def without_oldest(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return a conversation less so many of its oldest turns that half of its letters are left, or fewer.

        What the system says stays, and does not count.
        """
        from edge_run.runtime.generation.chat import without_oldest

        return without_oldest(messages, _letters(messages), _letters)


class ServerChat(ChatLoop):
    """The loop of a chat. settings: what each request says besides the messages."""

    help = HELP

    def __init__(self, client: ServerClient, settings: Mapping[str, Any], system: str, terminal: Terminal) -> None:
        self._talk = ServerTalk(system)
        super().__init__(terminal, self._talk)
        self._client, self._settings = client, settings
        self._n_answers = self._n_tokens = 0

    def command(self, name: str, rest: str) -> bool:
        """Obey what chats have in common; say of what keeps conversations that nothing is kept."""
        if name not in ("/save", "/load"):
            return super().command(name, rest)
        self._terminal.say(f"{name}: nothing is kept of a chat with a server")
        return True

    def say_stats(self) -> None:
        """Say how much was answered."""
        if self._n_answers:
            answers, tokens = format_count(self._n_answers, "answer"), format_count(self._n_tokens, "token")
            self._terminal.say(f"{answers} of {tokens} together", NOTICE)

    def answer(self, text: str, *, keeps_part: bool = True) -> None:
        """Answer what the user wrote. Where the server fails, what it said by then stays, if it said anything."""
        self._unanswered = None
        messages = self._talk.with_message(text)
        body = {**self._settings, "messages": messages, "stream_options": {"include_usage": True}}
        answer, is_whole, has_failed = _Answer(), False, False
        began_s = time.monotonic()
        try:
            with contextlib.closing(self._client.answer(PATH, body)) as events:
                for piece in answer.pieces(events):
                    self._terminal.write_answer(piece)
        except KeyboardInterrupt:
            self._terminal.end_line()
            self._terminal.say("Stopped.", NOTICE)
            self.end_unless_asked()
        except OutputError:
            raise
        except EdgeRunError as error:
            self._terminal.end_line()
            if isinstance(error, ContextFull) and not answer.text:
                self.say_no_room(text, error)
            else:
                if not keeps_part:
                    answer.text = ""
                self.say_failed(error, ". What was said stays." if answer.text else ". The chat is as it was before.")
            has_failed = True
        else:
            is_whole = answer.finish != "length"
            self._terminal.end_line()
            self._say_figures(answer, time.monotonic() - began_s)
        if answer.text or (answer.has_thoughts and is_whole):  # a thought that was cut off is no answer
            self._talk.keep(text, answer.text)
        elif not has_failed:
            self._terminal.say(NOT_ADDED)

    def _say_figures(self, answer: _Answer, took_s: float) -> None:
        if answer.finish == "length":
            self._terminal.say("It reached the most tokens it may have.", NOTICE)
        n_tokens = answer.n_tokens
        self._n_answers, self._n_tokens = self._n_answers + 1, self._n_tokens + n_tokens
        speed = answer.tokens_per_s or n_tokens / max(took_s, 1e-9)
        self._terminal.say(f"{format_count(n_tokens, 'token')}, {speed:.1f} tokens/s", NOTICE)


def _letters(messages: Sequence[Message]) -> int:
    return sum(len(message["content"]) for message in messages if message["role"] != "system")


class _Answer:
    """What came of one answer so far. text: what it says. has_thoughts: whether the model thought before it."""

    def __init__(self) -> None:
        self.text = self.finish = ""
        self.n_tokens, self.tokens_per_s = 0, 0.0
        self.has_thoughts = False
        self._marks = MarkedThoughts()

    def pieces(self, events: Iterator[AnswerEvent]) -> Iterator[str]:
        """Yield what to show of each event, and note the rest."""
        for event in events:
            self.n_tokens = event.completion_tokens or self.n_tokens
            self.tokens_per_s = event.tokens_per_s or self.tokens_per_s
            self.finish = event.finish or self.finish
            self.text += event.text
            self.has_thoughts = self.has_thoughts or bool(event.reasoning)
            yield self._marks.shown(event.reasoning, event.text)
