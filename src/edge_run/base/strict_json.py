"""JSON that is believed only where it is just what it should be: `parse` for any document, `decode` for a dataclass.

`write` makes what others can read as strictly.

`json.loads` alone takes NaN, a key twice, numbers of thousands of digits, lone surrogates, lists without end and
nesting that ends in a RecursionError, here or wherever the value is handled later. No writer of ours makes such, so
nobody behind `parse` has to think of them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import typing
from collections.abc import Callable, Mapping
from pathlib import PurePath
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

_T = TypeVar("_T")

MOST_DIGITS = 40  # of a whole number: more than any hash or count of ours, and still a float
MOST_DEPTH = 64
MOST_CONTAINERS = 1 << 16  # lists and objects: of three bytes each, they take twenty times as much memory
_TOO_DEEP = f"nested more than {MOST_DEPTH} deep"
LARGEST = 1 << 63  # no whole number of a dataclass is as large
_STRING = re.compile(r'"[^"]*"?')  # without escapes; never fails, so that it is done in one pass


def parse(text: bytes | str) -> Any:
    """Return the value that `text`, in UTF-8, is the JSON of. Raises ValueError, whatever `text` is."""
    try:
        words = text if isinstance(text, str) else text.decode("utf-8")
        n_containers = _counted(words)
        value = _DECODER.decode(words)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    return _checked(value, words, n_containers)


def parse_first(text: str, start: int = 0) -> tuple[Any, int]:
    """Return the value whose JSON begins at `start`, as `parse` does, and where that ends; anything may follow."""
    try:
        value, end = _DECODER.raw_decode(text, start)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    words = text[start:end]
    return _checked(value, words, _counted(words)), end


def _counted(words: str) -> int:
    """Return how many lists and objects a document has. Raises ValueError for too many."""
    n_containers = containers(words)
    if n_containers > MOST_CONTAINERS:
        raise ValueError(f"{n_containers} lists and objects, at most {MOST_CONTAINERS} make sense")
    return n_containers


def _checked(value: Any, words: str, n_containers: int) -> Any:
    """Return the value of a document that was read. Raises ValueError where whoever handles it might fail."""
    if n_containers > MOST_DEPTH:
        _check_depth(value)
    if "\\u" in words:
        json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate is no text: UnicodeEncodeError
    return value


def write(value: object) -> str:
    """Return `value` as one line of JSON.

    Arrays become lists, paths text; infinite numbers and those that are none become null.

    Raises TypeError for what has no form in JSON.
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain)
    except ValueError:  # JSON has no such numbers, and few readers take them
        return json.dumps(_finite_only(value), ensure_ascii=False, allow_nan=False, default=_plain)


def to_json(result: object) -> str:
    """Return a result dataclass as one line of JSON, with its field names as keys.

    Arrays become lists, paths text; infinite numbers and those that are none become null. Raises TypeError for anything
    else.
    """
    if not dataclasses.is_dataclass(result) or isinstance(result, type):
        raise TypeError(f"{type(result).__name__} is not a result dataclass")
    return write(dataclasses.asdict(result))


def _plain(value: Any) -> Any:
    """Return a NumPy array as lists and a path as text; `json` knows neither. Raises TypeError for anything else."""
    if isinstance(value, PurePath):
        return str(value)
    if not hasattr(value, "tolist"):
        raise TypeError(f"{type(value).__name__} has no form in JSON")
    return value.tolist()


def _finite_only(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite_only(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite_only(one) for one in value]
    if hasattr(value, "tolist"):
        return _finite_only(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def containers(*documents: str) -> int:
    """Return how many lists and objects documents of JSON have together.

    Up to MOST_CONTAINERS that may be too many: brackets in their strings count then.
    """
    n_brackets = sum(map(_brackets, documents))
    if n_brackets <= MOST_CONTAINERS:
        return n_brackets
    plain = (text.replace("\\\\", "").replace('\\"', "") for text in documents)
    return sum(_brackets(text) - sum(_brackets(string[0]) for string in _STRING.finditer(text)) for text in plain)


def _brackets(text: str) -> int:
    return text.count("[") + text.count("{")


def decode(kind: Callable[..., _T], value: object) -> _T:
    """Return `value`, as JSON has it, as a dataclass `kind`. Raises ValueError where anything is not as declared.

    Whole numbers are not negative, the others more than 0 and finite; keys are complete and known.
    """
    fields = _hints(kind)
    if not isinstance(value, dict) or value.keys() != fields.keys():
        raise ValueError(f"not a {getattr(kind, '__name__', kind)}: {str(value)[:80]!a}")
    return kind(**{name: _decode_field(hint, value[name]) for name, hint in fields.items()})


@functools.cache
def _hints(kind: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the fields of a dataclass with their types, which takes longer to find out than to decode one."""
    return MappingProxyType(typing.get_type_hints(kind))


def _decode_field(hint: Any, value: object) -> Any:
    if typing.get_origin(hint) is tuple:
        parts = typing.get_args(hint)
        if isinstance(value, list):
            hints = [parts[0]] * len(value) if parts[-1] is Ellipsis else list(parts)
            return tuple(_decode_field(part, item) for part, item in zip(hints, value, strict=True))
    elif dataclasses.is_dataclass(hint):
        return decode(hint, value)  # type: ignore[arg-type]
    elif isinstance(value, str | bool):
        if type(value) is hint:
            return value
    elif (hint is float or type(value) is hint) and isinstance(value, int | float) and _is_possible(value, hint):
        return float(value) if hint is float else value
    raise ValueError(f"not {hint}: {str(value)[:80]!a}")


def _is_possible(number: float, hint: type) -> bool:
    if isinstance(number, int) and not -LARGEST < number < LARGEST:
        return False  # before it is made a float, which the largest cannot be
    return math.isfinite(number) and (number > 0 if hint is float else number >= 0)


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _whole(digits: str) -> int:
    n_digits = len(digits.lstrip("-"))
    if n_digits > MOST_DIGITS:
        raise ValueError(f"a number of {n_digits} digits, at most {MOST_DIGITS} make sense")
    return int(digits)


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:MOST_DIGITS]} is beyond any float")
    return number


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key is there twice")
    return made


_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_int=_whole, parse_float=_finite, object_pairs_hook=_unique)


def _check_depth(value: Any) -> None:
    """Raise ValueError where `value` is nested too deep for whoever goes through it by recursion."""
    level = [value]
    for _ in range(MOST_DEPTH + 1):
        level = [
            inner
            for one in level
            if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return
    raise ValueError(_TOO_DEEP)
