"""Pieces of GBNF, the language of llama.cpp's grammars: what JSON consists of, in one line."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from edge_run.base.errors import ConfigError

MOST_REPEATED = 2000  # times a piece, as llama.cpp has it, which takes a higher end for none
MOST_NAME_LETTERS = 64  # of a property, up to which others are told from it
MOST_WHOLE = 10**16 - 1  # of sixteen digits, as llama.cpp's integers have at most
SPACE = '" "?'  # no line breaks and indents, which llama.cpp allows: each token may cost a pass over the drive
_DAY = '[0-9]{4} "-" ( "0" [1-9] | "1" [0-2] ) "-" ( "0" [1-9] | [1-2] [0-9] | "3" [0-1] )'
_HOUR = '([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9]'
_TIME = f'{_HOUR} ":" [0-5] [0-9] ( "." [0-9]{{3}} )? ( "Z" | ( "+" | "-" ) {_HOUR} )'
_END, _REST = "", "rest"  # in a tree of letters: a name ends here; whatever goes on here is one
_UUID = ' "-" '.join(f"[0-9a-fA-F]{{{digits}}}" for digits in (8, 4, 4, 4, 12))
PRIMITIVES: Mapping[str, tuple[str, tuple[str, ...]]] = {  # rules, and which others each needs
    "boolean": ('"true" | "false"', ()),
    "null": ('"null"', ()),
    "integral-part": ("[0] | [1-9] [0-9]{0,15}", ()),
    "decimal-part": ("[0-9]{1,16}", ()),
    "integer": ('"-"? integral-part', ("integral-part",)),
    "number": (
        '"-"? integral-part ("." decimal-part)? ([eE] [-+]? integral-part)?', ("integral-part", "decimal-part")
    ),
    "char": (r'[^"\\\x7F\x00-\x1F] | [\\] (["\\bfnrt] | "u" [0-9a-fA-F]{4})', ()),
    "string": (r'"\"" char* "\""', ("char",)),
    "object": (
        '"{" space ( string ":" space value ("," space string ":" space value)* )? space "}"', ("string", "value")
    ),
    "array": ('"[" space ( value ("," space value)* )? space "]"', ("value",)),
    "value": (
        "object | array | string | number | boolean | null", ("object", "array", "string", "number", "boolean", "null")
    ),
    "date": (rf'"\"" {_DAY} "\""', ()),
    "time": (rf'"\"" {_TIME} "\""', ()),
    "date-time": (rf'"\"" {_DAY} "T" {_TIME} "\""', ()),
    "uuid": (rf'"\"" {_UUID} "\""', ()),
}  # fmt: skip
FORMATS = {"date": "date", "time": "time", "date-time": "date-time", "uuid": "uuid"} | {
    f"uuid{version}": "uuid" for version in range(1, 6)
}
NAME = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|([a-zA-Z][a-zA-Z0-9-]*)')


def quoted(text: str) -> str:
    """Return the GBNF of a text."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def literal(value: Any) -> str:
    """Return the GBNF of a JSON value, written in one way. Raises ValueError for numbers that JSON cannot write."""
    return quoted(json.dumps(value, ensure_ascii=False, allow_nan=False))


def code(character: int) -> str:
    """Return a character as it stands in brackets."""
    return f"\\x{character:02X}" if character < 0x80 else f"\\U{character:08X}"


def repeated(piece: str, least: int, most: int | None, separator: str = "") -> str:
    """Return the GBNF of so many pieces. Raises ConfigError where there can be none, or llama.cpp takes no such rule.

    piece: a class in brackets, a text, a group or the name of a rule. most: None where there may be any number.
    """
    if most is not None and most < least:
        raise ConfigError(f"JSON schema: at least {least:,} and at most {most:,} of something: there is nothing to say")
    if least > MOST_REPEATED:
        raise ConfigError(
            f"JSON schema: {least:,} of something: at most {MOST_REPEATED:,} can be asked for; simplify it"
        )
    if most is not None and most > MOST_REPEATED:
        most = None
    if most == 0:
        return ""
    if not separator:
        return f"{piece}{{{least},{'' if most is None else most}}}"
    rest = repeated(f"({separator} {piece})", max(least - 1, 0), None if most is None else most - 1)
    return f"{piece} {rest}" if least else f"({piece} {rest})?"


