"""Variables of the environment that no setting reads."""

from __future__ import annotations

import pytest

from edge_run.base.errors import ConfigError
from edge_run.cli.shared.config_file import refuse_unknown_variables


def test_a_developer_who_names_the_models_of_the_tests_can_use_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGE_RUN_REAL_MODELS", "models")
    refuse_unknown_variables([])
    monkeypatch.setenv("EDGE_RUN_REAL_MODEL", "models")
    with pytest.raises(ConfigError, match="EDGE_RUN_REAL_MODEL: no such setting"):
        refuse_unknown_variables([])
