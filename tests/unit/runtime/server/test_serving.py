"""The address of a server, and how its failure comes out."""

from __future__ import annotations

import socket
from typing import Any

import anyio
import pytest

pytest.importorskip("uvicorn")

from edge_run.base.errors import ConfigError
from edge_run.base.sampling_config import SamplingConfig
from edge_run.runtime.server import serving
from edge_run.runtime.server.access import access_for
from edge_run.runtime.server.catalogue.catalogue import Catalogue
from edge_run.runtime.server.catalogue.folder import ModelFolder
from edge_run.runtime.server.serving import ServeOptions, bind


def test_an_address_is_taken_before_its_server_serves() -> None:
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"^--host 127\.0\.0\.1 --port {port}: Address already in use; give"):
            bind("127.0.0.1", port)
        with socket.create_connection(("127.0.0.1", port), 30):
            pass  # it waits, and is not refused


def test_what_ends_a_server_comes_out_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(server: object, sockets: object) -> None:
        raise OSError("the network is gone")

    monkeypatch.setattr(serving._Server, "serve", fail)
    catalogue: Any = Catalogue(ModelFolder(()), lambda path, interrupt: pytest.fail("nobody asks"))
    options = ServeOptions(access_for("localhost", "127.0.0.1"), 1, SamplingConfig())
    with bind("127.0.0.1", 0) as bound, pytest.raises(OSError, match=r"^the network is gone$"):
        anyio.run(serving._serve, catalogue, "nothing", 1.0, bound, options, lambda line: None)
