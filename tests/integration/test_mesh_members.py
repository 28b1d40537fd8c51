"""Who comes in with an invitation, and who is sent away: real devices, real brokers, real sockets."""

from __future__ import annotations

import contextlib
import json
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edge_run.base.errors import DeviceLost, EdgeRunError, NotTrusted
from edge_run.base.mesh import Message
from edge_run.cli.mesh.init import _acl_written
from edge_run.devices.members.cluster import parse_join_line, read_cluster, write_cluster
from edge_run.devices.members.identity import device_key
from edge_run.devices.members.list_file import change_list
from edge_run.devices.mesh import changes
from edge_run.devices.mesh.changes import make_change, spread
from edge_run.devices.mesh.node import LocalNode
from edge_run.devices.mesh.opening import MeshConfig, open_mesh
from edge_run.devices.messages.topics import Topic
from edge_run.devices.presence.membership import IDLE
from mesh_devices import Device
from mesh_lists import defy, make_cluster
from mosquitto import free_port, mosquitto

WAIT_S = 60.0

FORGED_EPOCH = 1 << 25  # of more rounds than a test has: each claim takes a round of 20 bits


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "HEARD_S", 15.0)


def wait_for(is_so: Callable[[], bool], what: str, wait_s: float = WAIT_S) -> float:
    started_s = time.monotonic()
    while not is_so():
        assert time.monotonic() - started_s < wait_s, what
        time.sleep(0.01)
    return time.monotonic() - started_s


@contextlib.contextmanager
def nodes(folder: Path, *names: str) -> Iterator[list[LocalNode]]:
    with contextlib.ExitStack() as stack:
        found = [open_mesh(MeshConfig(folder / name, name=name, connect_s=WAIT_S)) for name in names]
        for node in found:
            stack.callback(node.close)
        for node in found:
            wait_for(lambda node=node: len(node.members()) == len(names), f"{node.node} sees all")  # type: ignore[misc]
        yield found


def test_from_an_invitation_to_being_sent_away(tmp_path: Path) -> None:
    first, second, third = (Device(tmp_path / name) for name in ("first", "second", "third"))
    place = f"127.0.0.1:{free_port()}"
    made = json.loads(
        first.run("init", "--serve", place, "--uses", "1", "--json", "--show-line", "--name", "one").stdout
    )
    assert (made["role"], made["uses"]) == ("use", 1)
    with first.joined("--name", "one"), second.joined(made["join_line"], "--name", "two", code=12) as sent_away:
        assert "used up" in third.run("join", made["join_line"], code=12).stderr
        assert [one["role"] for one in json.loads(first.run("members", "--json").stdout)["members"]] == [
            "founder",
            "use",
        ]
        assert "may not change" in second.run("remove", "one", code=12).stderr
        first.run("role", "two", "compute")
        wait_for(lambda: "compute" in second.run("members").stdout, "the role is known to its holder")
        line = json.loads(first.run("invite", "--uses", "1", "--expires", "1h", "--json", "--show-line").stdout)[
            "join_line"
        ]
        first.run("rotate")
        with third.joined(line, "--name", "three"):
            wait_for(lambda: "three" in first.run("status").stdout, "who came in is seen")
            sent_away.send_signal(signal.SIGSTOP)
            done = first.run("remove", "two")
            assert "is no member any more" in done.stderr
            sent_away.send_signal(signal.SIGCONT)  # the broker has cut it off meanwhile, and told it first
            assert sent_away.wait(WAIT_S) == 12
            assert "was removed from cluster" in sent_away.stderr.read()  # type: ignore[union-attr]
            assert "two" not in json.loads(third.run("members", "--json").stdout)["members"]
            assert "was removed" in second.run("status", code=12).stderr
    with pytest.raises(NotTrusted):
        open_mesh(MeshConfig(second.mesh_folder))


def test_a_join_line_needs_somebody_who_lets_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Device(tmp_path / "first"), Device(tmp_path / "second")
    done = first.run("init", "--serve", f"127.0.0.1:{free_port()}", "--json", "--show-line")
    invited = parse_join_line(json.loads(done.stdout)["join_line"])
    assert "nothing listens there" in second.run("join", json.loads(done.stdout)["join_line"], code=10).stderr
    assert "belongs to none" in second.run("members", code=10).stderr
    known = read_cluster(first.mesh_folder)
    assert known is not None
    assert invited.founder == known.founder
    assert known.secret.hex() not in done.stdout


