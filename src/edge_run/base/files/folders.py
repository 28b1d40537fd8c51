"""Where the user's own folders are, as the XDG Base Directory Specification names them."""

from __future__ import annotations

import os
from pathlib import Path

from edge_run.base.errors import ConfigError, option


def config_folder() -> Path:
    """Return where settings lie: `$XDG_CONFIG_HOME/edge-run`, or `~/.config/edge-run`.

    Where the user has no home folder, the path begins with `~`.
    """
    return _folder("XDG_CONFIG_HOME", ".config")


def cache_folder() -> Path:
    """Return where temporary files may lie: `$XDG_CACHE_HOME/edge-run`, or `~/.cache/edge-run`. Raises ConfigError."""
    folder = _folder("XDG_CACHE_HOME", ".cache")
    if not folder.is_absolute():
        folder_option = option("cache_folder")
        raise ConfigError(f"home folder: unknown; set HOME, or name a folder for small files with {folder_option}")
    return folder


def mesh_folder() -> Path:
    """Return where the device's key and its cluster are kept: `mesh` in `config_folder`. Raises ConfigError."""
    folder = config_folder() / "mesh"
    if not folder.is_absolute():
        raise ConfigError("home folder: unknown; set HOME, or XDG_CONFIG_HOME")
    return folder


def _folder(variable: str, default: str) -> Path:
    """Return edge-run's own folder under `$variable`, or under `~/default` where that is unset or relative."""
    base = Path(os.environ.get(variable) or "")
    return (base if base.is_absolute() else Path(os.path.expanduser("~"), default)) / "edge-run"
