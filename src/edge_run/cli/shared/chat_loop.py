"""The loop of a chat: reads lines, obeys commands. At a terminal Ctrl-C stops an answer, else the whole chat."""

from __future__ import annotations

import contextlib
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import click

from edge_run.base.errors import Cancelled, ConfigError, EdgeRunError
from edge_run.base.files.texts import decoded
from edge_run.base.units import format_count, format_size
from edge_run.cli.shared.answer import NOTICE
from edge_run.cli.shared.settings import MOST_PROMPT_BYTES
from edge_run.cli.shared.terminal import Terminal

PROMPT, MORE_PROMPT = "> ", ". "
TURNS_HELP = """\
/clear  forget the conversation
/undo   take back the last message and its answer; /retry answers the message anew
/drop   leave out the oldest turns of a conversation that is too long; then the message that had no room is answered
/stats  figures since the start"""
TYPING_HELP = """\
/exit   leave (or Ctrl-D)
A backslash at the end of a line continues it on the next; pasted lines stay together.
Ctrl-C stops an answer; what it said stays."""
NOT_ADDED = "No answer; your message was not added."
EXITS = ("/exit", "/quit", "/bye")
COMMANDS = frozenset((*EXITS, "/help", "/clear", "/stats", "/undo", "/retry", "/drop", "/save", "/load"))  # of any chat
_COMMAND = re.compile(r"(/[^\W\d_]+)(?:\s+(.*))?", re.DOTALL)


class ChatTurns(Protocol):
    """What was said in a chat, turn by turn: a message of the user, and its answer."""

    when_full: str  # what the user can do where it has no room

    @property
    def parts(self) -> Sequence[tuple[str, str]]:
        """What was said so far, as (role, text)."""
        ...

    def keep(self, text: str, answer: str) -> None:
        """Add a turn."""

    def undo(self) -> tuple[str, str] | None:
        """Take back the last turn, and return it, for `keep`; None where there is none."""

    def drop(self, text: str | None) -> int:
        """Leave out the oldest turns, where `text` is to follow if it is one; return how many messages those were."""
        ...

    def clear(self) -> None:
        """Forget all turns."""


class ChatLoop(ABC):
    """The loop of a chat. `run` returns when the user leaves.

    hint: what is said first. help: what `/help` says. takes_empty: whether an empty line is answered too.
    """

    hint = "Write a message; /help says what else."
    help = ""
    takes_empty = False

    def __init__(self, terminal: Terminal, turns: ChatTurns) -> None:
        self._terminal, self._turns = terminal, turns
        self._failures: list[EdgeRunError] = []  # that were said
        self._unanswered: str | None = None  # the last message, where it had no room

    @abstractmethod
    def answer(self, text: str, *, keeps_part: bool = True) -> None:
        """Answer what the user wrote. keeps_part: whether what was said before it failed may stay as the answer."""

    @abstractmethod
    def say_stats(self) -> None:
        """Say what the chat took so far, if anything."""

    def say_failed(self, error: EdgeRunError, advice: str) -> None:
        """Say why an answer failed, and what that leaves."""
        self._terminal.say(f"{error}{advice}")
        self._failures.append(error)

    def say_no_room(self, text: str, error: EdgeRunError) -> None:
        """Say that a message had no room; `/drop` has it answered."""
        self._unanswered = text
        advice = f"; {self._turns.when_full}. Your text was not added: the arrow up brings it back."
        self.say_failed(error, advice)

    def end_unless_asked(self) -> None:
        """End the chat after Ctrl-C, unless somebody at a terminal may ask on. Raises Cancelled."""
        if not self._terminal.can_ask:
            raise Cancelled("the chat was stopped")

    def clear(self) -> None:
        """Forget the conversation."""
        self._turns.clear()
        self._unanswered = None

    def note_taken_back(self) -> str:
        """Do what is to be done once the last turn was taken back; return what more is said of it."""
        return ""

    def note_dropped(self) -> str:
        """Do what is to be done once turns were left out; return what more is said of it."""
        return ""

    def command(self, name: str, rest: str) -> bool:
        """Obey a command that changes what was said, or that not every chat has; return whether there is such a one."""
        if name in ("/undo", "/retry") and not rest:
            self._take_back(name)
        elif name == "/drop" and not rest:
            self._drop()
        else:
            return False
        return True

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

    def _take_back(self, command: str) -> None:
        """Take back the last turn; with /retry its message is answered anew, and where that fails the turn stays."""
        turn = self._turns.undo()
        if turn is None:
            self._terminal.say(f"{command}: there is no message of this chat that could be taken back.")
        elif command == "/undo":
            self._unanswered = None
            self._terminal.say(f"The last message and its answer are taken back{self.note_taken_back()}.", NOTICE)
        else:
            without = self._turns.parts
            try:
                self.answer(turn[0], keeps_part=False)
            finally:
                if self._turns.parts == without:
                    self._turns.keep(*turn)
                    self._unanswered = None  # which is in the chat
                    self._terminal.say("The answer before stays.", NOTICE)

    def _drop(self) -> None:
        """Leave out the oldest turns; what had no room before is answered then."""
        text = self._unanswered
        try:
            n_dropped = self._turns.drop(text)
        except EdgeRunError as error:
            self._terminal.say(f"/drop: {error}")
            return
        self._unanswered = None
        if not n_dropped:
            self._terminal.say("/drop: there is no turn that could be left out; /clear begins anew.")
            return
        more = self.note_dropped()
        self._terminal.say(f"{format_count(n_dropped, 'message')} left out, the rest is read anew{more}.", NOTICE)
        if text is not None:
            self._failures.pop()  # that of this message, which is no failure if it is answered now
            self.answer(text)

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
