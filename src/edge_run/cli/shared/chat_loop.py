"""The loop of a chat: reads lines, obeys commands. At a terminal Ctrl-C stops an answer, else the whole chat."""

from __future__ import annotations

import contextlib
import re
import sys
from abc import ABC, abstractmethod

import click

from edge_run.base.errors import Cancelled, ConfigError, EdgeRunError
from edge_run.base.files.texts import decoded
from edge_run.base.units import format_size
from edge_run.cli.shared.answer import NOTICE
from edge_run.cli.shared.settings import MOST_PROMPT_BYTES
from edge_run.cli.shared.terminal import Terminal

PROMPT, MORE_PROMPT = "> ", ". "
TYPING_HELP = """\
A backslash at the end of a line continues it on the next; pasted lines stay together.
Ctrl-C stops an answer; what it said stays."""
NOT_ADDED = "No answer; your message was not added."
EXITS = ("/exit", "/quit", "/bye")
COMMANDS = frozenset((*EXITS, "/help", "/clear", "/stats", "/undo", "/retry", "/drop", "/save", "/load"))  # of any chat
_COMMAND = re.compile(r"(/[^\W\d_]+)(?:\s+(.*))?", re.DOTALL)


class ChatLoop(ABC):
    """The loop of a chat. `run` returns when the user leaves.

    hint: what is said first. help: what `/help` says. takes_empty: whether an empty line is answered too.
    """

    hint = "Write a message; /help says what else."
    help = ""
    takes_empty = False

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._failures: list[EdgeRunError] = []  # that were said

    @abstractmethod
    def answer(self, text: str) -> None:
        """Answer what the user wrote."""

    @abstractmethod
    def clear(self) -> None:
        """Forget the conversation."""

    @abstractmethod
    def say_stats(self) -> None:
        """Say what the chat took so far, if anything."""

    def say_failed(self, error: EdgeRunError, advice: str) -> None:
        """Say why an answer failed, and what that leaves."""
        self._terminal.say(f"{error}{advice}")
        self._failures.append(error)

    def end_unless_asked(self) -> None:
        """End the chat after Ctrl-C, unless somebody at a terminal may ask on. Raises Cancelled."""
        if not self._terminal.can_ask:
            raise Cancelled("the chat was stopped")

    def command(self, name: str, rest: str) -> bool:
        """Obey a command that not every chat has; return whether there is such a one."""
        return False

    def run(self, first: str | None = None) -> None:
        """Answer `first`, where there is one, then what the user writes, until the user leaves.

        Where nobody could ask again, it then raises click's Exit with the code of the first answer that failed, and
        Cancelled after Ctrl-C.
        """
        self._terminal.say(self.hint, NOTICE)
        is_leaving = False
        while True:
            try:
                text = self._next(first)
                first, is_leaving = None, False
                if text.rstrip() in EXITS:
                    break
                self._handle(text)
            except EOFError:
                self._terminal.say("")
                break
            except KeyboardInterrupt:
                self._terminal.say("")
                self.end_unless_asked()
                if is_leaving:
                    break
                is_leaving = True
                self._terminal.say("Ctrl-C again or Ctrl-D leaves.", NOTICE)
        self.say_stats()
        if self._failures and not self._terminal.can_ask:
            raise click.exceptions.Exit(self._failures[0].exit_code)

    def _next(self, first: str | None) -> str:
        if first is None:
            return read_message(self._terminal)
        self._terminal.say_lines(f"{PROMPT}{first}")
        return first

    def _handle(self, text: str) -> None:
        command = text.rstrip()
        found = _COMMAND.fullmatch(command)
        if found is None or (found[2] and found[1] not in COMMANDS):  # "/etc is a folder"
            if command or self.takes_empty:
                self.answer(text)
        elif command == "/help":
            self._terminal.say_lines(self.help)
        elif command == "/clear":
            self.clear()
            self._terminal.say("The conversation is empty again.", NOTICE)
        elif command == "/stats":
            self.say_stats()
        elif not self.command(found[1], found[2] or ""):
            self._terminal.say(f"{command}: no such command; /help lists them. A space before it makes it text.")


def read_message(terminal: Terminal) -> str:
    """Return what the user writes, several lines where they end in a backslash; that of the last line there is stays.

    Raises EOFError, KeyboardInterrupt, and ConfigError for what no context could hold, or what is not UTF-8.
    """
    text = _read_line(terminal, PROMPT, MOST_PROMPT_BYTES)
    while text.endswith("\\"):
        try:
            line = _read_line(terminal, MORE_PROMPT, MOST_PROMPT_BYTES - len(text.encode("utf-8", "surrogatepass")))
        except EOFError:
            if terminal.can_ask:  # Ctrl-D, which leaves
                raise
            break
        text = f"{text[:-1]}\n{line}"
    return text


def _edit_lines(terminal: Terminal) -> None:
    """Have `input` edit lines where Python can, and take what is pasted as one, its line breaks too."""
    with contextlib.suppress(ImportError):
        import readline  # input() uses it once it is imported

        if terminal.has_codes and "libedit" not in (readline.__doc__ or ""):
            readline.parse_and_bind("set enable-bracketed-paste on")  # off for Python's own prompt, which takes one


def _read_line(terminal: Terminal, prompt: str, most_bytes: int) -> str:
    """Read a line, or several that are pasted, with line editing and history where Python has them.

    The prompt never goes into a file. most_bytes: that it may have where nobody types it.
    """
    if sys.stdin is None:
        raise EOFError
    if terminal.shows_answer and terminal.can_ask:
        _edit_lines(terminal)
        return input(prompt).removesuffix("\n")  # of what is pasted, as of a prompt from a file
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # it is only for who looks
            print(prompt, end="", file=sys.stderr, flush=True)
    data = sys.stdin.buffer.readline(most_bytes + 1)
    if not data:
        raise EOFError
    line = data.removesuffix(b"\n").removesuffix(b"\r")
    if len(line) > most_bytes:
        raise ConfigError(f"message: longer than {format_size(MOST_PROMPT_BYTES)}; shorten it")
    return line.decode(sys.stdin.encoding, "replace") if terminal.can_ask else decoded(line, "message")
