"""A cluster as a device knows it: its id, secret, broker and list of members, in files that only the owner can read.

The secret travels inside the list, sealed for each member. Members prove that they know the secret with the HMAC of
their node's public key, which is useless without the private key. People carry a join line: an invitation that admits
a limited number of devices for a limited time.

Clusters that were made before there were lists have join lines with the secret itself; such a line admits for good.
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
from edge_run.devices.members.keys import KEY_BYTES, DeviceKey, node_of, to_text
from edge_run.devices.members.list_changes import secret_of
from edge_run.devices.members.member_list import NO_VERSION, SECRET_BYTES, MemberList, Role, Version, read_list

PROOF_BYTES = 32
MOST_FILE_BYTES = 64 << 10
PORT, TLS_PORT = 1883, 8883
FIND_BROKER = "mqtt:"  # the join line names no address: the broker is looked for on the local network
BROKER_PASSWORD, HOME_PASSWORD = "broker", "home assistant"  # for whom passwords of an embedded broker are derived
_FILE = "cluster.json"
_SECRET_PREFIX, _PREFIX = "edge-run-join-1-", "edge-run-join-2-"
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
    serves: where this device runs the broker itself, as HOST:PORT.
    authority: the PEM file of who vouches for a TLS broker that the system does not know.
    listen: where the data links of this device's programs listen; empty: on loopback.
    port: of the data link of `mesh join`, a run beside it takes the next one; 0: any that is free.
    founder: the key of the founder, by which lists of members are verified; empty where the cluster has none.
    listed: the newest list of members that is known.
    """

    id: str
    secret: bytes = field(repr=False)
    broker: str = field(repr=False)
    serves: str | None = None
    authority: str | None = None
    listen: tuple[str, ...] = ()
    port: int = 0
    founder: bytes = b""
    listed: MemberList | None = field(default=None, repr=False)

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

    @property
    def version(self) -> Version:
        """The version of the list of members."""
        return self.listed.version if self.listed else NO_VERSION

    def admits(self, device: bytes) -> bool:
        """Whether the device with the key `device` is a member, by the list; where there is none, it is."""
        return self.role_of(device) is not None

    def role_of(self, device: bytes) -> Role | None:
        """Return what the device may do; None where it is no member. Where there is no list, all may do all."""
        if self.listed is None:
            return None if self.founder else "lead"
        member = self.listed.members.get(device)
        return member.role if member else None

    def why_not(self, device: bytes) -> str:
        """Return in words why a device is no member."""
        is_removed = self.listed is not None and node_of(device) in self.listed.roll.removed
        return f"{'was removed from' if is_removed else 'is no member of'} cluster {self.id}"

    def adopt(self, listed: MemberList, device: DeviceKey) -> Cluster:
        """Return the cluster with a newer list, and the secret that the list has for this device, where it has one."""
        secret = secret_of(listed, device) if device.node in listed.roll.secrets else self.secret
        return dataclasses.replace(self, listed=listed, secret=secret)

    def derive(self, purpose: str) -> str:
        """Return a password for `purpose` that every member can make."""
        return hmac.new(self.secret, b"edge-run " + purpose.encode(), hashlib.sha256).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Invited:
    """What a join line of a cluster with a list says.

    seed: of the invitation's key.
    broker_key: as in the list's charter; empty where the broker runs on no member.
    broker: its URL.
    """

    cluster: str
    founder: bytes
    broker: str = field(repr=False)
    broker_key: bytes
    seed: bytes = field(repr=False)

    @property
    def key(self) -> DeviceKey:
        """The key of the invitation."""
        return DeviceKey(self.seed)


def new_cluster(broker: str, serves: str | None = None, authority: str | None = None) -> Cluster:
    """Return a cluster that nobody knows yet, without a list."""
    name = base64.b32encode(secrets.token_bytes(5)).decode().lower()
    return Cluster(name, secrets.token_bytes(SECRET_BYTES), broker, serves, authority)


def secret_line(cluster: Cluster) -> str:
    """Return the join line of a cluster without a list, as they were made before: its secret, which makes a member."""
    return _line(_SECRET_PREFIX, [cluster.id, to_text(cluster.secret), cluster.broker])


def invitation_line(invited: Invited) -> str:
    """Return one word that lets whoever has it ask to come in."""
    keys = (invited.founder, invited.broker_key, invited.seed)
    return _line(_PREFIX, [invited.cluster, invited.broker, *map(to_text, keys)])


def parse_join_line(line: str) -> Cluster | Invited:
    """Return what a join line says: a cluster, or an invitation. Raises ConfigError, which does not repeat the line."""
    word = "".join(line.split())
    prefix = next((one for one in (_PREFIX, _SECRET_PREFIX) if word.startswith(one)), None)
    if prefix is None or len(word) > MOST_LINE_LETTERS:
        raise ConfigError(
            f"join line: does not begin with {_PREFIX}; paste the whole word that begins so, out of the command that "
            "`mesh init` or `mesh invite` printed"
        )
    word = word.removeprefix(prefix)
    try:
        checked = base64.b64decode(word + "=" * (-len(word) % 4), altchars=b"-_", validate=True)
        if zlib.crc32(checked[4:]).to_bytes(4, "big") != checked[:4]:
            raise ValueError
        if prefix == _SECRET_PREFIX:
            name, secret, broker = parse(checked[4:])
            return Cluster(name, base64.b64decode(secret), broker)
        name, broker, *words = parse(checked[4:])
        founder, broker_key, seed = (base64.b64decode(one, validate=True) for one in words)
        if len(founder) != KEY_BYTES or len(seed) != KEY_BYTES or len(broker_key) not in (0, KEY_BYTES):
            raise ValueError
        Cluster(name, bytes(SECRET_BYTES), broker)  # checks both
        return Invited(name, founder, broker, broker_key, seed)
    except (ValueError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError("join line: is damaged or cut off; paste the whole line that was printed") from None


def _line(prefix: str, content: list[str]) -> str:
    data = json.dumps(content).encode()
    checked = zlib.crc32(data).to_bytes(4, "big") + data
    return prefix + base64.urlsafe_b64encode(checked).decode().rstrip("=")


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
        if cluster.listed is not None:
            write_private(members_path(folder, cluster), cluster.listed.payload)
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
        keys = {name: base64.b64decode(content.get(name, "")) for name in ("secret", "founder")}
        cluster = Cluster(**content | keys | {"listen": listen})
        return dataclasses.replace(cluster, listed=read_members(folder, cluster)) if cluster.founder else cluster
    except FileNotFoundError:
        return None
    except OSError as error:
        raise MeshError(f"{path}: cannot be read ({reason_of(error)})") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedCluster(f"{path}: is damaged; join once more with `edge-run mesh join LINE`") from error


def members_path(folder: Path, cluster: Cluster) -> Path:
    """Return where the list of members of `cluster` is kept."""
    return folder / f"members-{cluster.id}.json"


def read_members(folder: Path, cluster: Cluster) -> MemberList:
    """Return the list of members that is kept in `folder`. Raises MeshError where there is none of the cluster."""
    path = members_path(folder, cluster)
    try:
        return read_list(path.read_bytes(), cluster.id, cluster.founder)
    except (OSError, EdgeRunError) as error:
        raise DamagedCluster(
            f"{path}: cannot be used ({error}); join once more with `edge-run mesh join LINE`"
        ) from error
