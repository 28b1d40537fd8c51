"""A device that leaves, and is interrupted while it does."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NoReturn

import pytest

from edge_run.devices.members.cluster import found_cluster, parse_broker
from edge_run.devices.members.identity import take_identity
from edge_run.devices.members.list_file import ListFile
from edge_run.devices.mesh.node import LocalNode

pytest.importorskip("zmq")


def test_what_an_interrupt_leaves_of_closing_is_done_by_closing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = take_identity(tmp_path, time.time)
    cluster = found_cluster(identity.device, "here", "mqtt://127.0.0.1:1")
    file = ListFile(tmp_path, cluster)
    node = LocalNode(identity, cluster, "here", lambda: parse_broker(cluster.broker), file, ("127.0.0.1",))

    def interrupted() -> NoReturn:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(node._channel, "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            node.close()
    assert node.link._service._thread.is_alive()
    assert not take_identity(tmp_path, time.time).is_lasting, "the first one has the key"
    node.close()
    assert not node.link._service._thread.is_alive()
    again = take_identity(tmp_path, time.time)
    assert (again.node, again.is_lasting) == (identity.node, True)
    node.close()
    assert not take_identity(tmp_path, time.time).is_lasting, "it has been another's since"
    again.release()
