"""Texts of others, and what is said of those that cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_run.base.errors import ConfigError
from edge_run.base.files.texts import read_text_file


def test_text_in_another_encoding_is_told_where_and_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "prompt").write_bytes("a café".encode("latin-1"))
    what = r"^--file prompt: not UTF-8 text \(.* at byte 5\); save it as UTF-8, as iconv -t UTF-8 does$"
    with pytest.raises(ConfigError, match=what):
        read_text_file(tmp_path / "prompt", "--file prompt", 100)
