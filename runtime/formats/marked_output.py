"""Answers in which marks tell apart what a model thinks, says and calls, as Qwen's and Hermes's models write them.

    <think> reasoning </think> content <tool_call> {"name": ..., "arguments": {...}} </tool_call>

Qwen3-Coder's and GLM's have each argument between tags there instead of JSON (`call_texts.tagged_call`).
Llama's and Mistral's mark the beginning of calls only, of which there is nothing else until the end of the answer:

    content <|python_tag|>{"name": ..., "parameters": {...}}
    content [TOOL_CALLS][{"name": ..., "arguments": {...}}]

What may still become a mark is held back. A call that is not written as it should be is content: nothing is lost. Small
models often forget the marks, so an answer that begins with the JSON of a call, in a code block or not, is one too. It
is held back while its first key may be that of a call, until the object is whole and turns out to be none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from edge_run.base import strict_json
from edge_run.base.results import ToolCall
from edge_run.runtime.formats.call_texts import called, made_call, new_call_identity, read_calls, tagged_call
from edge_run.runtime.formats.held_output import HeldOutput
from edge_run.runtime.formats.output import Delta

THINK, THOUGHT = "<think>", "</think>"
CALL, CALLED = "<tool_call>", "</tool_call>"
_CONTENT, _THINKING, _CALLING, _BARE, _AFTER_BARE = "content", "thinking", "calling", "bare", "after"
_OPENINGS = ("{", "```json\n{", "```\n{")  # of a call without marks
_DECODER = json.JSONDecoder()
_BARE_CALL = re.compile(r'\s*(?:```(?:json)?\n)?\{{1,2}\s*"name"\s*:\s*"([\w.-]{1,128})"')
_CALL_KEYS = ("name", "arguments", "parameters", "type", "id")  # that a call without marks may begin with
_FIRST_KEY_LETTERS = 64  # up to its end
MOST_BARE_LETTERS = 1 << 13  # of an answer that begins like a call and names no tool, before it is taken for text


class MarkedOutput(HeldOutput):
    """Parses one answer.

    begins: a mark that the prompt ended with, so that the answer begins after it; empty for none.
    has_thoughts: whether `<think>` at the beginning is a mark.
    tools: the JSON schemas of the arguments of what may be called, by names; none: calls are text.
    most_calls: further calls are left out.
    marks: what calls begin with, and end with; all of the rest is calls where that is empty.
    """

    def __init__(
        self,
        begins: str = "",
        has_thoughts: bool = True,
        tools: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
        most_calls: int = 1_000,
        identity: Callable[[], str] = new_call_identity,
        marks: tuple[str, str] = (CALL, CALLED),
    ) -> None:
        self._begins_call, self._ends_call = marks
        self._state = {THINK: _THINKING, self._begins_call: _CALLING}.get(begins, _CONTENT)
        self._may_think = has_thoughts and not begins
        self._may_be_bare = bool(tools)
        self._tools, self._most_calls, self._identity = tools, most_calls, identity
        super().__init__()
        self._n_calls = self._tried = 0
        self._given_mark = self._begins_call if self._state == _CALLING else ""  # which is no part of the answer
        self._is_after_a_mark = begins == THINK
        self._steps = {
            _CONTENT: self._content,
            _THINKING: self._thinking,
            _CALLING: self._calling,
            _BARE: self._bare,
            _AFTER_BARE: self._after_bare,
        }

    @property
    def _place(self) -> str:
        return self._state

    def _step(self, is_last: bool) -> list[Delta]:
        return self._steps[self._state](is_last)

    def _content(self, is_last: bool) -> list[Delta]:
        if self._may_think:
            text = self._held.lstrip()
            if THINK.startswith(text) and text != THINK and not is_last:
                return []
            self._may_think = False
            if text.startswith(THINK):
                self._go_on(_THINKING, text.removeprefix(THINK))
                return []
        self._leave_out_breaks()
        if not self._tools:
            return self._take(len(self._held), Delta)
        if self._may_be_bare:
            text = self._held.lstrip()
            if not is_last and any(opening.startswith(text) and text != opening for opening in _OPENINGS):
                return []
            self._may_be_bare = False
            if text.startswith(_OPENINGS):
                self._state = _BARE
                return []
        mark = self._begins_call
        if (at := self._held.find(mark)) >= 0:
            said = self._take(at, Delta)
            self._state, self._held = _CALLING, self._held.removeprefix(mark)
            return [Delta(delta.content.rstrip()) for delta in said]
        return self._take(len(self._held) if is_last else _certain(self._held, mark), self._after_calls)

    def _after_calls(self, text: str) -> Delta:
        """Return content, but for the line breaks between calls and after them."""
        return Delta("" if self._n_calls and not text.strip() else text)

    def _thinking(self, is_last: bool) -> list[Delta]:
        self._leave_out_breaks()
        if (at := self._held.find(THOUGHT)) >= 0:
            thoughts = self._take(at, _reasoning)
            self._go_on(_CONTENT, self._held.removeprefix(THOUGHT))
            return thoughts
        return self._take(len(self._held) if is_last else _certain(self._held, THOUGHT), _reasoning)

    def _calling(self, is_last: bool) -> list[Delta]:
        at = self._held.find(self._ends_call) if self._ends_call else -1
        if at < 0 and not is_last:
            return []
        text = self._held if at < 0 else self._held[:at]
        end = self._ends_call if at >= 0 else ""
        self._state, self._held = _CONTENT, self._held[len(text) + len(end) :]
        calls = [self._call(text)] if self._ends_call else self._calls(text)
        found = [call for call in calls if call]
        mark = "" if self._given_mark else self._begins_call
        self._given_mark = ""
        if not found:
            return [Delta(f"{mark}{text}{end}")]
        return self._count(found)

    def _calls(self, text: str) -> list[ToolCall]:
        return [made_call(self._identity(), *one) for one in read_calls(text, self._tools) or ()]

    def _count(self, calls: list[ToolCall]) -> list[Delta]:
        left = max(0, self._most_calls - self._n_calls)
        self._n_calls += len(calls)
        return [Delta(call=call) for call in calls[:left]]

    def _bare(self, is_last: bool) -> list[Delta]:
        at, last = self._held.find("{"), self._held.rfind("}") + 1
        if not _may_be_call(self._held[at : at + _FIRST_KEY_LETTERS]):
            self._state = _CONTENT
            return []
        if not self._ends_call and is_last and (calls := self._calls(self._held)):
            self._state, self._held = _AFTER_BARE, ""
            return self._count(calls)
        may_go_on = not is_last and (len(self._held) <= MOST_BARE_LETTERS or self._names_a_tool())
        if may_go_on and last == self._tried:
            return []
        end, self._tried = _end_of_object(self._held, at), last
        call = self._call(self._held[at:end])
        if may_go_on and (end == at or (call and not self._ends_call)):
            return []  # it is not whole, or more calls may follow
        self._state = _CONTENT
        if call is None:
            return []
        self._state, self._held = _AFTER_BARE, self._held[end:]
        return self._count([call])

    def _names_a_tool(self) -> bool:
        found = _BARE_CALL.match(self._held)
        return found is not None and found[1] in self._tools

    def _after_bare(self, is_last: bool) -> list[Delta]:
        """Leave out what closes a code block or a doubled brace."""
        self._held = self._held.lstrip("} \n`")
        if self._held:
            self._state = _CONTENT
        return []

    def _call(self, text: str) -> ToolCall | None:
        found = called(_object(text.strip()), self._tools) or tagged_call(text, self._tools)
        return made_call(self._identity(), *found) if found else None

    def _go_on(self, state: str, text: str) -> None:
        """Go on with `text` after a mark that has line breaks around it."""
        self._state, self._held, self._is_after_a_mark = state, text, True

    def _leave_out_breaks(self) -> None:
        if self._is_after_a_mark:
            self._held = self._held.lstrip("\n")
            self._is_after_a_mark = not self._held

    def _take(self, n_letters: int, kind: Callable[[str], Delta]) -> list[Delta]:
        text, self._held = self._held[:n_letters], self._held[n_letters:]
        return [kind(text)] if text else []


def _end_of_object(text: str, at: int) -> int:
    """Return where the JSON object ends that begins at `at`, the inner one of doubled braces; `at` where none does."""
    try:
        _, end = _DECODER.raw_decode(text, at + text.startswith("{{", at))
    except (ValueError, RecursionError):
        return at
    return end


def _may_be_call(text: str) -> bool:
    """Return whether a text that begins with a brace, or two, may go on as a call does: with a key that one has."""
    key = text[1:].removeprefix("{").lstrip()
    name, quote, _ = key[1:].partition('"')
    return not key or (key[0] == '"' and any(one == name if quote else one.startswith(name) for one in _CALL_KEYS))


def _object(text: str) -> dict[str, Any]:
    """Return the JSON object that `text` is; an empty one where it is none.

    Some templates show a call with its braces doubled, and models copy that, or the half of it.
    """
    for candidate in (text, text[1:], text[1:-1]) if text.startswith("{{") else (text,):
        try:
            value = strict_json.parse(candidate)
        except ValueError:
            continue
        if isinstance(value, dict):
            return value
    return {}


def _reasoning(text: str) -> Delta:
    return Delta(reasoning=text)


def _certain(text: str, mark: str) -> int:
    """Return how many letters of `text` cannot belong to a mark that has only begun; white space before it counts."""
    for at in range(max(0, len(text) - len(mark) + 1), len(text)):
        if mark.startswith(text[at:]):
            return len(text[:at].rstrip())
    return len(text.rstrip())
