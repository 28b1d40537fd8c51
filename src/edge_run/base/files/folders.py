"""Where the user's own folders are, as the XDG Base Directory Specification names them."""

from __future__ import annotations

import os
from pathlib import Path

from edge_run.base.errors import ConfigError, option


def config_folder() -> Path | None:
    """Return where settings lie: `$XDG_CONFIG_HOME/edge-run`, or `~/.config/edge-run`. None where no home is known."""
    return _folder("XDG_CONFIG_HOME", ".config")


def cache_folder() -> Path:
    """Return where temporary files may lie: `$XDG_CACHE_HOME/edge-run`, or `~/.cache/edge-run`. Raises ConfigError."""
    folder = _folder("XDG_CACHE_HOME", ".cache")
    if folder is None:
        folder_option = option("cache_folder")
        raise ConfigError(f"home folder: unknown; set HOME, or name a folder for small files with {folder_option}")
    return folder


def mesh_folder() -> Path:
    """Return where the device's key and its cluster are kept: `mesh` in `config_folder`. Raises ConfigError."""
    folder = config_folder()
    if folder is None:
        raise ConfigError("home folder: unknown; set HOME, or XDG_CONFIG_HOME")
    return folder / "mesh"


def _folder(variable: str, default: str) -> Path | None:
    """Return edge-run's own folder under `$variable`, or under `~/default` where that is unset or relative.

    None where the home is unknown or relative: what lies in the current folder is whoever's, and not the user's.
    """
    places = (Path(os.environ.get(variable) or ""), Path(os.path.expanduser("~"), default))
    return next((base / "edge-run" for base in places if base.is_absolute()), None)
