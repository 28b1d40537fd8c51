"""Ctrl-C while `edge-run pack` works: heard at the next block, though llama.cpp's log keeps what is raised in it."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from edge_run.base.errors import Cancelled
from edge_run.cli.commands.pack import pack
from edge_run.cli.shared.terminal import Terminal
from edge_run.runtime.tools import pack as tool


def test_ctrl_c_ends_it_at_the_next_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[BaseException] = []

    def write(model: Path, target: Path | None, progress: Callable[[int, int], None], **_: Any) -> None:
        with contextlib.suppress(KeyboardInterrupt):  # as a callback of llama.cpp's
            signal.raise_signal(signal.SIGINT)
        try:
            progress(1, 2)
        except BaseException as error:
            ended.append(error)
            raise

    monkeypatch.setattr(tool, "pack", write)
    with pytest.raises((click.Abort, KeyboardInterrupt)):
        pack.main([str(tmp_path / "model.gguf")], obj=Terminal(), standalone_mode=False)
    assert [type(one) for one in ended] == [Cancelled]
