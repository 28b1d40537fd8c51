"""`edge-run serve` under attack: each row of the table in docs/serving.md, against the real server."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from edge_run.base.errors import ConfigError
from program import run_program
from served import Served, served, wait_for

KEY, OTHER = "the-first-key", "another-key"
SECRET = "quokkas whisper at midnight"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"# mine\n{KEY}\n{OTHER}\n")
    return file


@pytest.fixture(scope="module")
def server(kit: Path, keys: Path) -> Iterator[Served]:
    words = ("--api-key-file", keys, "--allow-origin", "https://chat.example", "-vv")
    with served(kit, "-c", 256, "-t", 1, *words) as server:
        yield server


def get(server: Served, path: str, **headers: str) -> httpx.Response:
    return server.get(path, headers={name.replace("_", "-"): text for name, text in headers.items()})


def test_beyond_loopback_it_needs_a_key(kit: Path) -> None:
    for host in ("0.0.0.0", "::"):
        done = run_program("serve", kit, "--host", host, "--port", 0)
        assert (done.returncode, done.stderr.count("\n")) == (ConfigError.exit_code, 1)
        assert "--api-key-file" in done.stderr


def test_only_health_is_open(server: Served) -> None:
    assert get(server, "/health").status_code == 200
    for path in ("/v1/models", "/props", "/slots", "/metrics", "/edge-run/status", "/nowhere"):
        assert get(server, path).status_code == 401, path
        assert get(server, path, authorization="Bearer wrong").status_code == 401
    refused = get(server, "/v1/models")
    assert refused.headers["www-authenticate"] == "Bearer"
    assert refused.json()["error"]["type"] == "authentication_error"
    for key in (KEY, OTHER):
        assert get(server, "/v1/models", authorization=f"Bearer {key}").status_code == 200
        assert get(server, "/v1/models", x_api_key=key).status_code == 200


def test_a_foreign_name_or_page_is_refused_before_its_body_is_read(server: Served) -> None:
    for header in ("Host: evil.example", "Host: localhost\r\nOrigin: https://evil.example"):
        with server.connect() as connection:
            head = f"POST /v1/completions HTTP/1.1\r\n{header}\r\nContent-Length: 1000000\r\n\r\n"
            connection.sendall(head.encode())
            assert connection.recv(12) == b"HTTP/1.1 403"


def test_http_1_0_needs_no_host(server: Served) -> None:
    for header, status in ((b"", b"200"), (b"Origin: https://evil.example\r\n", b"403")):
        with server.connect() as connection:
            connection.sendall(b"GET /health HTTP/1.0\r\n" + header + b"\r\n")
            assert connection.recv(12)[9:] == status


def test_an_allowed_page_may_ask_and_read(server: Served) -> None:
    page = {"origin": "https://chat.example", "access-control-request-headers": "authorization, x-stainless-os"}
    asked = httpx.options(f"{server.url}/v1/chat/completions", headers=page, timeout=60)
    assert asked.status_code == 204
    assert asked.headers["access-control-allow-origin"] == "https://chat.example"
    assert "x-stainless-os" in asked.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in asked.headers
    answer = get(server, "/v1/models", origin="https://chat.example", authorization=f"Bearer {KEY}")
    assert answer.headers["access-control-allow-origin"] == "https://chat.example"
    assert "retry-after" in answer.headers["access-control-expose-headers"]
    foreign = httpx.options(f"{server.url}/v1/models", headers={"origin": "https://evil.example"}, timeout=60)
    assert foreign.status_code == 403
    assert "access-control-allow-origin" not in foreign.headers


def test_every_answer_forbids_what_pages_could_do_with_it(server: Served) -> None:
    for answer in (get(server, "/health"), get(server, "/v1/models")):
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["cache-control"] == "no-store"


def post(server: Served, **how: object) -> httpx.Response:
    headers = {"authorization": f"Bearer {KEY}", **how.pop("headers", {})}  # type: ignore[dict-item]
    return httpx.post(f"{server.url}/v1/completions", headers=headers, timeout=60, **how)  # type: ignore[arg-type]


def test_large_and_deep_bodies(server: Served) -> None:
    assert post(server, content=b" " * (9 << 20)).status_code == 413
    assert post(server, content=iter([b" " * (1 << 20)] * 9)).status_code == 413
    assert post(server, content=b'{"prompt":' + b"[" * 200_000).status_code == 400
    assert post(server, content=b"", headers={"content-encoding": "gzip"}).status_code == 415
    assert post(server, json={"prompt": "a", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFFFFFFF\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 200_000 + b"\r\n\r\n",
        b"GET /" + b"x" * 200_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\r\n" * 1000 + b"\x00" * 100,
    ],
    ids=range(10),
)
def test_what_is_no_request_is_refused_and_the_server_goes_on(server: Served, data: bytes) -> None:
    with server.connect() as connection:
        answer = b""
        with contextlib.suppress(OSError):  # it need not read all of it
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(1 << 16)
        assert answer[:10] in (b"", b"HTTP/1.1 4")
    assert get(server, "/health").status_code == 200


def test_no_prompt_and_no_key_is_in_any_log(server: Served) -> None:
    """With -vv, whatever becomes of the request."""
    for body in (
        {"prompt": SECRET, "max_tokens": 2},
        {"prompt": SECRET, "max_tokens": -7},
        {"prompt": [SECRET, SECRET]},
        {"prompt": SECRET, "grammar": f"root ::= {SECRET}"},
        {"prompt": SECRET, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": SECRET}}}},
        {SECRET: SECRET},
    ):
        assert post(server, json=body).status_code in (200, 400)
    post(server, content=SECRET.encode())
    post(server, json={"prompt": "a", "max_tokens": 1}, headers={"x-secret": SECRET})
    assert "POST /v1/completions: 200" in server.said, "there is a log"
    for secret in (SECRET, "quokkas", KEY, OTHER):
        assert secret not in server.said


SLOW = """
import socket, sys
from edge_run.runtime.server.connections import BoundedProtocol

