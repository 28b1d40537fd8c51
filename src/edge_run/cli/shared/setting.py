"""What an option is: a setting, which the environment and the configuration file can set too; a path; a size."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import click

from edge_run.base.errors import ConfigError
from edge_run.base.units import parse_size

ENVIRONMENT_PREFIX = "EDGE_RUN_"
KEY_VARIABLE = f"{ENVIRONMENT_PREFIX}API_KEY"  # for a server; no setting, as no flag may hold it, which others see
BROKER_VARIABLE = f"{ENVIRONMENT_PREFIX}BROKER"  # of a mesh, whose password others would see in a flag
TEST_MODELS_VARIABLE = f"{ENVIRONMENT_PREFIX}REAL_MODELS"  # read by the tests and benchmarks alone: CONTRIBUTING.md

_MOST_NUMBER = 2.0**63


class Setting(click.Option):
    """An option with a group in the help, and an environment variable: `EDGE_RUN_` and its first long name.

    field: the field of ModelConfig or SamplingConfig that it sets, empty for none. A value of None is one not given.
    """

    def __init__(self, *names: str, group: str, field: str = "", **attributes: Any) -> None:
        super().__init__(names, **attributes)
        self.group, self.field = group, field
        self.envvar = ENVIRONMENT_PREFIX + str(self.name).upper()

    def value_from_envvar(self, ctx: click.Context) -> Any:
        """Return what the environment says; of a setting that may be repeated, each line is a value."""
        value = self.resolve_envvar_value(ctx)
        return value.splitlines() if value is not None and self.multiple else super().value_from_envvar(ctx)

    @property
    def key(self) -> str:
        """The key in the configuration file: the first long name, without the dashes before it."""
        return str(self.name).replace("_", "-")

    def is_right(self, value: object) -> bool:
        """Return whether `value` is of the kind that a configuration file gives this setting."""
        if self.is_flag:
            return isinstance(value, bool)
        if self.multiple:
            return isinstance(value, list) and all(isinstance(item, str) and "\0" not in item for item in value)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _MOST_NUMBER
        if self._is_whole and isinstance(value, float):
            is_number = is_number and value.is_integer()
        is_text = isinstance(value, str) and "\0" not in value  # which no path and no flag can hold
        return is_text or (is_number and not self._is_path)

    @property
    def kind(self) -> str:
        """What `is_right` asks for, in words."""
        if self.is_flag:
            return "true or false"
        if self.multiple:
            return "a list of texts"
        return "one text" if self._is_path else f"one text or {'whole ' * self._is_whole}number"

    @property
    def _is_whole(self) -> bool:
        return isinstance(self.type, click.types.IntParamType)

    @property
    def _is_path(self) -> bool:
        return isinstance(self.type, click.Path)


class HomePath(click.Path):
    """A path, where `~` is the user's home: a shell says so in `--option ~/file`, but not in `--option=~/file`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the path, whether it is there or not. An empty one would be the current folder."""
        if value == "":
            self.fail("names nothing; give a path", param, ctx)
        return Path(os.path.expanduser(value))


class Text(click.types.StringParamType):
    """Text in UTF-8. Bytes of a command line that are none come as surrogates, of which no model makes tokens."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the text."""
        text = str(super().convert(value, param, ctx))
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            byte = f"byte 0x{ord(text[error.start]) & 0xFF:02x} at letter {error.start + 1:,}"
            self.fail(f"is not UTF-8 text ({byte}); give it as UTF-8, as iconv -t UTF-8 makes it", param, ctx)
        return text


class NumberRange(click.FloatRange):
    """Numbers from a least to a greatest one, without nan, which click lets pass: it is not less than either."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is no number from {self.min} to {self.max}.", param, ctx)
        return number


PATH = HomePath()
TEXT = Text()


def size_option(
    context: click.Context, parameter: click.Parameter, text: str | int | None, least_bytes: int = 1
) -> int | None:
    """Return the bytes that a size means, as people write it: a click callback."""
    try:
        return None if text is None else parse_size(text, least_bytes)
    except ConfigError as error:
        raise click.BadParameter(str(error), context, parameter) from error


def sizes_option(context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> tuple[int, ...]:
    """Return the bytes of each of several sizes: a click callback."""
    sizes = (size_option(context, parameter, text) for text in texts)
    return tuple(size for size in sizes if size is not None)
