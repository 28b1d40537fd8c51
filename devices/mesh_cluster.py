"""A cluster as a device knows it: its id, its secret and its broker, in a file that only the owner can read.

The secret never travels but in the join line, which a person carries. What travels is a proof: the HMAC of a node's
public key, which is of no use without the key's other half.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hashlib
import hmac
import json
import re
import secrets
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from edge_run.base.errors import ConfigError, MeshError
from edge_run.devices.mesh_identity import check_private, write_private

SECRET_BYTES, PROOF_BYTES = 32, 32
PORT, TLS_PORT = 1883, 8883
FIND_BROKER = "mqtt:"  # the join line names no address: the broker is looked for on the local network
_FILE, _PREFIX = "cluster.json", "edge-run-join-1-"
_ID = re.compile(r"[a-z2-7]{8}")


@dataclass(frozen=True, slots=True)
class Broker:
    """Where a broker is, and how it wants to be spoken to."""

    host: str
    port: int = PORT
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    is_tls: bool = False

    @property
    def place(self) -> str:
        """Its address, for messages: without the password."""
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Cluster:
    """What makes a device a member.

    broker: its URL; a password in it is a secret too. serves: where this device runs the broker itself, as HOST:PORT.
    authority: PEM file of who vouches for a TLS broker, for one that the system does not know. listen: where the data
    links of this device's programs listen; empty: on loopback. port: of that of `mesh join`; a run beside it takes the
    next one; 0: any that is free.
    """

    id: str
    secret: bytes = field(repr=False)
    broker: str = field(repr=False)
    serves: str | None = None
    authority: str | None = None
    listen: tuple[str, ...] = ()
    port: int = 0

    def __post_init__(self) -> None:
        if not _ID.fullmatch(self.id) or len(self.secret) != SECRET_BYTES:
            raise ConfigError("cluster: its id or its secret is not of the right form; paste the join line once more")
        if self.broker != FIND_BROKER:
            parse_broker(self.broker)

    def proof(self, public_key: bytes) -> bytes:
        """Return what shows that the holder of `public_key` was given the secret."""
        return hmac.digest(self.secret, b"edge-run member\0" + self.id.encode() + public_key, hashlib.sha256)

    def is_proven(self, public_key: bytes, proof: bytes) -> bool:
        """Whether `proof` is that of `public_key`."""
        return hmac.compare_digest(self.proof(public_key), proof)

    def derive(self, purpose: str) -> str:
        """Return a password for `purpose` that every member can make."""
        return hmac.new(self.secret, b"edge-run " + purpose.encode(), hashlib.sha256).hexdigest()[:32]


def new_cluster(broker: str, serves: str | None = None, authority: str | None = None) -> Cluster:
    """Return a cluster that nobody knows yet."""
    name = base64.b32encode(secrets.token_bytes(5)).decode().lower()
    return Cluster(name, secrets.token_bytes(SECRET_BYTES), broker, serves, authority)


def join_line(cluster: Cluster) -> str:
    """Return one word that makes whoever has it a member: a secret."""
    content = json.dumps([cluster.id, base64.b64encode(cluster.secret).decode(), cluster.broker]).encode()
    checked = zlib.crc32(content).to_bytes(4, "big") + content
    return _PREFIX + base64.urlsafe_b64encode(checked).decode().rstrip("=")


def parse_join_line(line: str) -> Cluster:
    """Return the cluster that a join line is of. Raises ConfigError, which does not repeat the line."""
    word = "".join(line.split())
    if not word.startswith(_PREFIX):
        raise ConfigError(f"join line: does not begin with {_PREFIX}; paste the whole line that `mesh init` printed")
    word = word.removeprefix(_PREFIX)
    try:
        checked = base64.b64decode(word + "=" * (-len(word) % 4), altchars=b"-_", validate=True)
        if zlib.crc32(checked[4:]).to_bytes(4, "big") != checked[:4]:
            raise ValueError
        name, secret, broker = json.loads(checked[4:])
        return Cluster(name, base64.b64decode(secret), broker)
    except (ValueError, TypeError, binascii.Error) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError("join line: is damaged or cut off; paste the whole line that `mesh init` printed") from None


def parse_broker(url: str) -> Broker:
    """Return the broker that `url` names, as mqtt://user:password@host:1883 or mqtts://host. Raises ConfigError."""
    form = "must be mqtt://HOST[:PORT] or mqtts://HOST[:PORT], with USER:PASSWORD@ before the host where it asks for it"
    try:
        parts = urlsplit(url if "://" in url else f"mqtt://{url}")
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"broker: {error}; {form}") from None
    if parts.scheme not in ("mqtt", "mqtts") or not parts.hostname or parts.path.strip("/") or parts.query:
        raise ConfigError(f"broker: {form}")
    user, password = (None if part is None else unquote(part) for part in (parts.username, parts.password))
    is_tls = parts.scheme == "mqtts"
    return Broker(parts.hostname, port or (TLS_PORT if is_tls else PORT), user, password, is_tls)


def write_cluster(folder: Path, cluster: Cluster) -> None:
    """Keep `cluster` in `folder`. Raises MeshError."""
    content = dataclasses.asdict(cluster) | {"secret": base64.b64encode(cluster.secret).decode()}
    try:
        write_private(folder / _FILE, json.dumps(content, indent=1).encode())
    except OSError as error:
        raise MeshError(f"{folder / _FILE}: cannot be written ({error.strerror})") from error


def read_cluster(folder: Path) -> Cluster | None:
    """Return the cluster that this device belongs to; None where it belongs to none. Raises MeshError, NotTrusted."""
    path = folder / _FILE
    try:
        content = json.loads(path.read_bytes())
        check_private(path)
        listen = tuple(map(str, content.get("listen", ())))
        return Cluster(**content | {"secret": base64.b64decode(content["secret"]), "listen": listen})
    except FileNotFoundError:
        return None
    except OSError as error:
        raise MeshError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise MeshError(f"{path}: is damaged; join once more with `edge-run mesh join LINE`") from error
