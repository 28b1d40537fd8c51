"""Which server a command speaks to, with which key, and what a server is asked with."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edge_run.base.errors import ConfigError
from edge_run.base.files.key_files import MOST_KEY_FILE_BYTES, key_lines, tell_if_open
from edge_run.base.files.texts import read_text_file
from edge_run.cli.shared.options import SETTINGS
from edge_run.cli.shared.setting import KEY_VARIABLE, PATH
from edge_run.cli.shared.settings_command import origin

if TYPE_CHECKING:
    from edge_run.runtime.client.connection import ServerAddress

_ONLY_SERVERS = {"server", "api_key_file", "clients", "seconds"}
_ASKED_WITH = _ONLY_SERVERS | {
    *("model_file", "model", "prompt", "file", "prompt_tokens", "system_prompt", "predict", "stop", "json", "verbose"),
    *("grammar", "grammar_file", "json_schema", "json_schema_file"),
    *(str(setting.name) for setting in SETTINGS if setting.group == "Sampling"),
}
SERVER_OPTIONS = [
    click.Option(
        ["--server"],
        metavar="URL",
        help="A running edge-run serve, or another server of OpenAI's API; a number is a port of this machine.",
    ),
    click.Option(
        ["--api-key-file"],
        type=PATH,
        metavar="FILE",
        help=f"The first line of FILE is the key for the server; else {KEY_VARIABLE} is.",
    ),
]


def asked_server(context: click.Context, given: dict[str, Any]) -> ServerAddress | None:
    """Return the server that was named, with its key; None where none was.

    Raises ConfigError also for a flag that would do nothing: of a model where a server is asked, and the reverse.
    """
    is_asked = given["server"] is not None
    for name, flag in _given_flags(context):
        if is_asked and name not in _ASKED_WITH:
            raise ConfigError(f"{flag}: is for a model that is opened here; leave it out with --server")
        if not is_asked and name in _ONLY_SERVERS:
            raise ConfigError(f"{flag}: is for a server; name it with --server")
    if not is_asked:
        return None
    file: Path | None = given["api_key_file"]
    from edge_run.runtime.client.connection import server_address

    key = os.environ.get(KEY_VARIABLE, "")
    if file is not None:
        tell_if_open(file, context.obj.say)
        keys = key_lines(read_text_file(file, f"--api-key-file {file}", MOST_KEY_FILE_BYTES))
        key = next(iter(keys), "")
    if not (key.isascii() and key.isprintable()):
        raise ConfigError("the key for --server: must be letters, digits and signs of ASCII")
    return server_address(given["server"], key)


def _given_flags(context: click.Context) -> Iterator[tuple[str, str]]:
    """Yield the name of each option that was given as a flag, and the flag."""
    for parameter in context.command.params:
        name = str(parameter.name)
        if isinstance(parameter, click.Option) and origin(context, name) == "flag":
            yield name, next(flag for flag in parameter.opts if flag.startswith("--"))
