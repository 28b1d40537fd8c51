"""The process that opens a file first: where there can be none, that is said before one is started."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from edge_run.base.errors import ModelFileError
from edge_run.runtime.inspection import launcher


@pytest.mark.parametrize("why", ["why_no_child", "why_unavailable"])
def test_where_no_process_could_open_the_file_none_is_started(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, why, lambda: "files in memory are refused")
    monkeypatch.setattr(launcher, "_run", lambda request: pytest.fail("started"))
    with pytest.raises(launcher.NoInspector, match=r"m\.gguf: cannot be opened .* first: files in memory are refused"):
        launcher.ask_child(Path("m.gguf"), {}, is_tried=True)


def test_a_child_that_hangs_at_a_drive_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel ends such a process when the drive answers, whatever it is sent."""
    left = list[subprocess.Popen[bytes]]()

    def hang(child: subprocess.Popen[bytes]) -> None:
        left.append(child)

    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "kill", hang)
        patch.setattr(launcher, "_START", "import time; time.sleep(60)")
        patch.setattr(launcher, "LONGEST_S", 0.2)
        patch.setattr(launcher, "why_unavailable", lambda: "")
        began_s = time.monotonic()
        with pytest.raises(ModelFileError, match=r"did not finish opening it in 0\.2 s; check the drive"):
            launcher.ask_child(Path("m.gguf"), {}, is_tried=True)
        assert time.monotonic() - began_s < 20
    (child,) = left
    assert child.poll() is None
    child.kill()
    child.wait()
