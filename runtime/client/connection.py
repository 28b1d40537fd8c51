"""A server at an address: requests, and the events of streams as they come. Blocks; one thread each."""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import json
import ssl
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from edge_run.base.errors import ConfigError, ContextFull, EdgeRunError, ProtocolError, reason_of
from edge_run.base.units import format_size
from edge_run.runtime.client.answer_event import AnswerEvent, answer_event

LOOPBACK = "127.0.0.1"
CONNECT_S = 10.0
SILENCE_S = 600.0  # of a server that reads a long prompt: ours says something every 5 s
MOST_LINE_BYTES = 1 << 24  # of an event, and of a document: what is longer is none that a server of ours sends
MOST_ANSWER_BYTES = 1 << 28  # of all events: some hundred thousand tokens
MOST_ERROR_BYTES = 1 << 16
_NO_ROOM = ("context_length_exceeded", "exceed_context_size_error")  # what OpenAI, and llama-server, call it


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where a server is, and what lets one in. key: empty for none."""

    host: str
    port: int
    path: str = ""
    is_tls: bool = False
    key: str = field(default="", repr=False)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.is_tls else 'http'}://{host}:{self.port}{self.path}"


def server_address(text: str, key: str = "") -> ServerAddress:
    """Return the address that a user writes: a URL, HOST:PORT, or the port of this machine. Raises ConfigError."""
    if text.isdecimal():
        text = f"{LOOPBACK}:{text}"
    advice = f"--server {text[:200]}: must be a URL, HOST:PORT or a port, as http://127.0.0.1:8080"
    try:
        found = urlsplit(text if "://" in text else f"http://{text}")
        host, port = found.hostname, found.port
    except ValueError as error:
        raise ConfigError(advice) from error
    if not host or found.scheme not in ("http", "https") or found.query or found.fragment or found.username:
        raise ConfigError(advice)
    is_tls = found.scheme == "https"
    if key and "://" not in text and not _is_loopback(host):
        raise ConfigError(
            f"--server {text[:200]}: the key would go there in clear text; write https:// before it, or http:// where "
            "you trust the network"
        )
    path = found.path.rstrip("/").removesuffix("/v1")
    return ServerAddress(host, port or (443 if is_tls else 80), path, is_tls, key)


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


class ServerClient:
    """Speaks to one server, over a connection for each request: one that is kept may be closed before the next."""

    def __init__(self, address: ServerAddress) -> None:
        self.address = address

    def reach(self) -> None:
        """Connect, and say nothing. Raises ConfigError where nobody listens, ProtocolError for what else is wrong."""
        with self._connected():
            pass

    def get(self, path: str) -> Any:
        """Return the document at a path. Raises ConfigError, ProtocolError."""
        with self._answer("GET", path) as response:
            return _document(self.address, response.read(MOST_LINE_BYTES))

    def stream(self, path: str, body: Mapping[str, Any]) -> Generator[Any, None, None]:
        """Post a document; yield the documents of the events that come. Closing the iterator ends the answer.

        Raises ConfigError where the server cannot be reached or refuses, ContextFull where it says that the text has
        no room, ProtocolError where the stream breaks off.
        """
        n_bytes = 0
        with self._answer("POST", path, {**body, "stream": True}) as response:
            while line := response.readline(MOST_LINE_BYTES):
                n_bytes += len(line)
                if n_bytes > MOST_ANSWER_BYTES:
                    raise ProtocolError(f"{self.address}: the answer has more than {format_size(MOST_ANSWER_BYTES)}")
                text = line.decode("utf-8", "replace").strip()
                said = text.removeprefix("data:").strip()  # the space is not always there
                if said == "[DONE]":
                    return
                if said and text.startswith("data:"):
                    found = _document(self.address, said)
                    if isinstance(found, dict) and found.get("error"):
                        kind = ContextFull if _is_no_room(found) else ProtocolError
                        raise kind(f"{self.address}: {_message(found)}")
                    yield found
        raise ProtocolError(f"{self.address}: went away before the answer was finished")

    def answer(self, path: str, body: Mapping[str, Any]) -> Generator[AnswerEvent, None, None]:
        """Yield what the events of a `stream` say of the answer; as there, and ProtocolError for what says nothing."""
        with contextlib.closing(self.stream(path, body)) as documents:
            for document in documents:
                try:
                    event = answer_event(document)
                except ValueError:
                    raise _foreign(self.address) from None
                yield event

    @contextlib.contextmanager
    def _answer(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        headers = {"authorization": f"Bearer {self.address.key}"} if self.address.key else {}
        data = None
        if body is not None:
            data, headers["content-type"] = json.dumps(body).encode(), "application/json"
        with self._connected() as connection:
            connection.request(method, self.address.path + path, data, headers)
            response = connection.getresponse()
            if response.status != 200:
                raise _refusal(self.address, response)
            yield response

    @contextlib.contextmanager
    def _connected(self) -> Iterator[http.client.HTTPConnection]:
        kind = http.client.HTTPSConnection if self.address.is_tls else http.client.HTTPConnection
        connection = kind(self.address.host, self.address.port, timeout=CONNECT_S)
        try:
            connection.connect()
            connection.sock.settimeout(SILENCE_S)
            yield connection
        except (OSError, UnicodeError, http.client.HTTPException) as error:  # unicode: a name that none can have
            raise _unreachable(self.address, error) from error
        finally:
            connection.close()


def _refusal(address: ServerAddress, response: http.client.HTTPResponse) -> EdgeRunError:
    """Return why a server did not answer, in its words."""
    try:
        document = json.loads(response.read(MOST_ERROR_BYTES))
        said = _message(document)
    except (ValueError, RecursionError):
        document, said = None, f"status {response.status}"
    if _is_no_room(document):
        return ContextFull(f"{address}: {said}")
    if response.status == 401:
        return ConfigError(f"{address}: {said}; give a key with --api-key-file or EDGE_RUN_API_KEY")
    retry = response.getheader("retry-after", "")
    return ConfigError(f"{address}: {said}" + (f" (in {retry} s)" if retry and response.status == 429 else ""))


def _is_no_room(document: Any) -> bool:
    """Return whether the document of an error says that a text has no room in the context."""
    error = document.get("error") if isinstance(document, dict) else None
    return isinstance(error, dict) and any(error.get(key) in _NO_ROOM for key in ("code", "type"))


def _message(document: Any) -> str:
    error = document.get("error") if isinstance(document, dict) else None
    found = error.get("message") if isinstance(error, dict) else error
    return str(found or "an error without a message")[:2000]


def _unreachable(address: ServerAddress, error: Exception) -> EdgeRunError:
    if isinstance(error, ssl.SSLError):
        return ConfigError(f"{address}: {error.reason or error}; SSL_CERT_FILE names a certificate to be trusted")
    if isinstance(error, ConnectionRefusedError):
        return ConfigError(f"{address}: nobody listens there; start edge-run serve, or give another --server")
    if isinstance(error, TimeoutError):
        return ProtocolError(f"{address}: says nothing")
    reason = reason_of(error) if isinstance(error, OSError) else f"{type(error).__name__} {error}".strip()
    return ProtocolError(f"{address}: {reason}")


def _document(address: ServerAddress, text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise _foreign(address, "JSON") from None


def _foreign(address: ServerAddress, what: str = "an event of an answer") -> ProtocolError:
    return ProtocolError(f"{address}: what came is not {what}; is it a server of OpenAI's API?")
