"""`edge-run mesh` as people use it: a cluster, two devices, their state, and what the doctor finds."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from edge_run import Model, __version__
from edge_run.base.errors import ConfigError, MeshError, ModelFileError
from edge_run.base.fields import Document
from edge_run.devices.members.cluster import read_cluster, write_cluster
from edge_run.devices.mesh import checkup
from edge_run.devices.mesh.checkup import examine
from edge_run.devices.mesh.opening import MeshConfig, open_mesh
from edge_run.devices.mesh.own_link import OwnLink
from edge_run.devices.presence import membership
from mesh_devices import WAIT_S, Device
from mesh_lists import make_cluster, stranger_in
from mosquitto import PROGRAM, Mosquitto, free_port, mosquitto
from patience import PATIENT
from waiting import until

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_a_cluster_without_a_broker_from_init_to_doctor(tmp_path: Path) -> None:
    first, second = Device(tmp_path / "first"), Device(tmp_path / "second")
    place = f"127.0.0.1:{free_port()}"
    done = first.run("init", "--serve", place)
    line = re.search(r"^edge-run mesh join (\S+)$", done.stdout, re.MULTILINE)
    assert line
    assert line[1] not in done.stderr
    with first.joined("--name", "first"), second.joined(line[1], "--name", "second"):
        deadline = time.monotonic() + WAIT_S
        while True:
            found = json.loads(second.run("status", "--json").stdout)
            links = [link for member in found["members"] for link in member["links"]]
            if {member["name"] for member in found["members"]} == {"first", "second"} and len(links) == 2:
                break
            assert time.monotonic() < deadline, found
        assert found["broker"] == place
        assert all(link["round_trip_s"] < 1 and link["bytes_per_s"] > 1e6 for link in links)
        while "2 devices" not in (text := first.run("status").stdout) or "first to second" not in text:
            assert time.monotonic() < deadline, text
        for listen_s in (1.0, 5.0, 20.0):  # who is busy answers late
            report = examine(first.mesh_folder, __version__, listen_s=listen_s)
            if "first, second" in [one.finding for one in report.findings]:
                break
        assert {one.state for one in report.findings} == {"ok"}, report
        assert "first, second" in [one.finding for one in report.findings]
    report = json.loads(second.run("doctor", "--json", code=1).stdout)
    assert "nothing listens there" in report["findings"][-1]["finding"]
    second.run("status", code=10)


def test_where_data_links_listen_is_remembered(tmp_path: Path) -> None:
    device, place, port = Device(tmp_path / "one"), f"127.0.0.1:{free_port()}", free_port(in_a_row=2)
    line = json.loads(device.run("init", "--serve", place, "--json", "--show-line").stdout)["join_line"]
    with device.joined("--listen", "127.0.0.1", "--port", str(port)):
        pass
    known = read_cluster(device.mesh_folder)
    assert known is not None
    assert (known.listen, known.port, known.serves) == (("127.0.0.1",), port, place)
    with device.joined():
        socket.create_connection(("127.0.0.1", port), WAIT_S).close()
        with contextlib.closing(open_mesh(MeshConfig(device.mesh_folder, connect_s=WAIT_S))) as run:
            assert run.places == (f"tcp://127.0.0.1:{port + 1}",)
            odd = MeshConfig(device.mesh_folder, name="a\tb" + 300 * "x", connect_s=WAIT_S)
            with contextlib.closing(open_mesh(odd)) as second:
                assert second.places != run.places, "two at once, where the port is not asked for"
                until(lambda: any(one.name.startswith("a?bxx") for one in run.members()), WAIT_S)
            with pytest.raises(MeshError, match="cannot listen"):
                open_mesh(MeshConfig(device.mesh_folder, port=port + 1))
            device.run("status")  # which only looks, at no port of its own
        joiner = Device(tmp_path / "two")
        joiner.run("join", line, "--listen", "127.0.0.1", "--port", "7", code=2)  # a port of systems' services
        with joiner.joined(line, "--listen", "127.0.0.1", "--port", str(free_port())):
            pass
    joiner.run("join", line, "--port", "0", code=10)  # no broker there any more
    known = read_cluster(joiner.mesh_folder)
    assert known is not None
    assert (known.listen, known.port) == (("127.0.0.1",), 0)
    other = Device(tmp_path / "three")
    place = f"127.0.0.1:{free_port()}"
    line = json.loads(other.run("init", "--serve", place, "--json", "--show-line").stdout)["join_line"]
    with other.joined():
        assert "already" in joiner.run("join", line, code=2).stderr
        with joiner.joined(line, "--replace"):
            pass
    known = read_cluster(joiner.mesh_folder)
    assert known is not None
    assert known.listen == (), "another cluster's"


def test_joining_once_more_loses_nothing_that_only_this_device_knows(tmp_path: Path) -> None:
    device = Device(tmp_path / "one")
    line = json.loads(device.run("init", "--serve", f"127.0.0.1:{free_port()}", "--json", "--show-line").stdout)[
        "join_line"
    ]
    before = read_cluster(device.mesh_folder)
    assert before is not None
    joiner = Device(tmp_path / "two")
    with device.joined(line):
        assert read_cluster(device.mesh_folder) == before, "it goes on to run the broker"
        with joiner.joined(line):
            pass
    other = f"mqtt://me:hidden@127.0.0.1:{free_port()}"
    done = joiner.run("join", line, "--broker", other, "-v", code=10)
    assert "hidden" not in done.stdout + done.stderr
    known = read_cluster(joiner.mesh_folder)
    assert known is not None
    assert known.broker == other
    assert "no PEM file" in joiner.run("join", "--authority", __file__, code=2).stderr
    write_cluster(joiner.mesh_folder, replace(known, listen=("192.0.2.9",)))
    with pytest.raises(ConfigError, match=r"192\.0\.2\.9: is no address of this device.*remembers another"):
        open_mesh(MeshConfig(joiner.mesh_folder))
    (joiner.mesh_folder / "cluster.json").write_text("[]")
    with pytest.raises(MeshError, match="damaged"):
        read_cluster(joiner.mesh_folder)


@pytest.mark.parametrize(("serve", "place"), [("::1", "[::1]:1883"), ("localhost", "localhost:1883")])
def test_a_broker_that_others_do_not_reach_is_said_to_be_one(tmp_path: Path, serve: str, place: str) -> None:
    told = Device(tmp_path / "one").run("init", "--serve", serve).stderr
    assert f"broker {place}, which this device runs." in told
    assert "Only this device reaches it: for others, --serve 0.0.0.0 --replace, or --broker." in told


@pytest.mark.parametrize(("serve", "broker"), [("::", "mqtt://[::1]:1883"), ("0.0.0.0", "mqtt://127.0.0.1:1883")])
def test_the_device_that_runs_the_broker_reaches_it_where_it_listens(tmp_path: Path, serve: str, broker: str) -> None:
    """What listens on all addresses of IPv6 does not listen on those of IPv4."""
    device = Device(tmp_path / "one")
    device.run("init", "--serve", serve)
    known = read_cluster(device.mesh_folder)
    assert known is not None
    assert known.broker == broker


def test_what_init_and_join_refuse(tmp_path: Path) -> None:
    device = Device(tmp_path / "one")
    assert "belongs to none" in device.run("join", code=10).stderr
    assert "belongs to none" in device.run("doctor", code=1).stdout
    made = json.loads(device.run("init", "--broker", "mqtt://me:hidden@127.0.0.1:1", "--json").stdout)
    assert made["join_line"] == ""
    assert "hidden" not in json.dumps(made)
    assert "already" in device.run("init", code=2).stderr
    other = json.loads(device.run("init", "--replace", "--json", "--show-line").stdout)
    assert other["cluster"] != made["cluster"]
    assert (
        "pasted" in device.run("join", "nonsense", code=2).stderr or "paste" in device.run("join", "x", code=2).stderr
    )
    assert "--serve and --find" in device.run("init", "--broker", "h", "--find", "--replace", code=2).stderr
    device.run("init", "--broker", "mqtt://127.0.0.1:1", "--replace")
    assert "--find: only edge-run's own broker" in device.run("invite", "--find", code=2).stderr
    device.environment["EDGE_RUN_BROKER"] = "mqtt://127.0.0.1:1"
    other = json.loads(device.run("init", "--serve", "127.0.0.1", "--replace", "--json", "--show-line").stdout)
    del device.environment["EDGE_RUN_BROKER"]
    assert "no address of this device" in device.run("join", "--listen", "192.0.2.1", code=2).stderr
    assert "is not there" in device.run("join", "--models", "/nowhere", code=2).stderr
    assert "no PEM file" in device.run("init", "--authority", __file__, "--replace", code=2).stderr
    cluster = read_cluster(device.mesh_folder)
    assert cluster is not None
    assert cluster.id == other["cluster"]
    joiner = Device(tmp_path / "two")
    done = joiner.run("join", "-", code=10, text=other["join_line"] + "\n")
    assert "nothing listens there" in done.stderr
    assert read_cluster(joiner.mesh_folder) is None, "nobody let it in"


def test_what_is_wrong_with_the_file_is_said_before_a_mesh_is_looked_for(tmp_path: Path) -> None:
    path = tmp_path / "nothing.gguf"
    with pytest.raises(ModelFileError, match="nothing"):
        Model(path, mesh="mqtt://127.0.0.1:1")
    path.write_bytes(b"GGUF")
    with pytest.raises(ModelFileError, match="nothing"):
        Model(path, mesh="mqtt://127.0.0.1:1")


def findings(folder: Path, *topics: str) -> dict[str, str]:
    """Return what the doctor finds that is not as it should be, after listening for a moment.

    It listens for longer where there is nothing of `topics` yet, or it did not hear itself: a busy machine is late.
    """
    found: dict[str, str] = {}
    for listen_s in (2.5, 10.0, 30.0):
        report = examine(folder, __version__, listen_s=listen_s)
        found = {one.topic: one.finding for one in report.findings if one.state != "ok"}
        if found.keys() >= {*topics} and ("broker" in topics or "broker" not in found):
            break
    assert found.keys() >= set(topics), report
    return found


def test_the_doctor_names_what_is_wrong(tmp_path: Path, broker: Mosquitto) -> None:
    cluster = make_cluster(tmp_path, broker.url, ["own", "late", "old", "shut"])
    stranger_in(tmp_path / "stranger", cluster)
    assert findings(tmp_path / "own", "devices") == {"devices": "nobody is there"}
    with contextlib.ExitStack() as stack, socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))  # and never listens: nobody is reached there, and no device can get that port
        port = deaf.getsockname()[1]
        nodes = {
            folder: open_mesh(MeshConfig(tmp_path / folder, name=name, connect_s=WAIT_S))
            for folder, name in (("stranger", "stranger"), ("late", "late"), ("old", "box"), ("shut", "box"))
        }
        old, shut = (f"box ({nodes[name].node})" for name in ("old", "shut"))  # two of one name are told apart
        for node in nodes.values():
            stack.callback(node.close)
        with nodes["old"].held() as state:
            state.capabilities = {"edge_run": "0.0.1"}
            state.announce()
        for name, hosts in (("shut", ("198.51.100.1", "127.0.0.1")), ("old", ("127.0.0.1",))):
            link: Document = {**nodes[name].state.link, "places": [f"tcp://{host}:{port}" for host in hosts]}
            nodes[name]._own_link = OwnLink(lambda link=link: link)  # type: ignore[misc]
        with nodes["stranger"].held() as state:  # its list is refused for another reason than what it announces
            state.roster._say_soon = lambda: None  # type: ignore[method-assign]
        with nodes["late"].held() as state:
            state._outbox._writer._wall_clock = lambda: time.time() - 3600
        is_over = threading.Event()

        def announce() -> None:
            while not is_over.wait(0.5):
                nodes["stranger"].announce({})

        announcing = threading.Thread(target=announce)
        announcing.start()
        try:
            found = findings(tmp_path / "own", "clocks", "keys", "versions", f"link to {old}", f"link to {shut}")
        finally:
            is_over.set()
            announcing.join()
    assert nodes["late"].node in found["clocks"]
    assert "3,6" in found["clocks"]
    assert "behind this device's" in found["clocks"]
    assert "does not know the secret" in found["keys"]
    assert f"{old}: has edge-run 0.0.1" in found["versions"]
    assert "no address answers" in found[f"link to {shut}"]
    assert "listens to itself only" in found[f"link to {old}"]


def test_the_doctor_and_a_broker_that_passes_nothing_on(tmp_path: Path) -> None:
    rules = tmp_path / "acl"
    rules.write_text("topic read other/#\n")
    rules.chmod(0o600)
    with mosquitto(tmp_path, f"allow_anonymous true\nacl_file {rules}") as broker:
        make_cluster(tmp_path, broker.url, ["own"])
        assert "does not pass them on" in findings(tmp_path / "own", "broker")["broker"]


def test_the_doctor_and_a_broker_that_drops_us(
    tmp_path: Path, broker: Mosquitto, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it listens, however long it took to connect."""
    make_cluster(tmp_path, broker.url, ["own"])

    def listen(seconds: float) -> None:
        broker.stop()
        broker.start()
        time.sleep(seconds)

    monkeypatch.setattr(checkup, "time", SimpleNamespace(monotonic=time.monotonic, sleep=listen))
    assert "dropped the connection" in findings(tmp_path / "own", "broker")["broker"]