class Narrow(BoundedProtocol):
    def connection_made(self, transport):
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        super().connection_made(transport)

import edge_run.runtime.server.serving as serving
serving.BoundedProtocol = Narrow
BoundedProtocol.head_s = BoundedProtocol.body_s = BoundedProtocol.write_s = 0.5
from edge_run.cli import main
main(sys.argv[1:])
"""


def test_slow_clients_are_dropped(kit: Path) -> None:
    with served(kit, "-c", 2048, "-t", 1, program=("-c", SLOW)) as server:
        for data in (
            b"",
            b"GET / HT",
            b"GET /health HTTP/1.1\r\nHost: localhost\r\n",
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{",
        ):
            with server.connect() as connection:
                connection.sendall(data)
                assert ended(connection), data
        with server.connect() as connection:  # what comes after an answer to what was not read to its end
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: evil\r\nTransfer-Encoding: chunked\r\n\r\nZZZ\r\n"
            )
            with contextlib.suppress(ConnectionError):
                while connection.recv(65536):
                    pass
        body = b'{"prompt": "Once", "stream": true, "max_tokens": 2000, "n": 16}'
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(60)
            connection.connect((server.host, server.port))
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
            connection.sendall(head + body)

            def is_dropped() -> bool:
                with contextlib.suppress(httpx.TransportError):  # on a busy machine this client is slow, too
                    return server.aborted() > 0 and server.requests() == (0, 0)
                return False

            wait_for(is_dropped)
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            connection.settimeout(60)
            others = sockets(server)
            connection.connect((server.host, server.port))
            connection.sendall(b"GET /page/style.css HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert select.select([connection], [], [], 60)[0], "the answer has begun"
            wait_for(lambda: not sockets(server) - others)
            n_bytes = 0
            with contextlib.suppress(ConnectionError):
                while got := connection.recv(65536):
                    n_bytes += len(got)
            assert n_bytes < 11_000, "what was not read in time is not waited for"
        assert "Traceback" not in server.said


def sockets(server: Served) -> set[str]:
    """Return the sockets that a server has open."""
    found = set[str]()
    for entry in Path(f"/proc/{server.process.pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # it was closed meanwhile
            found.add(os.readlink(entry))
    return {name for name in found if name.startswith("socket:")}


FEW = """
import sys
from edge_run.runtime.server.connections import BoundedListener
BoundedListener.most_connections = 3
from edge_run.cli import main
main(sys.argv[1:])
"""


def test_one_connection_too_many_is_dropped(kit: Path) -> None:
    with served(kit, "-c", 128, "-t", 1, program=("-c", FEW)) as server, contextlib.ExitStack() as connections:
        for _ in range(3):
            connections.enter_context(server.connect())
        with server.connect() as connection:
            assert ended(connection)
        connections.close()
        wait_for(lambda: answers(server))


SILENT_S = 8.0  # much longer than to drop one at once takes
FEW_AND_SILENT = f"""
from edge_run.runtime.server.connections import BoundedProtocol
BoundedProtocol.head_s = {SILENT_S}
{FEW}"""


def test_connections_that_are_silent_before_the_handshake_count_and_are_dropped(kit: Path, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    words = ("-c", 128, "-t", 1, "--tls-cert", certificate, "--tls-key", key)
    with served(kit, *words, program=("-c", FEW_AND_SILENT)) as server, contextlib.ExitStack() as connections:
        began_s = time.monotonic()
        silent = [connections.enter_context(server.connect()) for _ in range(8)]
        assert all(map(ended, silent[3:]))
        assert time.monotonic() - began_s < SILENT_S
        assert all(map(ended, silent))
        assert SILENT_S <= time.monotonic() - began_s < 10 * SILENT_S
        wait_for(lambda: answers(server, verify=ssl.create_default_context(cafile=certificate)))


def answers(server: Served, **options: Any) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return server.get("/health", **options).status_code == 200
    return False


def ended(connection: socket.socket) -> bool:
    """Return whether the server ends a connection, without an answer."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def test_keys_are_read_anew(kit: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{KEY}\n")
    with served(kit, "-c", 128, "-t", 1, "--api-key-file", file) as server:
        for text, message in ((f"{OTHER}\n", "read anew"), ("short\n", "nothing is changed")):
            file.write_text(text)
            server.process.send_signal(signal.SIGHUP)
            wait_for(lambda: message in server.said)  # noqa: B023 - it is called here
            assert get(server, "/v1/models", x_api_key=KEY).status_code == 401
            assert get(server, "/v1/models", x_api_key=OTHER).status_code == 200
        assert server.end() == 0


