"""A chat at a terminal: reads lines, shows answers, keeps the conversation. Ctrl-C stops an answer, never the chat."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Protocol

from edge_run.base.config import SamplingConfig
from edge_run.base.errors import ContextFull, EdgeRunError
from edge_run.cli.shared import figures
from edge_run.cli.shared.answer import NOTICE, say_figures, show
from edge_run.cli.shared.terminal import Terminal

if TYPE_CHECKING:
    from edge_run.runtime.generation.model import Model
    from edge_run.runtime.generation.stream import Stream

PROMPT, MORE_PROMPT = "> ", ". "
EXITS = ("/exit", "/quit", "/bye")
HELP = """\
/clear  forget the conversation
/stats  figures since the start
/exit   leave (or Ctrl-D)
A backslash at the end of a line continues it on the next. Ctrl-C stops an answer; what it said stays."""


class Talk(Protocol):
    """A conversation, as the model sees it."""

    hint: str

    def ask(self, text: str) -> Stream:
        """Begin to answer `text`, without keeping it."""
        ...

    def keep(self, text: str, answer: str) -> None:
        """Make `text` and its answer part of the conversation."""
        ...

    def clear(self) -> None:
        """Forget everything but the system prompt."""
        ...


class TemplateTalk:
    """Messages, put into words by the model's chat template."""

    hint = "Write a message; /help says what else."

    def __init__(self, model: Model, system_prompt: str, max_tokens: int | None, sampling: SamplingConfig) -> None:
        self._model, self._max_tokens, self._sampling = model, max_tokens, sampling
        self._system = [{"role": "system", "content": system_prompt}] if system_prompt else []
        self._messages = list(self._system)

    def ask(self, text: str) -> Stream:
        """Begin to answer the message `text`. Raises NotSupported where there is no template."""
        messages = [*self._messages, {"role": "user", "content": text}]
        return self._model.stream_chat(messages, max_tokens=self._max_tokens, sampling=self._sampling)

    def keep(self, text: str, answer: str) -> None:
        """Make both messages part of the conversation."""
        self._messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]

    def clear(self) -> None:
        """Forget all messages but the system's."""
        self._messages = list(self._system)


class PlainTalk:
    """A text that the user and the model write in turn."""

    hint = "This model continues the text that you write; Return alone lets it go on, /help says what else."

    def __init__(self, model: Model, beginning: str, max_tokens: int | None, sampling: SamplingConfig) -> None:
        self._model, self._max_tokens, self._sampling = model, max_tokens, sampling
        self._beginning = self._text = beginning

    def ask(self, text: str) -> Stream:
        """Begin to continue the text so far with `text` after it."""
        return self._model.generate(self._joined(text), max_tokens=self._max_tokens, sampling=self._sampling)

    def keep(self, text: str, answer: str) -> None:
        """Make both part of the text."""
        self._text = self._joined(text) + answer

    def clear(self) -> None:
        """Begin again."""
        self._text = self._beginning

    def _joined(self, text: str) -> str:
        is_apart = not self._text or not text or self._text[-1].isspace() or text[0].isspace()
        return self._text + text if is_apart else f"{self._text} {text}"


class Chat:
    """The loop of a chat. `run` returns when the user leaves."""

    def __init__(self, model: Model, talk: Talk, terminal: Terminal) -> None:
        self._model, self._talk, self._terminal = model, talk, terminal

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
            self._terminal.say("The conversation is empty again.", NOTICE)
        elif command == "/stats":
            self._say_stats()
        elif command.startswith("/") and command[1:].isalpha():
            self._terminal.say(f"{command}: no such command; /help lists them. A space before it makes it text.")
        elif command or isinstance(self._talk, PlainTalk):
            self._answer(text)

    def _say_stats(self) -> None:
        for line in figures.describe_stats(self._model.plan, self._model.stats):
            self._terminal.say(line, NOTICE)

    def _answer(self, text: str) -> None:
        try:
            answer = show(self._talk.ask(text), self._model, self._terminal)
        except ContextFull as error:
            self._terminal.say(f"{error}, or /clear. Your text was not added: the arrow up brings it back.")
            return
        except EdgeRunError as error:
            self._terminal.say(f"{error}. The chat is as it was before.")
            return
        if answer.text:
            self._talk.keep(text, answer.text)
        say_figures(answer, self._terminal, is_chat=True)


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
