"""One request to a child process, and its answer: a line of JSON on standard input, two lines on standard output.

The first line of the answer is `ok` or `error`, the second what was asked for, or what the parent is to raise.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NoReturn


def request_line(**fields: object) -> bytes:
    """Return a request as `take_request` reads it; paths become text. `flags`: how messages name options here."""
    from edge_run.base.errors import flags_of_options

    request = {**fields, "flags": flags_of_options()}
    return json.dumps(request, default=os.fspath).encode("utf-8", "surrogateescape") + b"\n"


def take_request() -> Any:
    """Return the request; from now on this process ends when its standard input does, which is when the parent ends."""
    request = json.loads(sys.stdin.buffer.readline().decode("utf-8", "surrogateescape"))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    return request


def give_answer(make: Callable[[], str], flags: Mapping[str, str] | None) -> NoReturn:
    """Answer with what `make` returns, or with the EdgeRunError that it raises, and end this process.

    flags: those of the request.
    """
    from edge_run.base.errors import EdgeRunError, options_as_flags

    try:
        with nullcontext() if flags is None else options_as_flags(lambda: flags):
            answer, text = "ok", make()
    except EdgeRunError as error:
        from edge_run.base.error_codes import error_document

        answer, text = "error", json.dumps(error_document(error))
    sys.stdout.buffer.write(f"{answer}\n{text}".encode("utf-8", "surrogateescape"))
    sys.stdout.flush()
    os._exit(0)  # what is loaded need not be freed piece by piece


def read_answer(output: bytes) -> str | None:
    """Return what a child that ended well answered; None where that is no answer. Raises what the child met."""
    from edge_run.base.error_codes import error_of

    answer, _, text = output.decode("utf-8", "surrogateescape").partition("\n")
    if answer == "error":
        raise error_of(json.loads(text))
    return text if answer == "ok" else None


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)
