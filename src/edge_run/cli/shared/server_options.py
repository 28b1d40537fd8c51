"""Which server a command speaks to, and with which key."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edge_run.base.errors import ConfigError
from edge_run.base.files import read_text_file
from edge_run.cli.shared.setting import KEY_VARIABLE, PATH

if TYPE_CHECKING:
    from edge_run.runtime.client.connection import ServerAddress

MOST_KEY_FILE_BYTES = 1 << 20
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


def asked_server(given: dict[str, Any]) -> ServerAddress | None:
    """Return the server that was named, with its key; None where none was. Raises ConfigError."""
    file: Path | None = given["api_key_file"]
    if given["server"] is None:
        if file is not None:
            raise ConfigError("--api-key-file: is for a server; name it with --server")
        return None
    from edge_run.runtime.client.connection import server_address

    key = os.environ.get(KEY_VARIABLE, "")
    if file is not None:
        lines = read_text_file(file, f"--api-key-file {file}", MOST_KEY_FILE_BYTES).splitlines()
        key = next((line.strip() for line in lines if line.strip() and not line.startswith("#")), "")
    if not (key.isascii() and key.isprintable()):
        raise ConfigError("the key for --server: must be letters, digits and signs of ASCII")
    return server_address(given["server"], key)
