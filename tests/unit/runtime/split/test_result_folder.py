"""The folder of a training that could not be written where it was to be."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_run.base.errors import TierReadError
from edge_run.runtime.split.bundle import FORMAT, HEAD, StoredCode
from edge_run.runtime.split.result_folder import write_result_folder


def test_the_cause_is_said_also_where_an_earlier_training_is_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    code = StoredCode(FORMAT, "", "0123456789abcdef", "", "cut", (3, 8, 8), (1, 2, 2), ("y",), (), ())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "another's").touch()
    for name in ("split-0123456789ab", "split-0123456789ab-2", "split-0123456789ab-3"):
        kept = tmp_path / "cache" / "edge-run" / name
        why = rf"out: cannot be written \(Directory not empty\); what was learned is in {kept}: move"
        with pytest.raises(TierReadError, match=why):
            write_result_folder(tmp_path / "out", {HEAD: name.encode()}, code, 0o600)
        assert (kept / HEAD).read_bytes() == name.encode()
