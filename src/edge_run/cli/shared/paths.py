"""Files and folders that a command is given."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click


class HomePath(click.Path):
    """A path, where `~` is the user's home: a shell says so in `--option ~/file`, but not in `--option=~/file`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the path, whether it is there or not."""
        return Path(os.path.expanduser(value))


PATH = HomePath()
