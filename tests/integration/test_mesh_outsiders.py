"""Who is at the broker of a mesh and not in its cluster: strangers, another secret, wrong passwords."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import threading
import time
from pathlib import Path

import paho.mqtt.client as mqtt
import pytest

from edge_run.base.errors import MeshError
from edge_run.devices.mesh.opening import MeshConfig, open_mesh
from mesh_lists import make_cluster, stranger_in
from mesh_table import WAIT_S, Table
from mosquitto import Mosquitto, mosquitto
from waiting import until

pytestmark = pytest.mark.usefixtures("patient_mesh")


def test_strangers_at_the_broker(table: Table, broker: Mosquitto) -> None:
    """500 messages of somebody who is at the broker and does not know the secret, and of all that he overheard."""
    a, b = table.open("a"), table.open("b")
    until(lambda: len(a.members()) == 2)
    epoch = a.lead(timeout_s=WAIT_S)
    done: list[int] = []
    b.serve(lambda node, epoch, order: {"count": done.append(1) or len(done)})
    overheard: list[tuple[str, bytes]] = []
    stranger = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2)
    stranger.on_message = lambda client, data, message: overheard.append((message.topic, message.payload))
    subscribed = threading.Event()
    stranger.on_subscribe = lambda *_: subscribed.set()
    stranger.connect("127.0.0.1", broker.port)
    stranger.subscribe("edge/v1/#", 1)
    stranger.loop_start()
    try:
        assert subscribed.wait(WAIT_S)
        assert a.order(b.node, {"do": 1}, timeout_s=WAIT_S) == {"count": 1}
        until(lambda: any(topic.endswith("/cmd") for topic, _ in overheard))

        def views() -> tuple[object, ...]:
            return a.members(), b.members(), a.state.lease.holder, b.state.lease.epoch

        state = views()
        chance, genuine = random.Random(3), list(overheard)
        for number in range(500):
            topic, payload = chance.choice(genuine)
            kind = number % 5
            if kind == 0:
                payload = payload[: chance.randrange(len(payload))]
            elif kind == 1:
                payload = os.urandom(200)
            elif kind == 2:
                topic = chance.choice(genuine)[0]
            elif kind == 3:
                payload = payload[:100] + bytes([payload[100] ^ 1]) + payload[101:]
            stranger.publish(topic, payload, qos=1)
        until(lambda: b.state.refusals.total > 250)
        time.sleep(0.5)
    finally:
        stranger.disconnect()
        stranger.loop_stop()
    assert len(done) == 1, "an order is carried out once"
    until(lambda: views() == state)  # on a busy machine one may have missed the other for a moment
    assert a.state.lease.held == epoch
    assert len(b.state.refusals.latest) <= 64
    assert a.order(b.node, {"do": 2}, timeout_s=WAIT_S) == {"count": 2}


def test_another_secret_and_another_list_are_refused(table: Table, tmp_path: Path) -> None:
    a = table.open("a")
    false = stranger_in(tmp_path / "false", table.members.cluster)
    with contextlib.closing(open_mesh(MeshConfig(false, connect_s=WAIT_S))) as other:
        a.announce({})
        for node in (a, other):
            for why in ("does not know the secret", "is another cluster's"):
                until(lambda node=node, why=why: any(why in str(one) for one in node.state.refusals.latest))  # type: ignore[misc]
        assert len(a.members()) == len(other.members()) == 1


def test_users_and_passwords(tmp_path: Path) -> None:
    passwords = tmp_path / "passwords"
    passwords.touch(mode=0o600)
    if not shutil.which("mosquitto_passwd"):
        pytest.skip("mosquitto_passwd is not installed")
    subprocess.run(["mosquitto_passwd", "-b", str(passwords), "edge", "word"], check=True, timeout=WAIT_S)
    with mosquitto(tmp_path, f"allow_anonymous false\npassword_file {passwords}") as broker:
        place = f"127.0.0.1:{broker.port}"
        make_cluster(tmp_path, f"mqtt://{place}", ["a"])
        for wrong, who in ((None, "nobody without"), (f"mqtt://edge:wrong@{place}", "'edge'")):
            with pytest.raises(MeshError, match=who) as caught:
                open_mesh(MeshConfig(tmp_path / "a", wrong, connect_s=6))
            assert "wrong" not in str(caught.value)
        open_mesh(MeshConfig(tmp_path / "a", f"mqtt://edge:word@{place}", connect_s=WAIT_S)).close()
