"""`edge-run split serve` says where it listens so that `split run --server` takes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from edge_run.cli.shared.terminal import Terminal
from edge_run.cli.split.serve import serve
from edge_run.devices.link.hosts import parse_place
from edge_run.runtime.split import server


class Server:
    """Listens at whatever it is told."""

    def __init__(self, tails: Sequence[Path], threads: int | None) -> None:
        pass

    async def serve(self, host: str, port: int, ready: Callable[[int], None]) -> None:
        ready(port)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "::", "localhost"])
def test_where_it_listens(host: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(server, "SplitServer", Server)
    serve.main(["tail.onnx", "--host", host, "--port", "7448"], obj=Terminal(), standalone_mode=False)
    assert parse_place(capsys.readouterr().out.split()[-1], 7447) == (host, 7448)
