"""What a parser makes of a model's text that comes in pieces, for tests of formats."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from typing import Any, Protocol

from edge_run.runtime.formats.output import Delta


class Parser(Protocol):
    """What takes pieces of a text, and says what they mean."""

    def push(self, text: str, /) -> list[Delta]: ...
    def finish(self) -> list[Delta]: ...


def parsed(parser: Parser, text: str, cuts: Iterable[int] = ()) -> tuple[str, str, list[tuple[str, Any]]]:
    """Return content, reasoning and calls of `text`, cut at these places; numbers beyond its end count on from 0."""
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    deltas: list[Delta] = []
    for start, end in itertools.pairwise(places):
        deltas += parser.push(text[start:end])
    deltas += parser.finish()
    calls = [(delta.call.name, delta.call.parsed) for delta in deltas if delta.call]
    assert all(json.loads(delta.call.arguments) == delta.call.parsed for delta in deltas if delta.call)
    return "".join(delta.content for delta in deltas), "".join(delta.reasoning for delta in deltas), calls
