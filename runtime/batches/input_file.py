"""The requests of a batch, a line of JSON each, as OpenAI's Batch API takes them."""

from __future__ import annotations

import codecs
import itertools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
from msgspec import Meta

from edge_run.base.config import MOST_CONTEXT_TOKENS, REQUEST_TOKENS
from edge_run.base.errors import ConfigError, reason_of, system_errors
from edge_run.base.units import format_size
from edge_run.runtime.server.apis.openai_completions import USUAL_TOKENS
from edge_run.runtime.server.bodies import MOST_BODY_BYTES, decode
from edge_run.runtime.server.refusals import Refusal

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MOST_ID_LETTERS = 512
LOOKED_AT = 100  # requests, for what is usual of all
BYTES_OF_A_TOKEN = 3  # of a request's JSON: more in English, fewer in other languages


class BatchRequest(msgspec.Struct):
    """A line of the input.

    custom_id: what its result is known by; no two lines have the same.
    url: which endpoint the body is for.
    body: the request, as the endpoint takes it.
    """

    custom_id: Annotated[str, Meta(min_length=1, max_length=MOST_ID_LETTERS)]
    url: str
    body: dict[str, Any]
    method: str = "POST"


@dataclass(frozen=True, slots=True)
class NumberedLine:
    """A line of the input that has to be answered.

    number: counted from 1.
    asked: the request, or why the line is none.
    """

    number: int
    asked: BatchRequest | Refusal

    @property
    def key(self) -> str | int:
        """What its result is known by: the `custom_id` of a request, the number of a line that is none."""
        return self.asked.custom_id if isinstance(self.asked, BatchRequest) else self.number


def count_lines(path: Path) -> int:
    """Return how many lines of `path` are not empty. Raises what `read_requests` raises."""
    n_lines, is_new = 0, True
    with system_errors(f"batch {path}"), _opened(path) as file:
        while line := file.readline(MOST_BODY_BYTES):  # the parts of a line that is too long are one
            n_lines += is_new and bool(line.strip())
            is_new = line.endswith(b"\n")
    return n_lines


def usual_tokens(path: Path, most_answer: int | None) -> int:
    """Return about how many tokens a request of `path` has, prompt and answer, by the first ones.

    most_answer: tokens of an answer; None: as many as its request says, and where that says nothing, as many as make it
    a request of `REQUEST_TOKENS`, or half of that. Raises what `read_requests` raises.
    """
    found = list[int]()
    for one in itertools.islice((line.asked for line in read_requests(path)), LOOKED_AT):
        if isinstance(one, BatchRequest):
            prompt = len(msgspec.json.encode(one.body)) // BYTES_OF_A_TOKEN
            bounds = [one.body.get(name) for name in ("max_completion_tokens", "max_tokens")]
            bounds += [USUAL_TOKENS if one.url == COMPLETIONS else None]
            given = (bound for bound in bounds if isinstance(bound, int) and bound > 0)
            asked = min(next(given, MOST_CONTEXT_TOKENS), MOST_CONTEXT_TOKENS)
            usual = max(REQUEST_TOKENS - prompt, REQUEST_TOKENS // 2) if asked == MOST_CONTEXT_TOKENS else asked
            found.append(prompt + min(usual if most_answer is None else most_answer, asked))
    return max(1, round(statistics.median(found))) if found else REQUEST_TOKENS


def read_requests(path: Path) -> Iterator[NumberedLine]:
    """Yield the lines of `path` that are not empty, in their order.

    Raises ConfigError where it cannot be opened, TierReadError where the drive fails.
    """
    seen: set[str] = set()
    with system_errors(f"batch {path}"), _opened(path) as file:
        number = 0
        while line := file.readline(MOST_BODY_BYTES + 1):
            number += 1
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)  # some editors begin with it
            if len(line) > MOST_BODY_BYTES:
                _skip_rest(file, line)
                yield _bad(number, f"the line has more than {format_size(MOST_BODY_BYTES)}")
            elif line.strip():
                yield _read(number, line, seen)


def _read(number: int, line: bytes, seen: set[str]) -> NumberedLine:
    try:
        asked = decode(line, BatchRequest, "the line")
    except Refusal as refusal:
        return NumberedLine(number, refusal)
    if asked.custom_id in seen:
        return _bad(number, f"custom_id {asked.custom_id!r} was on an earlier line; every line needs one of its own")
    seen.add(asked.custom_id)
    return NumberedLine(number, asked)


def _bad(number: int, message: str) -> NumberedLine:
    return NumberedLine(number, Refusal(400, message))


def _skip_rest(file: BinaryIO, line: bytes) -> None:
    while line and not line.endswith(b"\n"):
        line = file.readline(MOST_BODY_BYTES)


def _opened(path: Path) -> BinaryIO:
    try:
        if path.exists() and not path.is_file():  # which may have no end, and is read twice
            raise ConfigError(f"batch {path}: is no file with an end; write the requests into one")
        return path.open("rb")
    except OSError as error:
        raise ConfigError(
            f"batch {path}: cannot be read ({reason_of(error)}); check the path and its permissions"
        ) from error
