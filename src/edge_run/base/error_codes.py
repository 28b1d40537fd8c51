"""Errors as they leave a process: the code of their kind, the words, and the figures, never a name of Python's.

A code is the exit code of the kind. One that is not known here, as another version may say it, is a plain EdgeRunError.
A kind that has the exit code of the kind above it has a word besides, without which it is of the kind above.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from edge_run.base import errors
from edge_run.base.errors import EdgeRunError, LogitsError, ModelFileMissing
from edge_run.base.fields import Fields, JsonValue

KINDS: dict[int, type[EdgeRunError]] = {
    kind.exit_code: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, EdgeRunError) and "exit_code" in vars(kind)
}
SPECIAL: dict[str, type[EdgeRunError]] = {"missing": ModelFileMissing, "logits": LogitsError}


def _figures_of(kind: type[EdgeRunError]) -> list[str]:
    """Return the names of the figures that errors of a kind have besides their words."""
    return [field.name for field in dataclasses.fields(kind) if field.name != "message"]


def _kind_of(code: int, word: str) -> type[EdgeRunError]:
    """Return the kind of errors with `code`: the one that `word` says, where it has that code."""
    special = SPECIAL.get(word)
    return special if special is not None and special.exit_code == code else KINDS.get(code, EdgeRunError)


def error_document(error: EdgeRunError) -> dict[str, JsonValue]:
    """Return `error` as JSON can write it."""
    figures = {name: value for name in _figures_of(type(error)) if (value := getattr(error, name))}
    found: dict[str, JsonValue] = {"code": error.exit_code, "error": error.message, "figures": figures}
    word = next((word for word, kind in SPECIAL.items() if isinstance(error, kind)), "")
    return {**found, "special": word} if word else found


def error_of(document: Mapping[str, Any]) -> EdgeRunError:
    """Return the error that a process of our own wrote with `error_document`."""
    kind = _kind_of(document["code"], document.get("special", ""))
    known = _figures_of(kind)
    return kind(document["error"], **{name: it for name, it in document["figures"].items() if name in known})


def read_error(document: Fields) -> EdgeRunError:
    """Return the error that another device wrote. Raises ProtocolError for figures that cannot be."""
    code = document.integer("code") if document.has("code") else EdgeRunError.exit_code
    found = Fields(document.table("figures") if document.has("figures") else {}, document.what, document.node)
    special = document.name("special") if document.has("special") else ""
    figures: dict[str, int | str] = {}
    for name in _figures_of(_kind_of(code, special)):
        if found.has(name):
            figures[name] = found.name(name) if name == "node" else found.integer(name)
    return error_of({"code": code, "error": document.words("error"), "figures": figures, "special": special})
