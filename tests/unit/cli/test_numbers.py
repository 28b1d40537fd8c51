"""Flags of several numbers."""

from __future__ import annotations

import pytest

from edge_run.base.errors import ConfigError
from edge_run.cli.split.numbers import numbers, whole_numbers


@pytest.mark.parametrize("text", ["", "a", "1,,2", "nan", "1,inf"])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--rates.*numbers"):
        numbers("--rates", text)
    assert numbers("--rates", "1,2.5") == (1.0, 2.5)


@pytest.mark.parametrize("text", ["64.9", "64,128.5", "inf", "a"])
def test_what_is_no_whole_number_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--rates.*numbers"):
        whole_numbers("--rates", text)
    assert whole_numbers("--rates", "64,1e2") == (64, 100)
