"""A cluster as a device knows it: its id, secret, broker and list of members, in files that only the owner can read.

The secret travels inside the list, sealed for each member. Members prove that they know the secret with the HMAC of
their node's public key, which is useless without the private key. People carry a join line: an invitation that admits
a limited number of devices for a limited time.
"""

from __future__ import annotations

import base64
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

from edge_run.base.errors import ConfigError, EdgeRunError, MeshError, reason_of
from edge_run.base.strict_json import parse
from edge_run.devices.members.identity import check_private, write_private
from edge_run.devices.members.keys import KEY_BYTES, DeviceKey, from_text, node_of, to_text
from edge_run.devices.members.list_changes import found, secret_of
from edge_run.devices.members.member_list import SECRET_BYTES, MemberList, Role, Version, read_list

PROOF_BYTES = 32
MOST_FILE_BYTES = 64 << 10
PORT, TLS_PORT = 1883, 8883
FIND_BROKER = "mqtt:"  # the join line names no address: the broker is looked for on the local network
_FILE = "cluster.json"
_PREFIX = "edge-run-join-2-"
MOST_LINE_LETTERS = 4096
_ID = re.compile(r"[a-z2-7]{8}")


@dataclass(frozen=True, slots=True)
class Broker:
    """The address of a broker, and how to connect to it.

    is_offered: nobody named the user; a broker that does not know it may take whoever comes without one.
    """

    host: str
    port: int = PORT
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    is_tls: bool = False
    is_offered: bool = False


@dataclass(frozen=True, slots=True)
class Cluster:
    """What makes a device a member.

    id: of the cluster.
    secret: known to members alone.
    broker: its URL; a password in it is a secret too.
    founder: the key of the founder, by which lists of members are verified.
    listed: the newest list of members that is known.
    serves: where this device runs the broker itself, as HOST:PORT.
    authority: the PEM file of who vouches for a TLS broker that the system does not know.
    listen: where the data links of this device's programs listen; empty: on loopback.
    port: of the data link of `mesh join`, a run beside it takes the next one; 0: any that is free.
    """

    id: str
    secret: bytes = field(repr=False)
    broker: str = field(repr=False)
    founder: bytes
    listed: MemberList = field(repr=False)
    serves: str | None = None
    authority: str | None = None
    listen: tuple[str, ...] = ()
    port: int = 0

    def __post_init__(self) -> None:
        _check(self.id, self.broker, (self.secret, self.founder))

    def proof(self, public_key: bytes) -> bytes:
        """Return what shows that the holder of `public_key` was given the secret."""
        return hmac.digest(self.secret, b"edge-run member\0" + self.id.encode() + public_key, hashlib.sha256)

    def is_proven(self, public_key: bytes, proof: bytes) -> bool:
        """Whether `proof` is that of `public_key`."""
        return hmac.compare_digest(self.proof(public_key), proof)

    @property
    def version(self) -> Version:
        """The version of the list of members."""
        return self.listed.version

    def admits(self, device: bytes) -> bool:
        """Whether the device with the key `device` is a member."""
        return self.role_of(device) is not None

    def role_of(self, device: bytes) -> Role | None:
        """Return what the device may do; None where it is no member."""
        member = self.listed.members.get(device)
        return member.role if member else None

    def why_not(self, device: bytes) -> str:
        """Return in words why a device is no member."""
        is_removed = node_of(device) in self.listed.roll.removed
        return f"{'was removed from' if is_removed else 'is no member of'} cluster {self.id}"

    def adopt(self, listed: MemberList, device: DeviceKey) -> Cluster:
        """Return the cluster with a newer list, and the secret that the list has for this device, where it has one."""
        secret = secret_of(listed, device) if device.node in listed.roll.secrets else self.secret
        return dataclasses.replace(self, listed=listed, secret=secret)


@dataclass(frozen=True, slots=True)
class Invited:
    """What a join line says.

    cluster: its id.
    founder, broker: as of the cluster.
    broker_key: as in the list's charter; empty where the broker runs on no member.
    seed: of the invitation's key.
    """

    cluster: str
    founder: bytes
    broker: str = field(repr=False)
    broker_key: bytes
    seed: bytes = field(repr=False)

    def __post_init__(self) -> None:
        _check(self.cluster, self.broker, (self.founder, self.seed, *([self.broker_key] if self.broker_key else ())))

    @property
    def key(self) -> DeviceKey:
        """The key of the invitation."""
        return DeviceKey(self.seed)


def found_cluster(
    device: DeviceKey, name: str, broker: str, serves: str | None = None, authority: str | None = None
) -> Cluster:
    """Return a new cluster that `device` founds, as its only member. name: what people call the device."""
    cluster = base64.b32encode(secrets.token_bytes(5)).decode().lower()
    secret = secrets.token_bytes(SECRET_BYTES)
    listed = found(device, cluster, name, secret, runs_broker=serves is not None)
    return Cluster(cluster, secret, broker, device.public_key, listed, serves, authority)


def _check(cluster: str, broker: str, keys: tuple[bytes, ...] = ()) -> None:
    """Raise ConfigError where an id, the URL of a broker, or any of `keys` is not of the right form."""
    if not _ID.fullmatch(cluster) or any(len(one) != KEY_BYTES for one in keys):
        raise ConfigError("cluster: its id or a key is not of the right form; paste the join line once more")
    if broker != FIND_BROKER:
        parse_broker(broker)


