"""Where the user's folders are: the same for the command line and for Python."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_run.base.config import ModelConfig
from edge_run.base.errors import ConfigError
from edge_run.base.files.folders import cache_folder, config_folder, mesh_folder
from edge_run.cli.shared.config_file import config_path, read_config_file
from edge_run.cli.shared.options import SETTINGS


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_folders_lie_in_the_home_folder(home: Path) -> None:
    assert mesh_folder() == home / ".config/edge-run/mesh"
    assert config_path() == home / ".config/edge-run/config.toml"
    assert ModelConfig().cache == cache_folder() == home / ".cache/edge-run"


def test_folders_lie_where_the_user_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/settings")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert mesh_folder() == Path("/settings/edge-run/mesh")
    assert config_path() == Path("/settings/edge-run/config.toml")
    assert ModelConfig().cache == Path("/caches/edge-run")
    assert ModelConfig(cache_folder=Path("here")).cache == Path("here")


def test_a_relative_folder_counts_for_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "settings")
    assert config_folder() == home / ".config/edge-run"


@pytest.mark.parametrize("place", ["~", "", "relative"])
def test_without_a_home_folder_it_is_said(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.path.expanduser", lambda path: path.replace("~", place))
    for folder in (mesh_folder, cache_folder, lambda: ModelConfig().cache):
        with pytest.raises(ConfigError, match="home folder: unknown"):
            folder()


@pytest.mark.parametrize("place", ["~", "", "relative"])
def test_what_lies_in_the_current_folder_is_nobodys_settings(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may write there: a folder that was unpacked, or one of a shared drive."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.path.expanduser", lambda path: path.replace("~", place))
    folder = tmp_path / place / ".config" / "edge-run"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text('memory = "1GiB"\n')
    assert config_path() is None
    assert read_config_file(config_path(), SETTINGS) == {}
