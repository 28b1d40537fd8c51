"""Brokers behind TLS, and brokers that are found on the local network: a real mosquitto, real multicast."""

from __future__ import annotations

import contextlib
import datetime
import gc
import ipaddress
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import zeroconf
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from edge_run.base.errors import MeshError
from edge_run.devices.broker.discovery import Advertisement, find_broker
from edge_run.devices.members.identity import device_key
from edge_run.devices.mesh.node import LocalNode
from edge_run.devices.mesh.opening import MeshConfig, open_mesh
from edge_run.devices.mesh.serving import serving
from mesh_lists import Members, make_cluster
from mosquitto import free_port, mosquitto

LOOPBACK = "127.0.0.1"
LIMIT_S = 30.0

pytestmark = pytest.mark.usefixtures("patient_mesh")


def certified(folder: Path) -> tuple[Path, Path]:
    """Write a certificate for loopback, signed by itself, and its key; return both."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a broker of a test")])
    now = datetime.datetime.now(datetime.timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(LOOPBACK))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    paths = folder / "certificate.pem", folder / "key.pem"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    paths[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, form, plain))
    return paths


def assert_they_meet(a: LocalNode, b: LocalNode) -> None:
    """Two members find each other and one does what the other orders."""
    try:
        b.serve(lambda node, epoch, order: {"echo": order["word"]})
        end_s = time.monotonic() + LIMIT_S
        while len(a.members()) < 2:
            assert time.monotonic() < end_s, "they never met"
            a.wait(timeout_s=0.2)
        a.lead(timeout_s=LIMIT_S)
        assert a.order(b.node, {"word": "hello"}, timeout_s=LIMIT_S) == {"echo": "hello"}
    finally:
        a.close()
        b.close()


# Where a handshake fails, paho leaves its socket to the garbage collector.
@pytest.mark.filterwarnings("ignore:.*SSLSocket:pytest.PytestUnraisableExceptionWarning")
def test_a_broker_behind_tls_whose_authority_is_named(tmp_path: Path) -> None:
    certificate, key = certified(tmp_path)
    with mosquitto(tmp_path, f"allow_anonymous true\ncertfile {certificate}\nkeyfile {key}") as broker:
        members = Members(f"mqtts://{LOOPBACK}:{broker.port}")

        def member(name: str, connect_s: float, **changes: object) -> LocalNode:
            return open_mesh(MeshConfig(members.move_into(tmp_path / name, **changes), name=name, connect_s=connect_s))

        assert_they_meet(*(member(name, 60, authority=str(certificate)) for name in "ab"))
        with pytest.raises(MeshError, match="certificate"):  # the system does not know who vouches for it
            member("c", 8)
        with pytest.raises(MeshError):  # and no secret is told to a broker that is not behind TLS
            member("d", 5, broker=broker.url)
    gc.collect()  # here, where it is expected, and not in a later test


def test_a_broker_is_found_on_the_local_network_by_its_members_only(tmp_path: Path) -> None:
    cluster, other, port = ("abcdefgh", bytes(32)), ("abcdefgh", bytes(range(32))), free_port()
    advertisement = Advertisement(*cluster, [LOOPBACK], port)
    try:
        found = find_broker(*cluster, LIMIT_S, interfaces=[LOOPBACK])
        assert (found.host, found.port) == (LOOPBACK, port)
        with pytest.raises(MeshError, match=r"no broker of cluster .* was found on this network in 0\.5 s; start it"):
            find_broker(*other, 0.5, interfaces=[LOOPBACK])
    finally:
        advertisement.close()
    with pytest.raises(MeshError, match="was found"):  # what is closed is no longer there
        find_broker(*cluster, 0.5, interfaces=[LOOPBACK])


def test_of_several_addresses_that_are_announced_one_that_answers_is_taken() -> None:
    """A broker's device is in networks that others are not in, such as that of its containers."""
    cluster, elsewhere = ("abcdefgh", bytes(32)), "127.0.0.3"
    with socket.create_server((LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]
        for addresses in ([elsewhere, LOOPBACK], [LOOPBACK, elsewhere]):
            with contextlib.closing(Advertisement(*cluster, addresses, port)):
                found = find_broker(*cluster, LIMIT_S, interfaces=[LOOPBACK])
                assert (found.host, found.port) == (LOOPBACK, port)


def test_where_it_cannot_be_announced_the_broker_runs_and_nothing_else_stays_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another device that repeats what it hears has the name already, as a reflector between two networks does."""

    def refuse(*_: object) -> None:
        raise zeroconf.NonUniqueNameException

    place = f"0.0.0.0:{free_port()}"
    cluster = make_cluster(tmp_path, f"mqtt://{place}", ["one"], serves=place)
    with monkeypatch.context() as patch:
        patch.setattr(zeroconf.Zeroconf, "register_service", refuse)
        with pytest.raises(MeshError, match="is announced on this network already; run it on one device only"):
            Advertisement(cluster.id, cluster.founder, [LOOPBACK], 1883)
        assert not [one for one in threading.enumerate() if "zeroconf" in one.name.lower()]
        with serving(replace(cluster, serves=place), device_key(tmp_path / "one")) as broker:
            assert broker is not None
        assert "devices find it by its address only" in caplog.text
