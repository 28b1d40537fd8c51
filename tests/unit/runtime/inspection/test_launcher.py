"""The process that opens a file first: where there can be none, that is said before one is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_run.runtime.inspection import launcher


@pytest.mark.parametrize("why", ["why_no_child", "why_unavailable"])
def test_where_no_process_could_open_the_file_none_is_started(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, why, lambda: "files in memory are refused")
    monkeypatch.setattr(launcher, "_run", lambda request: pytest.fail("started"))
    with pytest.raises(launcher.NoInspector, match=r"m\.gguf: cannot be opened .* first: files in memory are refused"):
        launcher.ask_child(Path("m.gguf"), {}, is_tried=True)