def other_names(names: Iterable[str]) -> str:
    """Return the GBNF of a property's name that is none of these.

    Nor is it one that begins with one of them up to where JSON escapes a letter, or with its first 64 letters.
    """
    tree: dict[str, Any] = {}
    for name in names:
        plain, escape, _ = json.dumps(name, ensure_ascii=False)[1:-1].partition("\\")
        at = tree
        for letter in (plain + escape)[:MOST_NAME_LETTERS]:
            at = at.setdefault(letter, {})
        at[_END if len(plain + escape) <= MOST_NAME_LETTERS else _REST] = {}
    return rf'"\"" {_other_ends(tree)} "\""'


def _other_ends(tree: Mapping[str, Any]) -> str:
    """Return what may follow where names go on as in `tree`, so that the whole is none of them."""
    letters = [letter for letter in tree if letter not in (_END, _REST)]
    if not letters and _REST not in tree:
        return "char+"
    ways = [
        f"[{code(ord(letter))}] {_other_ends(tree[letter])}"
        for letter in letters
        if letter != "\\" and not {_END, _REST} <= tree[letter].keys()  # where nothing is left that is another name
    ]
    if _REST not in tree:
        ways.append(r'[^"\\\x7F\x00-\x1F' + "".join(code(ord(letter)) for letter in letters) + "] char*")
    if _END not in tree:
        ways.insert(0, "")
    return f"({' | '.join(ways)})"


def whole_numbers(least: float | None, most: float | None) -> str:
    """Return the GBNF of the whole numbers from `least` to `most`; None: as many digits as llama.cpp's have.

    Raises ConfigError where there are none, or all of them have more digits.
    """
    low = -MOST_WHOLE if least is None else max(-MOST_WHOLE, math.ceil(least))
    high = MOST_WHOLE if most is None else min(MOST_WHOLE, math.floor(most))
    if low > MOST_WHOLE or high < -MOST_WHOLE:
        raise ConfigError(f"JSON schema: a bound of whole numbers beyond {MOST_WHOLE:,}: leave it out")
    if low > high:
        raise ConfigError(f"JSON schema: whole numbers from {low} to {high}: there are none")
    ways = [f'"-" ({_digits(max(1, -high), -low)})'] if low < 0 else []
    ways += [_digits(max(0, low), high)] if high >= 0 else []
    return " | ".join(ways)


def _digits(low: int, high: int) -> str:
    """Return the GBNF of the numbers from `low` to `high`, of which none is below 0: of each number of digits apart."""
    ways, lengths = [], range(len(str(low)), len(str(high)) + 1)
    for length in lengths:
        first = str(low) if length == lengths[0] else "1" + "0" * (length - 1)
        last = str(high) if length == lengths[-1] else "9" * length
        ways.append(_same_length(first, last))
    return " | ".join(ways)


def _same_length(first: str, last: str) -> str:
    """Return the GBNF of the numbers from `first` to `last`, which have as many digits."""
    rest = len(first) - 1
    zeros, nines = "0" * rest, "9" * rest
    if not rest:
        return f"[{first}-{last}]"
    if first[0] == last[0]:
        return f"[{first[0]}] {_grouped(_same_length(first[1:], last[1:]))}"
    low, high = int(first[0]), int(last[0])
    ways = []
    if first[1:] != zeros:
        ways.append(f"[{low}] {_grouped(_same_length(first[1:], nines))}")
        low += 1
    if last[1:] != nines:
        ways.append(f"[{high}] {_grouped(_same_length(zeros, last[1:]))}")
        high -= 1
    if low <= high:
        ways.insert(0, f"[{low}-{high}] [0-9]{{{rest}}}")
    return " | ".join(ways)


def _grouped(ways: str) -> str:
    return f"({ways})" if "|" in ways else ways
