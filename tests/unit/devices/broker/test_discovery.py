"""Looking for the broker where that cannot be done."""

from __future__ import annotations

import errno

import pytest
import zeroconf

from edge_run.base.errors import MeshError
from edge_run.devices.broker.discovery import find_broker
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
