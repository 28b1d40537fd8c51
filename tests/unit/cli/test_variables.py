"""Variables of the environment that no setting reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_run.base.errors import ConfigError
from edge_run.base.files.key_files import tell_if_open
from edge_run.cli.mesh.init import init
from edge_run.cli.mesh.join import join
from edge_run.cli.mesh.status import status
from edge_run.cli.shared.config_file import refuse_unknown_variables
from edge_run.cli.shared.terminal import Terminal


def test_a_developer_who_names_the_models_of_the_tests_can_use_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGE_RUN_REAL_MODELS", "models")
    refuse_unknown_variables([])
    monkeypatch.setenv("EDGE_RUN_REAL_MODEL", "models")
    with pytest.raises(ConfigError, match="EDGE_RUN_REAL_MODEL: no such setting"):
        refuse_unknown_variables([])


def test_the_address_of_a_broker_is_a_variable_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its password would be in a list of processes as a flag."""
    monkeypatch.setenv("EDGE_RUN_BROKER", "mqtt://me:word@host")
    refuse_unknown_variables([])
    for command in (init, join, status):
        context = command.make_context("mesh", [], obj=Terminal())
        assert context.params["broker"] == "mqtt://me:word@host"


@pytest.mark.parametrize(("mode", "is_told"), [(0o600, False), (0o440, False), (0o644, True)])
def test_a_file_of_keys_that_everybody_may_read_is_told(tmp_path: Path, mode: int, is_told: bool) -> None:
    (file := tmp_path / "keys").write_text("a-long-key")
    file.chmod(mode)
    said = list[str]()
    tell_if_open(file, said.append)
    assert bool(said) == is_told
    tell_if_open(tmp_path / "nowhere", said.append)
