"""Looking for the broker where that cannot be done."""

from __future__ import annotations

import errno

import pytest
import zeroconf

from edge_run.base.errors import MeshError
from edge_run.devices.broker.discovery import Advertisement, find_broker
from edge_run.devices.members.cluster import FIND_BROKER, new_cluster


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
    with pytest.raises(MeshError, match=r"cannot be looked for on this network .*; see to the network"):
        find_broker(new_cluster(FIND_BROKER), 0.1)


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
        Advertisement(new_cluster(FIND_BROKER), ["127.0.0.1"], 1883).close()
    assert closed == ["close"]
    assert "the end of the broker was not announced" in caplog.text
