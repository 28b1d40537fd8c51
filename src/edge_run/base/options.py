"""Keyword options that become a config: their names, their types, and what a config says where one cannot be."""

from __future__ import annotations

import dataclasses
import functools
import operator
import sys
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union

from edge_run.base.errors import ConfigError
from edge_run.base.protocols import TokenArray

if sys.version_info >= (3, 11):  # at run time too, for who asks for the types of arguments
    from typing import Self as Self  # noqa: PLC0414 - for others
    from typing import Unpack as Unpack  # noqa: PLC0414 - for others
else:
    from typing_extensions import Self as Self  # noqa: PLC0414 - for others
    from typing_extensions import Unpack as Unpack  # noqa: PLC0414 - for others

_Config = TypeVar("_Config")
_ACCEPTED: dict[type, tuple[type, ...]] = {int: (Integral,), float: (Real,), Path: (Path, str), Sequence: (Iterable,)}
_WORDS: dict[Any, str] = {int: "a whole number", float: "a number", str: "text", bool: "True or False", Path: "a path"}
_WORDS |= {type(None): "None", Sequence: "a list", TokenArray: "a list", Mapping: "a mapping", Callable: "a function"}
_ELSEWHERE = {  # what llama-cpp-python, transformers, vLLM, Ollama and others call it
    "n_ctx": "context_tokens",
    "num_ctx": "context_tokens",
    "max_model_len": "context_tokens",
    "n_threads": "threads",
    "n_ubatch": "micro_batch_tokens",
    "n_seq_max": "sequences",
    "n_gpu_layers": "gpu_memory",
    "type_k": "kv_type",
    "type_v": "kv_type",
    "n_keep": "context_keep_tokens",
    "temp": "temperature",
    "repetition_penalty": "repeat_penalty",
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "response_format": "json_schema",
    "guided_json": "json_schema",
    "stop_sequences": "stop",
    "timeout": "deadline_s",
}


def make_config(kind: type[_Config], options: Mapping[str, Any], beside: Sequence[str] = ()) -> _Config:
    """Return a config of `kind` from keyword options. Raises ConfigError, with the known names, for an unknown one.

    beside: what else the caller takes by name, and the config does not have.
    """
    known = [*beside, *(field.name for field in dataclasses.fields(kind))]  # type: ignore[arg-type]
    if unknown := sorted(options.keys() - set(known)):
        import difflib  # for mistakes alone

        near = [_ELSEWHERE.get(unknown[0], ""), *difflib.get_close_matches(unknown[0], known, 1)]
        hint = next((f" (is it {name}?)" for name in near if name in known), "")
        raise ConfigError(f"option {unknown[0]!r}: unknown{hint}; known are {', '.join(known)}")
    return kind(**options)


def config_of(
    kind: type[_Config], config: _Config | None, options: Mapping[str, Any], beside: Sequence[str] = ()
) -> _Config:
    """Return `config`, or where there is none one of keyword options, as `make_config` does.

    Raises ConfigError where both are given, or `config` is of another kind.
    """
    require(config is None or isinstance(config, kind), f"config {config!r:.60}: must be a {kind.__name__}, or None")
    if config is not None and options:
        raise ConfigError("config and single options: give one of the two")
    return config or make_config(kind, options, beside)


def check_types(config: Any) -> None:
    """Raise ConfigError where a field of a dataclass is none of what it is declared as, or none of the words.

    Whole numbers are numbers, truths are neither, and a text is a path too. Whole numbers of other kinds, as NumPy's,
    become Python's: those overflow, and JSON has none.
    """
    for name, kinds in _declared(config.__class__).items():
        value = getattr(config, name)
        accepted = tuple(one for kind in kinds for one in _ACCEPTED.get(kind, (kind,)))
        if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in kinds):
            words = " or ".join(dict.fromkeys(_WORDS.get(kind, kind.__name__) for kind in kinds))
            raise ConfigError(f"{name.replace('_', ' ')} {value!r:.60}: must be {words}")
        if int in kinds and isinstance(value, Integral) and not isinstance(value, int):
            object.__setattr__(config, name, operator.index(value))  # also where the dataclass is frozen
    for name, choices in _choices(config.__class__).items():
        value = getattr(config, name)
        if isinstance(value, str) and value not in choices:
            or_none = " or None" * (type(None) in _declared(config.__class__)[name])
            raise ConfigError(f"{name.replace('_', ' ')} {value!r:.60}: must be one of {', '.join(choices)}{or_none}")


_hints = functools.cache(typing.get_type_hints)


@functools.cache
def _declared(kind: type) -> Mapping[str, tuple[type, ...]]:
    """Return the types of each field; of a sequence or a mapping, that it is one."""
    return {name: tuple(map(_class_of, _ways(hint))) for name, hint in _hints(kind).items()}


@functools.cache
def _choices(kind: type) -> Mapping[str, tuple[str, ...]]:
    """Return the words of each field that may be no other text."""
    ways = {name: _ways(hint) for name, hint in _hints(kind).items() if not {str, Path} & {*_ways(hint)}}
    words = {name: [word for one in of for word in _words_of(one)] for name, of in ways.items()}
    return {name: tuple(found) for name, found in words.items() if found}


def _ways(hint: Any) -> tuple[Any, ...]:
    """Return what a hint is, one at least; `Literal[...] | None` is a union of an older kind."""
    return typing.get_args(hint) if typing.get_origin(hint) in (Union, UnionType) else (hint,)


def _words_of(hint: Any) -> tuple[str, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) is Literal else ()


def _class_of(hint: Any) -> type:
    """Return what a value of a hint is an instance of: text where the hint is some words."""
    origin: type = typing.get_origin(hint) or hint
    return str if _words_of(hint) else origin


def whole_numbers(what: str, given: Any) -> list[int]:
    """Return the whole numbers that `given` is, NumPy's too. Raises ConfigError for what is none, called `what`."""
    found = list(given)
    if all(type(one) is int for one in found):
        return found
    for one in found:
        if not is_whole_number(one):
            raise ConfigError(f"{what}: {one!r:.60} is no token, which is a whole number")
    return [operator.index(one) for one in found]


def texts_of(what: str, given: Any) -> tuple[str, ...]:
    """Return the texts that `given` is, which may be a single one. Raises ConfigError, called `what`, for others."""
    found = (given,) if isinstance(given, str) else tuple(given)
    if strange := [one for one in found if not isinstance(one, str)]:
        raise ConfigError(f"{what} {strange[0]!r:.60}: must be text")
    return found


def is_whole_number(given: object) -> bool:
    """Return whether `given` is a whole number, which True is not."""
    return isinstance(given, Integral) and not isinstance(given, bool)


def is_list(given: object) -> bool:
    """Return whether `given` has several things, in an order: a list, a tuple, an array; no text, bytes or mapping."""
    is_bare = isinstance(given, str | bytes | bytearray | memoryview | Mapping)
    has_items = hasattr(given, "__len__") and hasattr(given, "__getitem__")
    return not is_bare and has_items and getattr(given, "ndim", 1) > 0  # an array of no dimension has no length


def require(is_ok: bool, message: str) -> None:
    """Raise ConfigError unless `is_ok`."""
    if not is_ok:
        raise ConfigError(message)
