"""JSON that is believed only where it is exactly what a dataclass declares."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")


def decode(kind: Callable[..., _T], value: object) -> _T:
    """Return `value`, as JSON has it, as a dataclass `kind`. Raises ValueError where anything is not as declared.

    Whole numbers are not negative, the others more than 0 and finite; keys are complete and known.
    """
    fields = typing.get_type_hints(kind)
    if not isinstance(value, dict) or value.keys() != fields.keys():
        raise ValueError(f"not a {getattr(kind, '__name__', kind)}: {str(value)[:80]}")
    return kind(**{name: _decode_field(hint, value[name]) for name, hint in fields.items()})


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
    raise ValueError(f"not {hint}: {str(value)[:80]}")


def _is_possible(number: float, hint: type) -> bool:
    return math.isfinite(number) and (number > 0 if hint is float else number >= 0)