def test_who_was_sent_away_and_does_not_go_is_refused_by_all(tmp_path: Path) -> None:
    with mosquitto(tmp_path) as broker:
        make_cluster(tmp_path, broker.url, ["one", "two", "three"])
        with nodes(tmp_path, "one", "two", "three") as (one, two, three):
            for node in (one, two):
                three.link.send(node.node, {"word": 1}, timeout_s=WAIT_S)
                message = node.link.receive(timeout_s=WAIT_S)
                assert message is not None
            defy(three)
            make_change(tmp_path / "one", lambda editor: editor.remove("three"), lambda listed: True)
            took_s = wait_for(
                lambda: all(three.node not in [m.node for m in node.members()] for node in (one, two)), "it is gone"
            )
            assert took_s < IDLE.lost_s / 2, "for its silence it would have gone later"
            before = [node.state.refusals.total for node in (one, two)]
            for number in range(60):  # ten orders of them, which `one` alone hears
                speak(three, one, number)
            wait_for(lambda: one.state.refusals.total >= before[0] + 60, "each message is refused")
            wait_for(lambda: two.state.refusals.total >= before[1] + 50, "each message is refused")
            for node in (one, two):
                assert three.node not in [member.node for member in node.members()]
                assert node.state.lease.holder != three.node
                heard = said_by(node, three.node)
                assert not heard, heard
            wait_for(lambda: not can_send(three, two), "what it had open is cut, and it is let in no more")
            assert not said_by(two, three.node)


def said_by(node: LocalNode, other: str) -> list[Message]:
    """Return the messages of `other` that `node` takes in."""
    found = []
    while (item := receive(node)) is not None:
        if isinstance(item, Message) and item.node == other:
            found.append(item)
    return found


def receive(node: LocalNode) -> Message | DeviceLost | None:
    try:
        return node.link.receive(timeout_s=0.2)
    except DeviceLost as error:
        return error


def can_send(node: LocalNode, to: LocalNode) -> bool:
    try:
        node.link.send(to.node, {"word": 2}, timeout_s=0.5)
    except EdgeRunError:
        return False
    return True


def speak(node: LocalNode, to: LocalNode, number: int) -> None:
    """Say something of every kind that would be obeyed of a member."""
    kinds = ("status", "caps", "lease", "plan", "rsp", "cmd")
    bodies = {
        "status": {"state": "here"},
        "lease": {"state": "claim"},
        "cmd": {"number": number, "order": {"order": "close"}},
    }
    kind = kinds[number % len(kinds)]
    with node.held() as state:
        state._send(
            kind,
            bodies.get(kind, {"load": {}, "plan": {}}),
            node=to.node if kind == "cmd" else None,
            epoch=FORGED_EPOCH,
        )


def test_who_was_away_learns_the_newest_list_before_anything_else(tmp_path: Path) -> None:
    with mosquitto(tmp_path) as broker:
        make_cluster(tmp_path, broker.url, ["one", "two", "three"])
        with nodes(tmp_path, "one", "three") as (one, three):
            defy(three)
            make_change(tmp_path / "one", lambda editor: editor.remove("three"), lambda listed: True)
            wait_for(lambda: len(one.members()) == 1, "it is gone")
            with three.held() as state:  # it could put the old list back for a moment (docs/mesh.md)
                state.roster.say = lambda: None  # type: ignore[method-assign]
            wait_for(lambda: not spread(tmp_path / "one")[1], "the broker has it: others may have heard it directly")
            cluster = read_cluster(tmp_path / "two")
            assert cluster is not None
            assert three.node in [member.node for member in cluster.listed.roll.members]
            with contextlib.closing(open_mesh(MeshConfig(tmp_path / "two", name="two", connect_s=WAIT_S))) as two:
                for number in range(21):
                    speak(three, two, number)
                wait_for(lambda: len(two.members()) == 2, "it is there")
                assert {member.name for member in two.members()} == {"one", "two"}
                assert two.state.roster.is_settled
                assert not two.state._due.inbound_orders, "no order of who was removed"
                assert two.state.lease.epoch < FORGED_EPOCH
            kept = read_cluster(tmp_path / "two")
            assert kept is not None
            assert three.node not in [member.node for member in kept.listed.roll.members]


