"""Chat messages to prompt text, with the Jinja template that the model file brings.

Templates are written for Hugging Face's renderer, so this one gives them the same environment: whitespace rules,
`raise_exception`, `strftime_now`, `tojson`, loop controls and the `generation` tag. A template is a stranger's program:
it runs in Jinja's sandbox, which keeps it from Python's insides and from changing what it is given, but does not
bound its time or memory.

Not covered: tools, images, and other variables that single templates know.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from edge_run.base.errors import ConfigError, ModelFileError

if TYPE_CHECKING:
    from jinja2.nodes import Node
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

TEMPLATE_KEY = "tokenizer.chat_template"

Metadata = Callable[[str], "str | None"]
Message = Mapping[str, str]


class ChatTemplate:
    """Renders a conversation as one model wants to see it.

    source: Jinja text. bos, eos: text of the tokens that begin and end a sequence, `""` where there is none.
    is_override: the caller chose the template, so its mistakes are a ConfigError and not a ModelFileError.
    now: what time the template is told. Raises ConfigError or ModelFileError for text that is not Jinja.
    Rendering changes nothing: one template may serve many threads.
    """

    def __init__(
        self,
        source: str,
        bos: str,
        eos: str,
        is_override: bool = False,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.source = source
        self._variables = {"bos_token": bos, "eos_token": eos, "tools": None, "documents": None}
        self._is_override = is_override
        environment = _environment(now)
        try:
            self._template = environment.from_string(source)
        except Exception as error:  # a compiler fed with any text: also RecursionError and the like
            raise self._broken(error) from error

    @classmethod
    def from_model(cls, metadata: Metadata, bos: str, eos: str, override: str | None = None) -> ChatTemplate | None:
        """Return the model's template, or None where it has none (use plain completion then).

        metadata: a key of the model file to its text, or None. override: Jinja text to use instead, or the path of
        a file with it. Raises ConfigError for an override that cannot be read or is not Jinja, ModelFileError for a
        template of the file that is not Jinja.
        """
        if override is not None:
            return cls(_override_text(override), bos, eos, is_override=True)
        source = metadata(TEMPLATE_KEY)
        return cls(source, bos, eos) if source else None

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """Return the prompt for `messages`, oldest first, each with a `role` and a `content`.

        add_generation_prompt: end with what opens the assistant's answer. The text holds special tokens as text,
        with the one that begins a sequence where the template writes it: parse them when tokenizing, and begin the
        sequence only once. Raises ConfigError for messages that cannot be or that the template refuses, and
        ModelFileError (ConfigError for an override) when the template itself fails.
        """
        plain = [_checked(index, message) for index, message in enumerate(messages)]
        if not plain:
            raise ConfigError("chat: no messages; give at least one, such as the user's")
        variables = {**self._variables, "messages": plain, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(variables)
        except _Refused as refusal:
            raise ConfigError(f"chat: the model's template refuses these messages: {_one_line(refusal)}") from None
        except Exception as error:  # a stranger's program may fail in any way
            raise self._broken(error) from error

    def _broken(self, error: Exception) -> ConfigError | ModelFileError:
        line = getattr(error, "lineno", None)
        place = f", line {line}" if line else ""
        reason = f"{type(error).__name__}: {_one_line(error)}"
        if self._is_override:
            return ConfigError(f"chat template{place}: {reason}", line=line)
        advice = "give another one as chat template, or use plain completion"
        return ModelFileError(f"chat template of the model file{place}: {reason}; {advice}", line=line)


class _Refused(Exception):
    """The template called `raise_exception`: it cannot express these messages."""


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    """Return a sandbox that renders as Hugging Face's `apply_chat_template` does."""
    from jinja2.ext import Extension, LoopControlExtension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        """Renders what `{% generation %}` encloses; the tag marks training targets and has no other effect."""

        tags = {"generation"}  # noqa: RUF012  Jinja's own declaration

        def parse(self, parser: Parser) -> list[Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda layout: now().strftime(layout)
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


def _override_text(override: str) -> str:
    """Return the template that `override` is, or the text of the file that it names."""
    if any(mark in override for mark in ("{{", "{%", "{#", "\n")):
        return override
    try:
        return Path(override).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"chat template {override!r}: not Jinja text and not a readable file: {error}") from error


def _checked(index: int, message: object) -> dict[str, str]:
    """Return a copy of one message; raise ConfigError unless its role and content are text."""
    if not isinstance(message, Mapping):
        raise ConfigError(f"chat message {index}: must have a role and a content, found {type(message).__name__}")
    for key in ("role", "content"):
        if not isinstance(message.get(key), str):
            found = type(message[key]).__name__ if key in message else "none"
            raise ConfigError(f"chat message {index}: {key} must be text, found {found}", index=index)
    if not message["role"]:
        raise ConfigError(f"chat message {index}: role must not be empty", index=index)
    return dict(message)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else text[:199] + "…"
