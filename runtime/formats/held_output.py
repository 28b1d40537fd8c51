"""Answers that are told apart step by step, as their text comes: what may still become a mark is held back."""

from __future__ import annotations

from abc import ABC, abstractmethod

from edge_run.runtime.formats.output import Delta


class HeldOutput(ABC):
    """Parses one answer, in steps until one of them changes nothing. See `OutputParser`."""

    def __init__(self, held: str = "") -> None:
        """held: what the answer begins with, before any of its text."""
        self._held = held

    @property
    @abstractmethod
    def _place(self) -> object:
        """Where in the answer the held text is."""

    @abstractmethod
    def _step(self, is_last: bool) -> list[Delta]:
        """Take what is certain off the held text; go to another place where that begins there."""

    def push(self, text: str) -> list[Delta]:
        """Take the text that comes next; return what is certain."""
        self._held += text
        return self._advance(is_last=False)

    def finish(self) -> list[Delta]:
        """Return what was held back."""
        return self._advance(is_last=True)

    def _advance(self, is_last: bool) -> list[Delta]:
        deltas: list[Delta] = []
        while True:
            before = self._place, self._held
            deltas += self._step(is_last)
            if (self._place, self._held) == before or not self._held:
                return [delta for delta in deltas if delta.content or delta.reasoning or delta.call]
