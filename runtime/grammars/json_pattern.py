"""Regular expressions for what a text is, made into ones for how JSON writes it.

`.` and `[^,]` may be a quotation mark, a backslash or a line break, which JSON writes with a backslash before. The
expressions that are made are of few forms: characters, classes of ranges in GBNF's escapes, groups, alternatives and
repetitions, which llama-cpp-python's converter makes into rules of a grammar.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from edge_run.base.errors import ConfigError

Ranges = Sequence[tuple[int, int]]
_LAST = 0x10FFFF
_DIGITS: Ranges = [(0x30, 0x39)]
_WORD: Ranges = [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
_SPACE: Ranges = [(0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x2028, 0x2029), (0xFEFF, 0xFEFF)]
_CLASSES = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_CONTROLS = {"n": 0x0A, "r": 0x0D, "t": 0x09, "f": 0x0C, "b": 0x08}  # `\b` only in brackets
_ESCAPED = {**{code: name for name, code in _CONTROLS.items()}, 0x22: '"', 0x5C: "\\\\"}  # in JSON, as expressions
_NOT_PLAIN: Ranges = [(0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0xD800, 0xDFFF)]
_REPETITION = re.compile(r"\{\d+(,\d*)?\}|\{,\d+\}|[*+?]")
_CODE = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]{1,6})\}")


def json_pattern(pattern: str) -> str:
    """Return a regular expression for JSON text between quotation marks that stands for what `pattern` fits, whole.

    Raises ConfigError for what no grammar can say.
    """
    return f"({_Reader(pattern).read()})"


class _Reader:
    """Reads one expression from its beginning to its end."""

    def __init__(self, pattern: str) -> None:
        self._pattern, self._at = pattern, 0

    def read(self) -> str:
        made, may_repeat = [], False
        while self._at < len(self._pattern):
            if may_repeat and (found := _REPETITION.match(self._pattern, self._at)):
                self._at = found.end() + self._pattern.startswith("?", found.end())  # which says how to search only
                made.append(found[0])
                may_repeat = False
                continue
            character = self._next()
            may_repeat = character not in "(|"
            made.append(self._unit(character))
        return "".join(made)

    def _unit(self, character: str) -> str:
        if character == "(":
            if self._pattern.startswith("?:", self._at):
                self._at += 2
            elif self._pattern.startswith("?", self._at):
                raise self._refused("(?")
            return character
        if character in ")|":
            return character
        if character == "[":
            return _written(self._brackets())
        if character == ".":
            return _written(_others([(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)]))
        if character in "^$*+?":
            raise self._refused(character)
        return _written(self._escape() if character == "\\" else _one(character))

    def _brackets(self) -> Ranges:
        """Return what a class in brackets has, of which the first one was read."""
        is_negated = self._pattern.startswith("^", self._at)
        self._at += is_negated
        ranges: list[tuple[int, int]] = []
        while (character := self._next()) != "]":
            first = self._escape(is_in_brackets=True) if character == "\\" else _one(character)
            is_range = self._pattern.startswith("-", self._at) and not self._pattern.startswith("-]", self._at)
            if is_range and len(first) == 1 and first[0][0] == first[0][1]:
                self._at += 1
                character = self._next()
                last = self._escape(is_in_brackets=True) if character == "\\" else _one(character)
                if len(last) > 1 or last[0][1] < first[0][0]:
                    raise self._refused("range")
                first = [(first[0][0], last[0][1])]
            ranges += first
        return _others(ranges) if is_negated else ranges

    def _escape(self, *, is_in_brackets: bool = False) -> Ranges:
        """Return what an escape stands for, of which the backslash was read."""
        if found := _CODE.match(self._pattern, self._at):
            self._at = found.end()
            return _one(chr(min(int(found[1] or found[2] or found[3], 16), _LAST)))
        character = self._next()
        if character.lower() in _CLASSES:
            ranges = _CLASSES[character.lower()]
            return ranges if character.islower() else _others(ranges)
        if character in _CONTROLS and (is_in_brackets or character != "b"):
            return [(_CONTROLS[character], _CONTROLS[character])]
        if character.isalnum():
            raise self._refused(f"\\{character}")
        return _one(character)

    def _next(self) -> str:
        if self._at == len(self._pattern):
            raise self._refused("end")
        self._at += 1
        return self._pattern[self._at - 1]

    def _refused(self, what: str) -> ConfigError:
        where = f"{what} at character {min(self._at, len(self._pattern))}"
        return ConfigError(
            f"JSON schema: pattern {self._pattern[:80]!r}: {where}: no grammar can say this; simplify it"
        )


def _one(character: str) -> Ranges:
    return [(ord(character), ord(character))]


def _others(ranges: Ranges) -> Ranges:
    """Return all characters that are not in `ranges`."""
    found, start = [], 0
    for first, last in sorted(ranges):
        if first > start:
            found.append((start, first - 1))
        start = max(start, last + 1)
    return [*found, (start, _LAST)] if start <= _LAST else found


def _written(ranges: Ranges) -> str:
    """Return an expression for how JSON writes any one of these characters."""
    escaped = [text for code, text in _ESCAPED.items() if any(first <= code <= last for first, last in ranges)]
    plain = _others([*_others(ranges), *_NOT_PLAIN])
    ways = ["[" + "".join(f"{_code(first)}-{_code(last)}" for first, last in plain) + "]"] if plain else []
    ways += [f"\\\\{text}" for text in escaped]
    if not ways:
        raise ConfigError("JSON schema: pattern: has a class of characters that none fits; change it")
    return ways[0] if plain and not escaped else f"({'|'.join(ways)})"


def _code(code: int) -> str:
    return f"\\x{code:02X}" if code < 0x80 else f"\\U{code:08X}"
