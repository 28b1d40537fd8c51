"""Files of ours: written as a whole or not at all, and what is said where they cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_run.base.errors import EdgeRunError, ModelFileError, TierReadError
from edge_run.base.files import keep_file, writing


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    what = r"^--out x: cannot be written \(No such file.*\); choose another folder$"
    with pytest.raises(TierReadError, match=what), writing("--out x", "choose another folder"):
        (tmp_path / "nowhere" / "x").write_text("")


@pytest.mark.parametrize("error", [ModelFileError("model: is gone"), TierReadError("model: read failed", errno=5)])
def test_what_fails_while_a_file_is_written_keeps_its_own_words(error: EdgeRunError) -> None:
    with pytest.raises(type(error)) as found, writing("out"):
        raise error
    assert found.value is error


def test_a_cache_file_is_kept_for_its_owner_in_place_of_an_older_one(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "file"
    for content in (b"old", b"new"):
        keep_file(path, content, "it")
        assert path.read_bytes() == content
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(path.parent.iterdir()) == [path], "no draft is left"


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level("INFO"):
        keep_file(tmp_path / "file" / "below", b"", "what was measured")
    assert f"what was measured cannot be kept in {tmp_path / 'file'}" in caplog.text
