"""What makes a device a member: its key, its cluster, the join line; files that only the owner can read."""

from __future__ import annotations

import base64
import dataclasses
import errno
import fcntl
import json
import os
import re
import stat
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest

from edge_run.base.errors import ConfigError, MeshError, NotTrusted
from edge_run.devices.members import identity as identity_module
from edge_run.devices.members.cluster import (
    FIND_BROKER,
    Cluster,
    Invited,
    found_cluster,
    invitation_line,
    parse_broker,
    parse_join_line,
    read_cluster,
    write_cluster,
)
from edge_run.devices.members.identity import INCARNATION_DIGITS, make_identity, take_identity
from edge_run.devices.members.keys import DeviceKey, is_signed, node_of
from edge_run.devices.members.list_file import keep_cluster
from edge_run.devices.mesh.opening import MeshConfig, check_listen, known_cluster, open_mesh, reachable

DEVICE = DeviceKey(bytes(range(32)))


def now() -> float:
    return 1.7e9


def cluster_at(broker: str = "mqtt://host") -> Cluster:
    return found_cluster(DEVICE, "one", broker)


def invited_to(broker: str, broker_key: bytes = b"b" * 32) -> Invited:
    return Invited("abcdefgh", b"f" * 32, broker, broker_key, b"s" * 32)


@pytest.mark.parametrize("broker", ["mqtts://me:pass%20word@host:1234", FIND_BROKER])
@pytest.mark.parametrize("broker_key", [b"b" * 32, b""])
def test_a_join_line_says_what_it_was_made_of(broker: str, broker_key: bytes) -> None:
    invited = invited_to(broker, broker_key)
    assert parse_join_line(invitation_line(invited)) == invited
    assert parse_join_line(f"  {invitation_line(invited)}\n") == invited


def lined(*content: object, prefix: str = "edge-run-join-2-") -> str:
    data = json.dumps(content).encode()
    return prefix + base64.urlsafe_b64encode(zlib.crc32(data).to_bytes(4, "big") + data).decode().rstrip("=")


def test_a_line_with_the_secret_itself_admits_nobody() -> None:
    """There were such lines, good for ever, before any version was released."""
    secret = base64.b64encode(bytes(32)).decode()
    with pytest.raises(ConfigError, match=r"^join line: does not begin with edge-run-join-2-; paste the whole word"):
        parse_join_line(lined("abcdefgh", secret, "mqtt://host", prefix="edge-run-join-1-"))
    with pytest.raises(ConfigError, match=r"^join line: is damaged"):
        parse_join_line(lined("abcdefgh", secret, "mqtt://host"))


@pytest.mark.parametrize("wrong", range(3))
@pytest.mark.parametrize("length", [0, 31, 33])
def test_a_line_whose_keys_are_none_is_refused(wrong: int, length: int) -> None:
    keys = [base64.b64encode(bytes(length if number == wrong else 32)).decode() for number in range(3)]
    line = lined("abcdefgh", "mqtt://host", *keys)
    if (wrong, length) == (1, 0):
        assert parse_join_line(line).broker_key == b"", "the broker runs on no member"
    else:
        with pytest.raises(ConfigError, match="its id or a key is not of the right form"):
            parse_join_line(line)


@pytest.mark.parametrize("damage", [lambda s: s[:-1], lambda s: s[:60] + "A" + s[61:], lambda s: "x" + s, lambda s: ""])
def test_a_damaged_join_line_is_refused_and_not_repeated(damage: object) -> None:
    line = invitation_line(invited_to("mqtt://host"))
    with pytest.raises(ConfigError) as caught:
        parse_join_line(damage(line))  # type: ignore[operator]
    assert line[30:50] not in str(caught.value)


def test_secrets_are_not_shown() -> None:
    cluster = cluster_at("mqtt://me:hidden@host")
    assert "hidden" not in repr(cluster)
    assert cluster.secret.hex() not in repr(cluster)
    assert repr(cluster.secret) not in repr(cluster)
    assert "hidden" not in repr(parse_broker(cluster.broker))
    assert "DeviceKey" not in repr(make_identity(now))


def test_brokers() -> None:
    assert parse_broker("host").port == 1883
    broker = parse_broker("mqtts://me:p%40ss@[::1]")
    assert (broker.host, broker.port, broker.user, broker.password, broker.is_tls) == ("::1", 8883, "me", "p@ss", True)
    for wrong in ("http://host", "mqtt://", "mqtt://host:99999", "mqtt://host/path"):
        with pytest.raises(ConfigError):
            parse_broker(wrong)


def test_what_the_error_says_of_signs_in_a_password_is_how_they_are_read() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_broker("mqtt://me:a/b@host")
    written = dict(re.findall(r"(%\w\w) for (\S)", caught.value.message))
    assert sorted(written.values()) == sorted("%/?#@:")
    assert parse_broker(f"mqtt://me:{''.join(written)}@host").password == "".join(written.values())


