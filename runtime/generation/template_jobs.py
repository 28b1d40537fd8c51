"""Renders chat templates: the jobs of a `Cell`, as a template is a stranger's program.

Templates are written for Hugging Face's renderer, so this one gives them the same environment: whitespace rules,
`raise_exception`, `strftime_now`, `tojson`, loop controls and the `generation` tag; and the day in two forms, which
llama.cpp tells them (`date_string`, `datetime`). Jinja's sandbox keeps a template
from Python's insides and from changing what it is given; the cell bounds its time and memory.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

from edge_run.base.errors import ConfigError, ModelFileError
from edge_run.base.units import MIB
from edge_run.runtime.processes.cell_child import BYTES_OF_A_CHARACTER, allow_memory, is_cell
from edge_run.runtime.processes.child_process import skip_package_code

if is_cell():
    skip_package_code("jinja2")  # what the package imports besides takes a third of the time

from jinja2.ext import Extension, LoopControlExtension
from jinja2.sandbox import ImmutableSandboxedEnvironment

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.nodes import Node
    from jinja2.parser import Parser

LEAST_CHARACTERS, MOST_GROWTH = MIB, 8  # a text may be so long, and so much longer than what is told
LEAST_BYTES = 64 * MIB  # what compiling and rendering may take, besides what a long conversation is given


def compile_template(source: str, is_override: bool) -> bytes:
    """Find out whether `source` is Jinja. Raises what `render` raises for one that is not."""
    allow_memory(LEAST_BYTES + BYTES_OF_A_CHARACTER * len(source))
    _compiled(source, is_override)
    return b""


def render(source: str, is_override: bool, now: str, variables: Mapping[str, Any]) -> bytes:
    """Return the text of a template, as UTF-8. now: what time it is told, in ISO format.

    Raises ConfigError where the template refuses what it is given, and ModelFileError (ConfigError for an override)
    when the template itself fails.
    """
    size = len(source) + len(json.dumps(variables))
    allow_memory(LEAST_BYTES + BYTES_OF_A_CHARACTER * size)
    template = _compiled(source, is_override)
    clock = datetime.fromisoformat(now)
    told = {"date_string": clock.strftime("%d %b %Y"), "datetime": clock.strftime("%b %d %Y"), **variables}
    try:
        text = template.render(told, strftime_now=clock.strftime)
        if len(text) > (most := LEAST_CHARACTERS + MOST_GROWTH * size):
            raise ValueError(f"makes {len(text):,} characters of {size:,}, {most:,} are the most")
        return text.encode("utf-8", "surrogatepass")
    except _Refused as refusal:
        raise ConfigError(f"chat: the model's template refuses these messages: {_one_line(refusal)}") from None
    except MemoryError:
        raise
    except Exception as error:  # a stranger's program may fail in any way
        raise _broken(error, is_override) from error


@functools.lru_cache(maxsize=1)
def _compiled(source: str, is_override: bool) -> Template:
    try:
        return _environment().from_string(source)
    except MemoryError:
        raise
    except Exception as error:  # a compiler fed with any text: also RecursionError and the like
        raise _broken(error, is_override) from error


def _broken(error: Exception, is_override: bool) -> ConfigError | ModelFileError:
    line = getattr(error, "lineno", None) or 0
    place = f", line {line}" if line else ""
    reason = f"{type(error).__name__}: {_one_line(error)}"
    if is_override:
        return ConfigError(f"chat template{place}: {reason}", line=line)
    advice = "give another one as chat template, or use plain completion"
    return ModelFileError(f"chat template of the model file{place}: {reason}; {advice}", line=line)


class _Refused(Exception):
    """The template called `raise_exception`: it cannot express these messages."""


class _GenerationTag(Extension):
    """Renders what `{% generation %}` encloses; the tag marks training targets and has no other effect."""

    tags = {"generation"}  # noqa: RUF012  Jinja's own declaration

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    """Return a sandbox that renders as Hugging Face's `apply_chat_template` does."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    return environment


def _refuse(message: object) -> NoReturn:
    raise _Refused(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as it is: Jinja's own filter would escape `<`, `>`, `&` and `'` for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error)[:1000].split())
    return text if len(text) <= 200 else text[:199] + "…"