def test_an_older_list_that_the_broker_keeps_is_replaced(tmp_path: Path) -> None:
    with mosquitto(tmp_path) as broker:
        cluster = make_cluster(tmp_path, broker.url, ["one", "two", "three"])
        old = cluster.listed
        with nodes(tmp_path, "one", "two") as (one, two):
            make_change(tmp_path / "one", lambda editor: editor.remove("three"), lambda listed: True)
            wait_for(lambda: two.cluster.version > old.version, "it is known")
            topic = str(Topic(cluster.id, "members"))
            with one.held() as state:
                state.roster.said.append(old.payload)  # as somebody who kept it would say it
                state._say_lists()
            heard: list[bytes] = []
            with contextlib.closing(
                open_mesh(MeshConfig(tmp_path / "two", is_watching=True, connect_s=WAIT_S))
            ) as watching:
                take = watching.state.take_in
                watching.state.take_in = lambda text, payload, **words: (
                    heard.append(payload) if text == topic else None,
                    take(text, payload, **words),
                )[1]  # type: ignore[method-assign,func-returns-value]
                wait_for(
                    lambda: one.cluster.listed.payload in heard,
                    "the newer one is said again",
                )
            assert two.cluster.version == one.cluster.version > old.version


def test_a_removal_stands_though_another_device_changed_more_that_had_not_heard_of_it(tmp_path: Path) -> None:
    with mosquitto(tmp_path) as broker:
        make_cluster(tmp_path, broker.url, ["one", "two", "three"])
        one, two = tmp_path / "one", tmp_path / "two"
        listed = change_list(one, lambda editor: editor.change_role("two", "lead")).listed
        known = read_cluster(two)
        assert known is not None
        write_cluster(two, known.adopt(listed, device_key(two)))
        for _ in range(3):
            later = change_list(two, lambda editor: editor.rotate(secrets.token_bytes(32))).listed
        make_change(one, lambda editor: editor.remove("three"), lambda listed: len(listed.members) == 2)
        for folder in (two, one):  # who heard of the removal says it, and who made it hears that
            found, why = spread(folder)
            assert found is not None, why
            assert found.order > later.order
            assert {member.name for member in found.roll.members} == {"one", "two"}


def test_an_access_list_for_mosquitto_is_written(tmp_path: Path) -> None:
    device, path = Device(tmp_path / "one"), tmp_path / "edge.acl"
    assert "--broker" in device.run("init", "--acl", str(path), code=2).stderr
    made = json.loads(device.run("init", "--broker", "mqtt://edge:word@127.0.0.1", "--acl", str(path), "--json").stdout)
    lines = path.read_text().splitlines()
    assert "user edge" in lines
    assert f"pattern write edge/v1/{made['cluster']}/node/%c/status" in lines
    assert f"topic write edge/v1/{made['cluster']}/members" in lines
    for place, code, told in (
        (path, 2, "exists, and is no empty file"),
        (tmp_path, 2, "is there, and is no file"),
        (tmp_path / "nowhere" / "acl", 5, "cannot be written"),
    ):
        assert told in device.run("init", "--broker", "h", "--acl", str(place), "--replace", code=code).stderr
    assert path.read_text().splitlines() == lines
    known = read_cluster(device.mesh_folder)
    assert known
    assert known.id == made["cluster"]


@pytest.mark.parametrize("fails", [False, True])
def test_an_access_list_goes_into_the_file_that_was_prepared_for_it(tmp_path: Path, fails: bool) -> None:
    file, link = tmp_path / "edge.acl", tmp_path / "link.acl"
    file.touch()
    file.chmod(0o640)
    link.symlink_to(file)
    before = file.stat()
    told = pytest.raises(ValueError, match="no cluster") if fails else contextlib.nullcontext()
    with told, _acl_written(link, "mqtt://edge@127.0.0.1", "one"):
        assert "user edge" in file.read_text()
        if fails:
            raise ValueError("no cluster")
    after = file.stat()
    assert link.is_symlink()
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
    assert bool(after.st_size) is not fails


def test_a_cluster_over_a_broker_with_that_access_list(tmp_path: Path) -> None:
    first, second, acl = Device(tmp_path / "first"), Device(tmp_path / "second"), tmp_path / "acl"
    acl.write_text("")
    with mosquitto(tmp_path, f"allow_anonymous true\nacl_file {acl}") as broker:
        line = json.loads(first.run("init", "--broker", broker.url, "--acl", str(acl), "--json", "--show-line").stdout)[
            "join_line"
        ]
        broker.stop()
        broker.start()
        with first.joined("--name", "one"), second.joined(line, "--name", "two", code=12) as two:
            wait_for(lambda: "2 devices" in second.run("status").stdout, "both are there")
            first.run("remove", "two")
            assert two.wait(WAIT_S) == 12
            wait_for(lambda: not spread(first.mesh_folder)[1], "the broker has it")
            listed, _ = spread(first.mesh_folder)
            assert listed is not None
            assert len(listed.roll.members) == 1
