"""What the command line says about an error that nobody named."""

from __future__ import annotations

import errno
import io
import sys

import pytest

from edge_run.cli.app import _explain, _run
from edge_run.cli.shared.terminal import Terminal


def test_a_path_in_an_error_stays_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["run", "my  model\n2.gguf", "-p", "x"], Terminal()) == 3
    assert capsys.readouterr().err.startswith("edge-run: my  model\\n2.gguf: ")


def test_an_error_without_a_name_is_not_blamed_on_standard_output(monkeypatch: pytest.MonkeyPatch) -> None:
    error = OSError(errno.ENOLCK, "No locks available")
    assert _explain(error) == ("the system refused a read or a write: No locks available", 5)

    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stdout", Full())
    full = OSError(errno.ENOSPC, "No space left on device")
    assert _explain(full) == ("standard output: No space left on device", 5)
