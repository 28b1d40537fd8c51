"""What an answer goes on by, and who tells it apart: what a model thinks, says and calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

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


class Meaning(NamedTuple):
    """What an answer says, what it thinks, and the tools that it calls; None for text that was not told apart."""

    content: str | None = None
    reasoning: str | None = None
    calls: tuple[ToolCall, ...] = ()


def meaning(deltas: Sequence[Delta]) -> Meaning:
    """Return what an answer means, or a part of it, from what a parser made of its text."""
    said, thought = "".join(delta.content for delta in deltas), "".join(delta.reasoning for delta in deltas)
    return Meaning(said, thought, tuple(delta.call for delta in deltas if delta.call))
