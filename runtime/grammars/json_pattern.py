"""Regular expressions for what a text is, as GBNF for how JSON writes it.

`.` and `[^,]` may be a quotation mark, a backslash or a line break, which JSON writes with a backslash before.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from edge_run.base.errors import ConfigError
from edge_run.runtime.grammars.gbnf import code, quoted, repeated

Ranges = Sequence[tuple[int, int]]
_LAST = 0x10FFFF
_DIGITS: Ranges = [(0x30, 0x39)]
_WORD: Ranges = [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
_SPACE: Ranges = [
    *((0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)),
    *((0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
]
_CLASSES = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_CONTROLS = {"n": 0x0A, "r": 0x0D, "t": 0x09, "f": 0x0C, "b": 0x08}  # `\b` only in brackets
_ESCAPED = {**{one: name for name, one in _CONTROLS.items()}, 0x22: '"', 0x5C: "\\"}  # in JSON, after a backslash
_NOT_PLAIN: Ranges = [(0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0xD800, 0xDFFF)]
_REPETITION = re.compile(r"\{(?P<least>\d*)(?P<ends>,?)(?P<most>\d*)\}(?<!\{\})(?<!\{,\})|[*+?]")
_CODE = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]{1,6})\}")


def json_pattern(pattern: str, add_rule: Callable[[str], str]) -> str:
    """Return the GBNF of JSON text between quotation marks that stands for what `pattern` fits, whole.

    add_rule: returns the name of a rule with a body. Raises ConfigError for what no grammar can say.
    """
    return f"({_Reader(pattern, add_rule).read()})"


class _Reader:
    """Reads one expression from its beginning to its end."""

    def __init__(self, pattern: str, add_rule: Callable[[str], str]) -> None:
        self._pattern, self._add_rule, self._at = pattern, add_rule, 0

    def read(self) -> str:
        groups: list[list[str]] = [[]]  # what was made of the groups that are open
        may_repeat = False
        while self._at < len(self._pattern):
            if may_repeat and (found := _REPETITION.match(self._pattern, self._at)):
                self._at = found.end() + self._pattern.startswith("?", found.end())  # which says how to search only
                groups[-1].append(self._repeated(groups[-1].pop(), found))
                may_repeat = False
                continue
            character = self._next()
            may_repeat = character not in "(|"
            if character == "(":
                self._skip_sign()
                groups.append([])
            elif character == ")" and len(groups) > 1:
                group = " ".join(groups.pop())
                groups[-1].append(f"({group})")
            else:
                groups[-1].append(self._unit(character))
        if len(groups) > 1:
            raise self._refused("end")
        return " ".join(groups[0])

    def _skip_sign(self) -> None:
        """Pass the sign of a group that is not to be found again."""
        if self._pattern.startswith("?:", self._at):
            self._at += 2
        elif self._pattern.startswith("?", self._at):
            raise self._refused("(?")

    def _repeated(self, unit: str, found: re.Match[str]) -> str:
        if found["least"] is None:
            return f"{unit}{found[0]}"
        least = int(found["least"] or 0)
        most = int(found["most"]) if found["most"] else None if found["ends"] else least
        # llama.cpp multiplies repetitions within a group, not those of a rule; a line break after `|` ends no rule
        return repeated(self._add_rule(unit) if unit.startswith("(") else unit, least, most)

    def _unit(self, character: str) -> str:
        if character == "|":
            return character
        if character == "[":
            return _written(self._brackets())
        if character == ".":
            return _written(_others([(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)]))
        if character in "^$*+?)":
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
                if len(last) > 1 or last[0][0] != last[0][1] or last[0][1] < first[0][0]:
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
    """Return the GBNF of how JSON writes any one of these characters."""
    escaped = [text for one, text in _ESCAPED.items() if any(first <= one <= last for first, last in ranges)]
    plain = _others([*_others(ranges), *_NOT_PLAIN])
    ways = ["[" + "".join(f"{code(first)}-{code(last)}" for first, last in plain) + "]"] if plain else []
    ways += [quoted(f"\\{text}") for text in escaped]
    if not ways:
        raise ConfigError("JSON schema: pattern: has a class of characters that none fits; change it")
    return ways[0] if plain and not escaped else f"({' | '.join(ways)})"