def test_an_error_has_no_part_of_a_password() -> None:
    for password in ("secret/word", "secret#word", "secret?word", "[secret"):
        with pytest.raises(ConfigError) as caught:
            parse_broker(f"mqtt://me:{password}@host")
        assert "secret" not in f"{caught.value} {caught.value.__cause__}"
    with pytest.raises(ConfigError):
        parse_broker("mqtt://me:12#34@host")


def test_files_are_private(tmp_path: Path) -> None:
    cluster = cluster_at()
    write_cluster(tmp_path / "mesh", cluster)
    identity = take_identity(tmp_path / "mesh", now)
    identity.release()
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "mesh").iterdir()}
    assert modes.keys() >= {"cluster.json", f"members-{cluster.id}.json", "node.key"}
    assert set(modes.values()) == {0o600}
    assert stat.S_IMODE((tmp_path / "mesh").stat().st_mode) == 0o700
    assert read_cluster(tmp_path / "mesh") == cluster == known_cluster(tmp_path / "mesh")


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    write_cluster(tmp_path, cluster_at())
    take_identity(tmp_path, now).release()
    for name in ("cluster.json", "node.key"):
        (tmp_path / name).chmod(0o644)
    with pytest.raises(NotTrusted, match="chmod 600"):
        read_cluster(tmp_path)
    with pytest.raises(NotTrusted, match="chmod 600"):
        take_identity(tmp_path, now)


def test_damaged_files_are_said_to_be(tmp_path: Path) -> None:
    assert read_cluster(tmp_path) is None
    with pytest.raises(MeshError, match="belongs to none"):
        known_cluster(tmp_path)
    write_cluster(tmp_path, cluster_at())
    (tmp_path / "cluster.json").write_text("{")
    with pytest.raises(MeshError, match="is damaged"):
        read_cluster(tmp_path)
    fresh = cluster_at()
    assert keep_cluster(tmp_path, lambda known: known or fresh) == fresh, "as the message says"
    assert read_cluster(tmp_path) == fresh


@pytest.mark.parametrize(
    "change",
    [{"founder": ""}, {"founder": None}, {"secret": "AAAA"}, {"id": "../../up"}, {"id": None}, {"broker": "http://x"}],
)
def test_a_cluster_without_a_founder_or_a_list_is_none(tmp_path: Path, change: dict[str, object]) -> None:
    """Not one in which whoever knows the secret may do everything."""
    cluster = cluster_at()
    write_cluster(tmp_path, cluster)
    path = tmp_path / "cluster.json"
    kept = json.loads(path.read_text())
    path.write_text(json.dumps({**kept, **change}))
    with pytest.raises(MeshError, match=r"cluster\.json: is damaged; join once more"):
        read_cluster(tmp_path)
    path.write_text(json.dumps({name: value for name, value in kept.items() if name not in change}))
    with pytest.raises(MeshError, match=r"cluster\.json: is damaged; join once more"):
        read_cluster(tmp_path)
    path.write_text(json.dumps(kept))
    assert read_cluster(tmp_path) == cluster
    (tmp_path / f"members-{cluster.id}.json").unlink()
    with pytest.raises(MeshError, match=r"members-.*: cannot be used .*; join once more"):
        read_cluster(tmp_path)


def test_a_folder_may_be_a_text_and_addresses_a_single_one(tmp_path: Path) -> None:
    """The text failed as no path does, and each letter of an address was taken for one."""
    with pytest.raises(MeshError, match="belongs to none"):
        open_mesh(MeshConfig(str(tmp_path)))
    write_cluster(tmp_path, cluster_at())
    with pytest.raises(ConfigError, match=r"^listen='192\.0\.2\.1': is no address of this device"):
        open_mesh(MeshConfig(str(tmp_path), listen="192.0.2.1"))


def test_an_address_that_was_remembered_is_no_option_of_who_reads_that_it_is_gone(tmp_path: Path) -> None:
    write_cluster(tmp_path, dataclasses.replace(cluster_at(), listen=("192.0.2.9",)))
    with pytest.raises(ConfigError, match=r"^the address that `edge-run mesh join` remembered, 192\.0\.2\.9: is no "):
        open_mesh(MeshConfig(tmp_path))


def test_a_node_keeps_its_id_and_gets_later_incarnations(tmp_path: Path) -> None:
    first = take_identity(tmp_path, now)
    first.release()
    clock_went_back = take_identity(tmp_path, lambda: 1.6e9)
    assert (first.node, first.is_lasting) == (clock_went_back.node, True)
    assert clock_went_back.incarnation > first.incarnation
    other = take_identity(tmp_path, now)  # while the first of this device lives
    assert other.node != first.node
    assert not other.is_lasting
    clock_went_back.release()


def test_a_key_that_was_given_back_is_not_given_back_again(tmp_path: Path) -> None:
    """Its descriptor is somebody else's by then."""
    identity = take_identity(tmp_path, now)
    (descriptor,) = identity._lock
    identity.release()
    opened = os.open(os.devnull, os.O_RDONLY)
    try:
        os.dup2(opened, descriptor)
        identity.release()
        assert os.fstat(descriptor)
    finally:
        for one in {opened, descriptor}:
            os.close(one)


