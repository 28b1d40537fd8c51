"""Flags of several numbers."""

from __future__ import annotations

import pytest

from edge_run.base.errors import ConfigError
from edge_run.cli.split.numbers import numbers


@pytest.mark.parametrize("text", ["", "a", "1,,2", "nan", "1,inf"])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--rates.*numbers"):
        numbers("--rates", text)
    assert numbers("--rates", "1,2.5") == (1.0, 2.5)
