"""Texts of others, and what is said of those that cannot be read."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from edge_run.base.errors import ConfigError
from edge_run.base.files.texts import lines_of, read_text_file


def test_text_in_another_encoding_is_told_where_and_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "prompt").write_bytes("a café".encode("latin-1"))
    what = r"^--file prompt: not UTF-8 text \(.* at byte 5\); save it as UTF-8, as iconv -t UTF-8 does$"
    with pytest.raises(ConfigError, match=what):
        read_text_file(tmp_path / "prompt", "--file prompt", 100)


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (b"", []),
        (b"a", ["a"]),
        (b"a\n", ["a"]),
        (b"a\r\nb", ["a", "b"]),
        (b"a\n\nb\n\n", ["a", "", "b", ""]),
        ("a\u2028b\x0c\x85\rc\n".encode(), ["a\u2028b\x0c\x85\rc"]),
        (b"12345678\r\n1", ["12345678", "1"]),
    ],
)
def test_lines_end_where_a_line_ends_and_nowhere_else(data: bytes, wanted: list[str]) -> None:
    assert list(lines_of(io.BytesIO(data), "file", 8 if b"8" in data else 100)) == wanted


def test_a_line_is_no_longer_than_it_may_be_and_those_before_it_come() -> None:
    lines = lines_of(io.BytesIO(b"1234\n" + b"x" * 1000), "file", 8)
    assert next(lines) == "1234"
    with pytest.raises(ConfigError, match="file: line 2: longer than 8 B"):
        next(lines)
    lines = lines_of(io.BytesIO(b"1\n\xff\n"), "file", 8)
    assert next(lines) == "1"
    with pytest.raises(ConfigError, match="file: line 2: not UTF-8 text"):
        next(lines)
