"""A reader of hostile input, as `parser_targets.py` has them: what it is fed, and what may come out of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_run.base.errors import EdgeRunError
from hostile import broken_bytes, broken_document, large_text

LARGE_SHARE = 1 / 2000  # of inputs that are as large as the reader takes


@dataclass(frozen=True)
class Target:
    """A reader of hostile input.

    feed: reads an input, and returns whether it was accepted. refusals: what may come out of it. seeds: valid input.
    documents, wrap: valid JSON in it, and what makes an input of the text of such a document. largest_bytes: of such a
    text, that the reader still takes. special: makes input that is broken in a way of its own.
    memory_bytes: what one input may take at its peak.
    """

    name: str
    feed: Callable[[bytes], bool]
    refusals: tuple[type[BaseException], ...]
    seeds: Sequence[bytes]
    memory_bytes: int
    documents: Sequence[Any] = ()
    wrap: Callable[[bytes], bytes] = bytes
    largest_bytes: int = 0
    special: Callable[[random.Random], bytes] | None = None

    def make(self, chance: random.Random) -> bytes:
        """Return an input."""
        how = chance.random()
        if how < LARGE_SHARE and self.largest_bytes:
            return self.wrap(large_text(self.largest_bytes, chance))
        if self.documents and how < (0.5 if self.special else 0.75):
            return self.wrap(broken_document(self.documents, chance))
        if self.special and how < 0.75:
            return self.special(chance)
        return broken_bytes(chance.choice(self.seeds), self.seeds, chance)

    def check_seeds(self) -> None:
        """Assert that valid input is accepted."""
        for seed in self.seeds:
            assert self.feed(seed), f"{self.name}: refuses what our own writer made"


Maker = Callable[[Path, ExitStack], Target]
MAKERS: dict[str, Maker] = {}


def target(make: Maker) -> Maker:
    MAKERS[make.__name__.replace("_", " ")] = make
    return make


def in_file(path: Path, read: Callable[[], object]) -> Callable[[bytes], bool]:
    """Return what has `read` find its input at `path`."""

    def feed(data: bytes) -> bool:
        path.write_bytes(data)
        return bool(read())

    return feed


def outcome(one: Target, data: bytes) -> tuple[str, BaseException | None]:
    """Return what became of an input, `accepted`, `refused` or `defect`, and what came out of it."""
    try:
        return ("accepted" if one.feed(data) else "refused"), None
    except one.refusals as error:
        text = str(error)
        if isinstance(error, EdgeRunError) and ("\n" in text or len(text) > 2000):
            return "defect", AssertionError(
                f"a refusal of {len(text)} letters, {text.count(chr(10)) + 1} lines: {text[:200]!r}"
            )
        return "refused", error
    except Exception as error:
        return "defect", error
