"""What the command line says about an error that nobody named."""

from __future__ import annotations

import errno
import io
import sys
from pathlib import Path

import click
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


def test_help_that_cannot_be_written_is_blamed_on_standard_output() -> None:
    """Nothing of it is left there that could be refused again."""

    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space") as found:
        click.echo("help", file=Full())
    assert _explain(found.value) == ("standard output: No space left on device", 5)


@pytest.mark.parametrize(
    ("word", "told"), [("doctr", "edge-run doctor?"), ("serv", "edge-run serve?"), ("help", "edge-run --help?")]
)
def test_a_command_that_is_misspelled_is_no_model(
    word: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert _run([word], Terminal()) == 2
    assert capsys.readouterr().err == f"edge-run: {word}: no such command, and no such file; did you mean {told}\n"


def test_a_model_that_is_named_almost_like_a_command_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "doctr").write_bytes(b"GGU")
    for name in ("doctr", "./serv", "serv.gguf", "llama"):
        assert _run([name, "-p", "x"], Terminal()) == 3
        assert "no such command" not in capsys.readouterr().err
