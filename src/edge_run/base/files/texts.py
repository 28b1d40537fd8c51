"""Texts of others: read within limits, and refused in words where they are no text; names of files as text."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from edge_run.base.errors import ConfigError, reason_of
from edge_run.base.units import format_size

_NO_TEXT = re.compile("[\ud800-\udfff]")  # as Python has the bytes of a name that are no text


def read_text_file(path: str | Path, what: str, most_bytes: int) -> str:
    """Return the text of the file at `path`, `~` replaced, of at most `most_bytes`, and no more of it is ever read.

    what: the beginning of an error. Raises ConfigError where it cannot be read, is longer, or is not UTF-8.
    """
    with opened_file(path, what) as file:
        return read_text(file, what, most_bytes)


@contextlib.contextmanager
def opened_file(path: str | Path, what: str) -> Iterator[BinaryIO]:
    """Open the file at `path`, `~` replaced, for a block. Raises ConfigError, which begins with `what`."""
    try:
        with open(os.path.expanduser(path), "rb") as file:
            yield file
    except OSError as error:
        why = reason_of(error)
        raise ConfigError(f"{what}: cannot be read ({why}); check the path and its permissions") from error
    except ConfigError:
        raise
    except ValueError as error:  # a name with a zero character
        raise ConfigError(f"{what}: cannot be read ({error}); check the path") from error


def read_text(file: BinaryIO, what: str, most_bytes: int) -> str:
    """Return all text of `file`; see `read_text_file`. Raises OSError where reading fails."""
    pieces, rest = [], most_bytes + 1
    while rest and (piece := file.read(min(rest, 1 << 20))):
        pieces.append(piece)
        rest -= len(piece)
    if not rest:
        raise ConfigError(f"{what}: longer than {format_size(most_bytes)}; shorten it", needed_bytes=most_bytes)
    return decoded(b"".join(pieces), what)


def lines_of(file: BinaryIO, what: str, most_bytes: int) -> Iterator[str]:
    """Yield the lines of `file` without their ends, LF or CR LF, as they come, each of at most `most_bytes`.

    what: the beginning of an error. Raises ConfigError for a longer one, or one that is not UTF-8; OSError.
    """
    for number in itertools.count(1):
        line = file.readline(most_bytes + len(b"\r\n"))
        if not line:
            return
        line = line.removesuffix(b"\n").removesuffix(b"\r")
        if len(line) > most_bytes:
            raise ConfigError(
                f"{what}: line {number:,}: longer than {format_size(most_bytes)}; shorten it", needed_bytes=most_bytes
            )
        yield decoded(line, f"{what}: line {number:,}")


def as_text(name: str) -> str:
    """Return the name of a file, or what is said of one, as text: the system lets names hold bytes that are none."""
    return _NO_TEXT.sub("\N{REPLACEMENT CHARACTER}", name)


def decoded(data: bytes, what: str) -> str:
    """Return the text that `data` is in UTF-8. what: the beginning of an error. Raises ConfigError where it is none."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{what}: not UTF-8 text ({error.reason} at byte {error.start:,}); save it as UTF-8, as iconv -t UTF-8 does"
        ) from error
