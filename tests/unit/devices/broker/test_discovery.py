"""Looking for the broker where that cannot be done."""

from __future__ import annotations

import errno
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import zeroconf

from edge_run.base.errors import MeshError, options_as_flags
from edge_run.devices.broker import discovery
from edge_run.devices.broker.discovery import Advertisement, find_broker

CLUSTER = "abcdefgh", bytes(range(32))  # its id, and its founder's key


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("No interfaces to listen on"),
        OSError(errno.ENETDOWN, "Network is down"),
        zeroconf.EventLoopBlocked(),
    ],
)
def test_where_nobody_can_be_asked_now_the_next_try_may_find_it(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else it raised would end the channel to the broker for good."""

    def refuse(**_: object) -> None:
        raise error

    monkeypatch.setattr(zeroconf, "Zeroconf", refuse)
    with pytest.raises(
        MeshError, match=r"cannot be looked for on this network .*; see to the network.* with mesh='mqtt:"
    ):
        find_broker(*CLUSTER, 0.1)
    with options_as_flags(dict), pytest.raises(MeshError, match=r"with `edge-run mesh join --broker mqtt://HOST`$"):
        find_broker(*CLUSTER, 0.1)


@pytest.mark.parametrize("port", [None, 0, 70_000])
def test_an_answer_without_a_port_is_none(port: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody on the network may give one: the channel to the broker ended with it, for good."""

    class Answered:
        def __init__(self, **_: object) -> None: ...

        def get_service_info(self, *_: object, **__: object) -> object:
            return SimpleNamespace(port=port, parsed_addresses=lambda: ["127.0.0.1"])

        def close(self) -> None: ...

    def browse(own: object, service: str, handlers: list[Callable[..., None]]) -> object:
        name = f"{discovery._word(CLUSTER[1])}.{service}"
        handlers[0](name=name, state_change=zeroconf.ServiceStateChange.Added)
        return SimpleNamespace(cancel=lambda: None)

    monkeypatch.setattr(zeroconf, "Zeroconf", Answered)
    monkeypatch.setattr(zeroconf, "ServiceBrowser", browse)
    with pytest.raises(MeshError, match=r"no broker of cluster .* with mesh='mqtt://HOST' or MeshConfig\(broker="):
        find_broker(*CLUSTER, 0.1)


@pytest.mark.parametrize("error", [OSError(errno.ENETDOWN, "Network is down"), zeroconf.EventLoopBlocked()])
def test_the_end_of_an_announcement_that_cannot_be_said_is_no_error(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else `mesh join` would end with it, after Ctrl-C, on a device whose network is down."""
    closed = list[str]()

    class Refusing:
        def __init__(self, **_: object) -> None: ...

        def register_service(self, _: object) -> None: ...

        def unregister_service(self, _: object) -> None:
            raise error

        def close(self) -> None:
            closed.append("close")

    monkeypatch.setattr(zeroconf, "Zeroconf", Refusing)
    with caplog.at_level("INFO"):
        Advertisement(*CLUSTER, ["127.0.0.1"], 1883).close()
    assert closed == ["close"]
    assert "the end of the broker was not announced" in caplog.text