@pytest.mark.skipif(PROGRAM is None, reason="mosquitto is not installed (apt-get install mosquitto)")
def test_the_access_list_of_the_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Members can do all they must; a client of another name cannot speak for a node."""
    import paho.mqtt.client as mqtt

    monkeypatch.setattr(membership, "QUICK", PATIENT)
    blocks = re.findall(r"^```text\n(.*?)^```", (DOCS / "mesh.md").read_text("utf-8"), re.MULTILINE | re.DOTALL)
    rules, passwords = tmp_path / "acl", tmp_path / "passwords"
    rules.write_text(next(block for block in blocks if "pattern write" in block))
    passwords.touch(mode=0o600)
    rules.chmod(0o600)
    subprocess.run(["mosquitto_passwd", "-b", str(passwords), "edge", "word"], check=True, timeout=WAIT_S)
    settings = f"allow_anonymous false\npassword_file {passwords}\nacl_file {rules}\nmessage_size_limit 300000"
    with mosquitto(tmp_path, settings) as broker, contextlib.ExitStack() as stack:
        cluster = make_cluster(tmp_path, f"mqtt://edge:word@127.0.0.1:{broker.port}", ["a", "b"])
        nodes = []
        for name in "ab":
            nodes.append(open_mesh(MeshConfig(tmp_path / name, name=name, connect_s=WAIT_S)))
            stack.callback(nodes[-1].close)
        a, b = nodes
        b.serve(lambda node, epoch, order: order)
        a.show_to_home_assistant()
        seen: list[tuple[str, bytes]] = []
        other = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, client_id="other")
        other.username_pw_set("edge", "word")
        other.on_message = lambda client, data, message: seen.append((message.topic, message.payload))
        other.connect("127.0.0.1", broker.port)
        other.subscribe("edge/v1/#", 1)
        other.loop_start()
        try:
            until(lambda: len(a.members()) >= 2, WAIT_S)
            epoch = a.lead(timeout_s=WAIT_S)
            a.publish_plan(epoch, {"layers": {}})
            assert a.order(b.node, {"x": 1}, timeout_s=WAIT_S) == {"x": 1}
            other.publish(f"edge/v1/{cluster.id}/node/{a.node}/status", b"false", qos=1).wait_for_publish(WAIT_S)
            wanted = (f"/home/{a.node}", f"/plan/{epoch}")
            until(lambda: all(any(topic.endswith(end) for topic, _ in seen) for end in wanted), WAIT_S)
        finally:
            other.disconnect()
            other.loop_stop()
        assert (f"edge/v1/{cluster.id}/node/{a.node}/status", b"false") not in seen