def invitation_line(invited: Invited) -> str:
    """Return one word that lets whoever has it ask to come in."""
    keys = (invited.founder, invited.broker_key, invited.seed)
    data = json.dumps([invited.cluster, invited.broker, *map(to_text, keys)]).encode()
    checked = zlib.crc32(data).to_bytes(4, "big") + data
    return _PREFIX + base64.urlsafe_b64encode(checked).decode().rstrip("=")


def parse_join_line(line: str) -> Invited:
    """Return the invitation that a join line is. Raises ConfigError, which does not repeat the line."""
    word = "".join(line.split())
    if not word.startswith(_PREFIX) or len(word) > MOST_LINE_LETTERS:
        raise ConfigError(
            f"join line: does not begin with {_PREFIX}; paste the whole word that begins so, out of the command that "
            "`mesh init` or `mesh invite` printed"
        )
    word = word.removeprefix(_PREFIX)
    try:
        checked = base64.b64decode(word + "=" * (-len(word) % 4), altchars=b"-_", validate=True)
        if zlib.crc32(checked[4:]).to_bytes(4, "big") != checked[:4]:
            raise ValueError
        name, broker, *words = parse(checked[4:])
        founder, broker_key, seed = (base64.b64decode(one, validate=True) for one in words)
        return Invited(name, founder, broker, broker_key, seed)
    except (ValueError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError("join line: is damaged or cut off; paste the whole line that was printed") from None


def parse_broker(url: str) -> Broker:
    """Return the broker that `url` names, as mqtt://user:password@host:1883 or mqtts://host. Raises ConfigError."""
    form = (
        "must be mqtt://HOST[:PORT] or mqtts://HOST[:PORT], with USER:PASSWORD@ before the host where it asks for it, "
        "and in these %25 for %, %2F for /, %3F for ?, %23 for #, %40 for @ and %3A for :"
    )
    try:
        parts = urlsplit(url if "://" in url else f"mqtt://{url}")
        port = parts.port
    except ValueError:  # whose words may have a part of the password
        raise ConfigError(f"broker: {form}") from None
    has_more = parts.path.strip("/") or parts.query or parts.fragment
    if parts.scheme not in ("mqtt", "mqtts") or not parts.hostname or has_more:
        raise ConfigError(f"broker: {form}")
    user, password = (None if part is None else unquote(part) for part in (parts.username, parts.password))
    is_tls = parts.scheme == "mqtts"
    return Broker(parts.hostname, port or (TLS_PORT if is_tls else PORT), user, password, is_tls)


def write_cluster(folder: Path, cluster: Cluster) -> None:
    """Keep `cluster` in `folder`. Raises MeshError."""
    content = {one.name: getattr(cluster, one.name) for one in dataclasses.fields(cluster) if one.name != "listed"}
    content |= {"secret": to_text(cluster.secret), "founder": to_text(cluster.founder)}
    try:
        write_private(members_path(folder, cluster.id), cluster.listed.payload)
        write_private(folder / _FILE, json.dumps(content, indent=1).encode())
    except OSError as error:
        raise MeshError(f"{folder / _FILE}: cannot be written ({reason_of(error)})") from error


def _read(path: Path) -> bytes:
    """Return the content of a file of the cluster's. Raises ValueError where it is far too large for one."""
    with path.open("rb") as file:
        content = file.read(MOST_FILE_BYTES + 1)
    if len(content) > MOST_FILE_BYTES:
        raise ValueError(f"more than {MOST_FILE_BYTES} bytes")
    return content


class DamagedCluster(MeshError):
    """What is kept of a cluster is of no use any more."""


def usable_cluster(folder: Path) -> Cluster | None:
    """Return what `read_cluster` does; None also where that is damaged, for whoever is about to replace it."""
    try:
        return read_cluster(folder)
    except DamagedCluster:
        return None


def read_cluster(folder: Path) -> Cluster | None:
    """Return the cluster that this device belongs to; None where it belongs to none. Raises MeshError, NotTrusted."""
    path = folder / _FILE
    try:
        content = parse(_read(path))
        check_private(path)
        listen = tuple(map(str, content.get("listen", ())))
        secret, founder = from_text(content["secret"], SECRET_BYTES), from_text(content["founder"])
        _check(content["id"], content["broker"])  # before a path is made of it
        listed = _read_members(members_path(folder, content["id"]), content["id"], founder)
        return Cluster(**content | {"secret": secret, "founder": founder, "listed": listed, "listen": listen})
    except FileNotFoundError:
        return None
    except OSError as error:
        raise MeshError(f"{path}: cannot be read ({reason_of(error)})") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedCluster(f"{path}: is damaged; join once more with `edge-run mesh join LINE`") from error


def members_path(folder: Path, cluster: str) -> Path:
    """Return where the list of members of the cluster with the id `cluster` is kept."""
    return folder / f"members-{cluster}.json"


def _read_members(path: Path, cluster: str, founder: bytes) -> MemberList:
    try:
        return read_list(path.read_bytes(), cluster, founder)
    except (OSError, EdgeRunError) as error:
        raise DamagedCluster(
            f"{path}: cannot be used ({error}); join once more with `edge-run mesh join LINE`"
        ) from error
