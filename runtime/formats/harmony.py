"""Answers in OpenAI's harmony format, as gpt-oss writes them: messages, each in a channel, some to a function.

    <|channel|>analysis<|message|> reasoning <|end|><|start|>assistant<|channel|>final<|message|> content <|return|>
    <|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>

What is said in the channel `commentary` to nobody is a preamble to a call, which the user is to see.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from edge_run.base import strict_json
from edge_run.runtime.formats.call_texts import made_call, new_call_identity
from edge_run.runtime.formats.held_output import HeldOutput
from edge_run.runtime.formats.marked_output import THINK, THOUGHT
from edge_run.runtime.formats.output import Delta

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
MARKS = (START, CHANNEL, CONSTRAIN, MESSAGE, END)
_BODY_ENDS = (END, RETURN, CALL, START, CHANNEL)
_FUNCTIONS = "functions."
_RECIPIENT = re.compile(r"\bto=([\w.-]+)")
_CHANNEL = re.compile(rf"{re.escape(CHANNEL)}\s*(\w+)")


class HarmonyOutput(HeldOutput):
    """Parses one answer.

    begins: what the prompt ends with of the answer's first message. has_thoughts: whether reasoning is told apart; else
    it is content, between `<think>` and `</think>`. tools: names that may be called; calls of others are content.
    most_calls: further ones are left out.
    """

    def __init__(
        self,
        begins: str = "",
        has_thoughts: bool = True,
        tools: Collection[str] = (),
        most_calls: int = 1_000,
        identity: Callable[[], str] = new_call_identity,
    ) -> None:
        self._has_thoughts, self._tools, self._most_calls, self._identity = has_thoughts, tools, most_calls, identity
        super().__init__(begins)
        self._is_in_body = False
        self._channel = self._recipient = self._header = ""
        self._n_calls = 0

    @property
    def _place(self) -> bool:
        return self._is_in_body

    def _step(self, is_last: bool) -> list[Delta]:
        return self._body(is_last) if self._is_in_body else self._head(is_last)

    def _head(self, is_last: bool) -> list[Delta]:
        """Read what comes before a message: its channel, and to whom it is."""
        header, mark, rest = self._held.partition(MESSAGE)
        if not mark:
            if not is_last:
                return []
            self._held = ""
            return [Delta(header)] if header.strip() and CHANNEL not in header and START not in header else []
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        self._channel = channel[1] if channel else "final"
        self._recipient = recipient[1] if recipient else ""
        self._header, self._held, self._is_in_body = header, rest, True
        return [Delta(THINK)] if self._is_marked else []

    def _body(self, is_last: bool) -> list[Delta]:
        at, mark = min(
            ((at, mark) for mark in _BODY_ENDS if (at := self._held.find(mark)) >= 0), default=(len(self._held), "")
        )
        if not mark and not is_last:
            if self._recipient:
                return []  # a call comes whole
            at = _certain(self._held)
        text, self._held = self._held[:at], self._held[at:]
        if mark or is_last:
            self._is_in_body = False
            self._held = self._held.removeprefix(mark if mark in (END, RETURN, CALL) else "")
        return [self._delta(text), Delta(THOUGHT)] if mark and self._is_marked else [self._delta(text)]

    @property
    def _is_marked(self) -> bool:
        """Whether the message is reasoning that is not told apart."""
        return self._channel == "analysis" and not (self._recipient or self._has_thoughts)

    def _delta(self, text: str) -> Delta:
        if self._recipient:
            return self._call(text)
        return Delta(reasoning=text) if self._channel == "analysis" and self._has_thoughts else Delta(text)

    def _call(self, text: str) -> Delta:
        name = self._recipient.removeprefix(_FUNCTIONS)
        try:
            arguments = strict_json.parse(text.strip() or "{}")
        except ValueError:
            arguments = None
        if name not in self._tools or not isinstance(arguments, dict):
            return Delta(f"{self._header}{MESSAGE}{text}")
        self._n_calls += 1
        call = made_call(self._identity(), name, arguments)
        return Delta(call=call) if self._n_calls <= self._most_calls else Delta()


def _certain(text: str) -> int:
    """Return how many letters of `text` cannot belong to a mark that has only begun."""
    at = text.rfind("<|")
    if at < 0:
        return len(text) - text.endswith("<")
    return at if any(mark.startswith(text[at:]) for mark in _BODY_ENDS) else len(text) - text.endswith("<")
