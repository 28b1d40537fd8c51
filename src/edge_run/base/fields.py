"""Fields of a document that came from somebody else: a member of the mesh, who may say anything.

Every number has a range, every text and list a length, and whoever reads one says which: so nothing of a stranger's
choosing reaches arithmetic, memory or a terminal. JSON itself knows no ranges: Python reads `10**4000` and `NaN` of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeAlias, TypeGuard

from edge_run.base.errors import ProtocolError

JsonValue: TypeAlias = "bool | int | float | str | Sequence[JsonValue] | Mapping[str, JsonValue] | None"
Document: TypeAlias = Mapping[str, JsonValue]  # an object of JSON

MOST_COUNT = (1 << 53) - 1  # JSON's whole numbers
MOST_BYTES = 1 << 50  # of a memory, a drive or a file; sums of a few are below MOST_COUNT
MOST_RATE = 1e15  # bytes a second
MOST_S = 1e6
MOST_LETTERS = 200
MOST_WORDS = 500  # letters of what is for people to read


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of `document`. what: it is, and whose, in words. node: who sent it, named by each ProtocolError."""

    document: Document
    what: str
    node: str = ""

    def has(self, name: str) -> bool:
        """Return whether there is something of that name."""
        return self.document.get(name) is not None

    def integer(self, name: str, least: int = 0, most: int = MOST_COUNT) -> int:
        """Return a whole number. Raises ProtocolError."""
        value = self.document.get(name)
        if type(value) is not int or not least <= value <= most:
            self._refuse(name, f"needs a whole number from {least} to {most}")
        return value

    def number(self, name: str, least: float = 0.0, most: float = MOST_RATE) -> float:
        """Return a finite number. Raises ProtocolError."""
        value = self.document.get(name)
        if not is_number(value, least, most):
            self._refuse(name, f"needs a number from {least:g} to {most:g}")
        return float(value)

    def flag(self, name: str) -> bool:
        """Return a truth value; what is not there is false. Raises ProtocolError."""
        value = self.document.get(name, False)
        if not isinstance(value, bool):
            self._refuse(name, "needs true or false")
        return value

    def name(self, name: str, most_letters: int = MOST_LETTERS) -> str:
        """Return a text that stands for something, as it is. Raises ProtocolError."""
        value = self.document.get(name)
        if not is_name(value, most_letters):
            self._refuse(name, f"needs a text of at most {most_letters} letters")
        return value

    def words(self, name: str) -> str:
        """Return what is for people to read, as `plain` makes it; an empty text where there is none."""
        value = self.document.get(name)
        return plain(value) if isinstance(value, str) else ""

    def items(self, name: str, least: int, most: int) -> Sequence[JsonValue]:
        """Return a list of so many items, which are not looked at. Raises ProtocolError."""
        value = self.document.get(name)
        if not isinstance(value, (list, tuple)) or not least <= len(value) <= most:
            self._refuse(name, f"needs a list of {least} to {most}" if least < most else f"needs a list of {least}")
        return value

    def names(self, name: str, least: int, most: int) -> tuple[str, ...]:
        """Return a list of texts that stand for something. Raises ProtocolError."""
        found = tuple(item for item in self.items(name, least, most) if is_name(item))
        if len(found) != len(self.items(name, least, most)):
            self._refuse(name, f"needs texts of at most {MOST_LETTERS} letters")
        return found

    def integers(self, name: str, count: int, most: int) -> tuple[int, ...]:
        """Return a list of `count` whole numbers from 0 to `most`. Raises ProtocolError."""
        found = tuple(item for item in self.items(name, count, count) if type(item) is int and 0 <= item <= most)
        if len(found) != count:
            self._refuse(name, f"needs whole numbers from 0 to {most}")
        return found

    def table(self, name: str, most: int = 256) -> Mapping[str, JsonValue]:
        """Return an object, of at most so many fields, which are not looked at. Raises ProtocolError."""
        value = self.document.get(name)
        if not isinstance(value, Mapping) or len(value) > most or not all(map(is_name, value)):
            self._refuse(name, f"needs an object of at most {most} fields")
        return value

    def numbers(self, name: str, least: float, most: float) -> dict[str, float]:
        """Return an object whose fields are all numbers. Raises ProtocolError."""
        table = self.table(name)
        return {key: Fields(table, f"{self.what}, in {name}", self.node).number(key, least, most) for key in table}

    def _refuse(self, name: str, needed: str) -> NoReturn:
        raise ProtocolError(f"{self.what} says {name} {shown(self.document.get(name))}: {needed}", node=self.node)


def is_number(value: object, least: float, most: float) -> TypeGuard[float]:
    """Return whether `value` is a finite number, and from `least` to `most`."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return least <= value <= most and math.isfinite(value)


def is_name(value: object, most_letters: int = MOST_LETTERS, least_letters: int = 0) -> TypeGuard[str]:
    """Return whether `value` is a text of so many letters, that all can be printed."""
    return isinstance(value, str) and least_letters <= len(value) <= most_letters and value.isprintable()


def plain(text: str, most_letters: int = MOST_WORDS) -> str:
    """Return `text` in one line of what can be printed: nothing that a terminal obeys, at most so many letters."""
    seen = "".join(letter if letter.isprintable() else " " for letter in text[: 4 * most_letters])
    words = " ".join(seen.split())
    return words if len(words) <= most_letters else f"{words[: most_letters - 3]}..."


def shown(value: object) -> str:
    """Return `value` as an error may show it."""
    try:
        return plain(repr(value), 80)
    except (RecursionError, ValueError):  # nested too deep, or an integer of too many digits
        return f"a {type(value).__name__} that cannot be shown"
