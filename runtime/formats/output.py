"""What an answer goes on by, and who tells it apart: what a model thinks, says and calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from edge_run.base.results import TokenLogprobs, ToolCall


@dataclass(frozen=True, slots=True)
class Delta:
    """What an answer goes on by.

    call: a tool that is called, complete.
    logprobs: how likely the tokens were that have come since the one before, where that was asked for.
    tokens: these tokens.
    """

    content: str = ""
    reasoning: str = ""
    call: ToolCall | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    tokens: tuple[int, ...] = ()


class OutputParser(Protocol):
    """Tells apart what the text of an answer means, as it comes. One answer each."""

    def push(self, text: str) -> list[Delta]:
        """Take the text that comes next; return what is certain."""
        ...

    def finish(self) -> list[Delta]:
        """Return what was held back; no push may follow."""
        ...


MakeParser: TypeAlias = Callable[[], OutputParser]


class PlainOutput:
    """All of the text is content."""

    def push(self, text: str) -> list[Delta]:
        """Return the text."""
        return [Delta(content=text)] if text else []

    def finish(self) -> list[Delta]:
        """Return nothing: nothing was held back."""
        return []


def meaning(parser: OutputParser, text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """Return what a whole answer says, without what it thinks and calls, and the calls."""
    deltas = [*parser.push(text), *parser.finish()]
    return "".join(delta.content for delta in deltas), tuple(delta.call for delta in deltas if delta.call)