def test_signatures() -> None:
    one, other = make_identity(now), make_identity(now)
    assert one.node == node_of(one.public_key)
    assert is_signed(one.public_key, one.sign(b"word"), b"word")
    assert not is_signed(one.public_key, other.sign(b"word"), b"word")
    assert not is_signed(one.public_key, one.sign(b"word"), b"words")


def test_the_proof_is_of_one_key_and_one_cluster() -> None:
    cluster, other = cluster_at(), cluster_at()
    key = make_identity(now).public_key
    assert cluster.is_proven(key, cluster.proof(key))
    assert not cluster.is_proven(make_identity(now).public_key, cluster.proof(key))
    assert not other.is_proven(key, cluster.proof(key))


def test_places() -> None:
    assert reachable(("127.0.0.1", "::1"), 7) == ["tcp://127.0.0.1:7", "tcp://[::1]:7"]
    assert "tcp://127.0.0.1:7" in reachable(("0.0.0.0",), 7)
    check_listen(("127.0.0.1", "0.0.0.0"), 0)
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        check_listen(("192.0.2.1",), 0)


NETWORK = """
ip link set lo up && ip addr add 10.91.7.1/24 dev lo label lo:1 && ip addr add 10.91.8.1/24 dev lo &&
ip route add default dev lo src 10.91.7.1 || exit 77
exec "$0" -c "$1"
"""


def on_another_network(program: str) -> list[str]:
    """Return the words that a program in Python prints where this device has other addresses."""
    words = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", NETWORK, sys.executable, program]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError as error:
        pytest.skip(f"no namespaces here: {error}")
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"no namespaces here: {done.stderr}")
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_an_address_with_a_label_is_one_of_its_card() -> None:
    """It is listed as a card of its own, of which no state is known."""
    program = 'from edge_run.devices.mesh.opening import reachable; print(*reachable(("0.0.0.0",), 7))'
    assert on_another_network(program) == ["tcp://10.91.8.1:7", "tcp://10.91.7.1:7", "tcp://127.0.0.1:7"]


def test_a_join_line_has_the_address_of_the_network_that_others_share() -> None:
    program = (
        "from edge_run.devices.members.cluster import found_cluster\n"
        "from edge_run.devices.members.keys import DeviceKey\n"
        "from edge_run.devices.mesh.opening import shown_broker\n"
        "made = [found_cluster(DeviceKey(bytes(32)), 'x', 'mqtt://x', one) for one in ('0.0.0.0:1883', '10.0.0.7')]\n"
        "print(*map(shown_broker, made))"
    )
    assert on_another_network(program) == ["mqtt://10.91.7.1:1883", "mqtt://10.0.0.7:1883"]


@pytest.mark.parametrize("kept", ["99999999999999999999", "1" * 5000, "true", "1e15", '"7"', "-1", "[", ""])
def test_the_last_start_that_was_kept_may_be_anything(kept: str, tmp_path: Path) -> None:
    (tmp_path / "node.incarnation").write_text(kept)
    incarnations = []
    for _ in range(2):
        identity = take_identity(tmp_path, now)
        identity.release()
        incarnations.append(identity.incarnation)
    assert [len(incarnation) for incarnation in incarnations] == [INCARNATION_DIGITS, INCARNATION_DIGITS]
    assert incarnations[0] < incarnations[1]


@pytest.mark.parametrize("port", [1, 80, 1023])
def test_ports_that_nobody_would_use(port: int) -> None:
    check_listen((), 0)
    check_listen((), 1024)
    with pytest.raises(ConfigError, match="from 1024 on"):
        check_listen((), port)


def test_a_device_whose_drive_is_full_or_read_only_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its key is there; that the start cannot be noted is told."""
    first = take_identity(tmp_path, now)
    first.release()
    real = os.open
    for number in (errno.ENOSPC, errno.EROFS):

        def refuse(path: Any, flags: int, *rest: Any, number: int = number, **more: Any) -> int:
            is_new = flags & os.O_CREAT and not os.path.exists(path)
            if is_new or (number == errno.EROFS and flags & (os.O_RDWR | os.O_WRONLY)):
                raise OSError(number, os.strerror(number), str(path))
            return real(path, flags, *rest, **more)

        with monkeypatch.context() as patch:
            patch.setattr(os, "open", refuse)
            again = take_identity(tmp_path, lambda: now() + 10)
        assert (again.node, again.is_lasting) == (first.node, True)
        assert again.incarnation > first.incarnation
        again.release()


def test_a_device_on_a_file_system_without_locks_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flock = fcntl.flock

    def refuse(descriptor: int, how: int) -> None:
        if os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")).startswith("node.key"):
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", refuse)
    (tmp_path / "user").mkdir()
    monkeypatch.setattr(identity_module, "user_folders", lambda: [tmp_path / "user"])
    nodes = set()
    for _ in range(2):
        identity = take_identity(tmp_path, now)
        assert identity.is_lasting
        nodes.add(identity.node)
        second = take_identity(tmp_path, now)  # of a process beside it
        assert not second.is_lasting
        assert second.node != identity.node
        identity.release()
    assert len(nodes) == 1
