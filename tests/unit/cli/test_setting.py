"""What a setting may be, and files and folders where no shell replaces `~`: `--option=~/file`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from edge_run.cli.app import app
from edge_run.cli.shared.options import some_settings
from edge_run.cli.shared.setting import PATH, HomePath


def parameters(command: click.Command) -> Iterator[click.Parameter]:
    """Return those of a command, and of all that belong to it."""
    yield from command.params
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from parameters(found)


def test_a_path_begins_at_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for given, path in (("~/a.gguf", tmp_path / "a.gguf"), ("a~/~", Path("a~/~")), ("~", tmp_path)):
        assert PATH.convert(given, None, None) == path


def test_an_empty_path_is_not_the_current_folder() -> None:
    """As of a variable of the shell that is not set: `--models "$FOLDER"`."""
    with pytest.raises(click.BadParameter, match="names nothing; give a path"):
        PATH.convert("", None, None)


def test_every_path_of_a_command_line_does() -> None:
    found = [one.type for one in parameters(app) if isinstance(one.type, (click.Path, click.File))]
    assert len(found) > 40
    assert {type(one) for one in found} == {HomePath}


def test_what_is_no_number_is_in_no_range() -> None:
    found = [one for one in parameters(app) if isinstance(one.type, click.FloatRange)]
    assert {one.name for one in found} == {"drain", "most_missed", "seconds"}
    for one in found:
        assert one.type.convert("0.25", one, None) == 0.25
        for text in ("nan", "-inf", "inf", "-1", "1e9", "x"):
            with pytest.raises(click.BadParameter):
                one.type.convert(text, one, None)


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("ctx_size", 8192, ""),
        ("ctx_size", 8192.0, ""),
        ("ctx_size", 8192.7, "one text or whole number"),
        ("ctx_size", float("inf"), "one text or whole number"),
        ("temp", 0.5, ""),
        ("temp", True, "one text or number"),
    ],
)
def test_a_fraction_in_the_configuration_file_is_no_whole_number(name: str, value: object, kind: str) -> None:
    (setting,) = some_settings(name)
    assert setting.is_right(value) is not bool(kind)
    assert not kind or setting.kind == kind