def make_certificate(folder: Path, kind: str = "rsa:2048") -> tuple[Path, Path]:
    """Write a certificate and its key, in place of those that are there."""
    certificate, key = folder / "certificate", folder / "key"
    made = ["openssl", "req", "-x509", "-newkey", *kind.split(), "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*made, *names, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    return certificate, key


@pytest.mark.parametrize("kind", ["rsa:2048", "ec -pkeyopt ec_paramgen_curve:prime256v1"])
def test_a_certificate_is_read_anew(kit: Path, tmp_path: Path, kind: str) -> None:
    certificate, key = make_certificate(tmp_path)
    with served(kit, "-c", 128, "-t", 1, "--tls-cert", certificate, "--tls-key", key) as server:

        def shown() -> bytes:
            return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate((server.host, server.port)))

        def written() -> bytes:
            return ssl.PEM_cert_to_DER_cert(certificate.read_text())

        assert shown() == written()
        make_certificate(tmp_path, kind)
        assert shown() != written()
        server.process.send_signal(signal.SIGHUP)
        wait_for(lambda: "read the certificate anew" in server.said)
        assert shown() == (fresh := written())
        key.write_text("no key")
        server.process.send_signal(signal.SIGHUP)
        wait_for(lambda: "the certificate stays as it is: --tls-cert" in server.said)
        assert shown() == fresh
        assert server.end() == 0


def test_tls(kit: Path, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    with served(kit, "-c", 128, "-t", 1, "--tls-cert", certificate, "--tls-key", key) as server:
        assert server.url.startswith("https://")
        trusting = ssl.create_default_context(cafile=certificate)
        assert server.get("/health", verify=trusting).json() == {"status": "ok"}
    for words in (
        ["--tls-cert", certificate],
        ["--tls-cert", key, "--tls-key", key],
        ["--tls-cert", kit, "--tls-key", 1],
    ):
        done = run_program("serve", kit, *words)
        assert (done.returncode, done.stderr.count("\n")) == (ConfigError.exit_code, 1)
        assert "--tls-cert" in done.stderr
