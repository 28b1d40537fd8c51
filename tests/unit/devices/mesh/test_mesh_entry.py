"""Coming in with an invitation, where the broker refuses: whose user it does not know."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_run.base.errors import MeshError, NotTrusted
from edge_run.devices.broker import embedded
from edge_run.devices.broker.access import BrokerAccess
from edge_run.devices.broker.embedded import EmbeddedBroker
from edge_run.devices.members.cluster import Invited
from edge_run.devices.members.keys import DeviceKey
from edge_run.devices.mesh import entry
from edge_run.devices.mesh.entry import come_in
from mosquitto import free_port

FOUNDER = DeviceKey(bytes(range(32)))
KNOWS_NOBODY = b"\x20\x02\x00\x05"


def refusal(folder: Path, guest: Invited, monkeypatch: pytest.MonkeyPatch) -> MeshError:
    """Return why `guest` does not come in; it waits for a second, and for longer where a busy machine takes longer."""
    for connect_s in (1.0, 5.0, 25.0):
        monkeypatch.setattr(entry, "FIRST_CONNECTION_S", connect_s)
        with pytest.raises(MeshError) as caught:
            come_in(folder, guest, "new", timeout_s=connect_s)
        if not any(words in str(caught.value) for words in ("was not reached yet", "does not answer")):
            break
    return caught.value


def invited(broker: str, broker_key: bytes) -> Invited:
    return Invited("abcdefgh", FOUNDER.public_key, broker, broker_key, bytes(32))


@contextlib.contextmanager
def broker_with_another_password() -> Iterator[int]:
    """Give the port of a broker that refuses whoever connects."""
    is_over = threading.Event()

    def refuse(listener: socket.socket) -> None:
        while not is_over.is_set():
            with contextlib.suppress(OSError), listener.accept()[0] as connection:
                connection.recv(4096)
                connection.sendall(KNOWS_NOBODY)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.05)
        thread = threading.Thread(target=refuse, args=(listener,))
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            is_over.set()
            thread.join()


def test_a_wrong_password_of_a_broker_is_said_to_be_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with broker_with_another_password() as port:
        error = refusal(tmp_path, invited(f"mqtt://edge:OLD@127.0.0.1:{port}", b""), monkeypatch)
    assert f"broker 127.0.0.1:{port}: refuses user 'edge'" in str(error)
    assert not isinstance(error, NotTrusted), "another line would not help"


def test_who_is_refused_with_the_invitation_needs_another_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "START_S", 60.0)
    port = free_port()
    with contextlib.closing(EmbeddedBroker("127.0.0.1", port, BrokerAccess())):
        error = refusal(tmp_path, invited(f"mqtt://127.0.0.1:{port}", FOUNDER.seal_key), monkeypatch)
    assert isinstance(error, NotTrusted)
    assert "is used up, or has ended; ask for another line" in str(error)
