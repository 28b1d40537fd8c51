"""The signed list of a cluster's members, without I/O: what a list may contain, and which of two lists is newer.

A list has two parts. The *charter* says who besides the founder may sign lists; only the founder signs it. The *roll*
says who is a member, in which role, and which invitations are open; the founder or a device that the charter names
signs it. Both parts count their changes, and a device takes only a list that is newer than its own: first by founder,
then by charter, then by roll. So a device that may no longer sign cannot bring an old list back.

A founder hands the cluster on by signing the next founder's key. Devices keep the first founder's key, from their join
line, and follow the signatures from there.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeAlias

from edge_run.base.errors import NotTrusted, ProtocolError
from edge_run.base.fields import is_name
from edge_run.base.strict_json import parse
from edge_run.devices.members.keys import SEAL_BYTES, SIGNATURE_BYTES, DeviceKey, from_text, is_signed, node_of, to_text

Role: TypeAlias = Literal["compute", "use", "lead"]
ROLES: tuple[Role, ...] = ("compute", "use", "lead")  # each may do what those before it may

MOST_BYTES = 160 << 10
MOST_MEMBERS, MOST_INVITATIONS, MOST_REMOVED, MOST_FOUNDERS = 256, 64, 256, 16
MOST_LETTERS, MOST_NUMBER = 64, 1 << 53
MOST_SHOWN = 16  # members in a message
SECRET_BYTES = 32
DAY_S = 86_400

# Founders before this one, changes of the charter, changes of the roll; and a mark of the content, since two who lead
# may each make a change at once.
Version: TypeAlias = tuple[int, int, int, int]
NO_VERSION: Version = (0, 0, 0, 0)
MARK_BYTES = 6


@dataclass(frozen=True, slots=True)
class KeyHolder:
    """Somebody with a key.

    key: what signatures are verified with.
    seal_key: what is sealed for the holder.
    """

    key: bytes
    seal_key: bytes

    @property
    def node(self) -> str:
        """The id that follows from the key: of a device's own node, or of who has an invitation."""
        return node_of(self.key)


@dataclass(frozen=True, slots=True)
class ListedMember(KeyHolder):
    """A device that is a member."""

    name: str
    role: Role


@dataclass(frozen=True, slots=True)
class Invitation(KeyHolder):
    """Whoever has the other half of `key` may become a member, `uses` times, until `expires_s` (since 1970)."""

    role: Role
    uses: int
    expires_s: int

    def is_open(self, now_s: float) -> bool:
        """Whether somebody may still come in with it."""
        return self.uses > 0 and now_s < self.expires_s

    def has_long_ended(self, now_s: float) -> bool:
        """Whether it ended a day ago or earlier, so that it is of no use to anybody, whatever clocks say."""
        return now_s >= self.expires_s + DAY_S


@dataclass(frozen=True, slots=True)
class Charter:
    """The part of a list that only the founder signs.

    number: how often it was changed.
    founder: who founded the cluster, or was handed it.
    leads: who else may sign rolls.
    broker_key: the sealing key of the device that runs the broker; empty where the broker runs on no member.
    heir: whom the founder hands the cluster on to, who is the founder as soon as he takes it; empty as a rule.
    heir_signature: what the heir shows for it.
    """

    cluster: str
    number: int
    founder: bytes
    leads: tuple[bytes, ...]
    broker_key: bytes
    heir: bytes = b""
    heir_signature: bytes = b""


@dataclass(frozen=True, slots=True)
class Roll:
    """The part of a list that says who is a member.

    charter: the number of the charter that it goes with.
    number: how often it was changed under that charter.
    removed: nodes that were sent away, the latest last.
    generation: how often the secret was changed.
    secrets: the secret, sealed for each member, by its node.
    """

    charter: int
    number: int
    members: tuple[ListedMember, ...]
    removed: tuple[str, ...]
    invitations: tuple[Invitation, ...]
    generation: int
    secrets: dict[str, bytes] = field(repr=False)


@dataclass(frozen=True)
class MemberList:
    """A charter and a roll with their signatures.

    handed: each founder after the first, signed by the one before.
    """

    charter: Charter
    charter_signature: bytes
    roll: Roll
    signer: bytes
    signature: bytes
    handed: tuple[tuple[bytes, bytes], ...] = ()

    @property
    def version(self) -> Version:
        """What tells a newer list from an older one."""
        mark = int.from_bytes(self._digest[:MARK_BYTES], "big")
        return len(self.handed), self.charter.number, self.roll.number, mark

    @cached_property
    def payload(self) -> bytes:
        """The list as it is kept and sent."""
        return canonical({one.name: _plain(getattr(self, one.name)) for one in dataclasses.fields(self)})

    @cached_property
    def order(self) -> tuple[Version, bytes]:
        """Where it stands among all lists: also two that were made at once have an order, the same everywhere."""
        return self.version, self._digest

    @cached_property
    def _digest(self) -> bytes:
        return hashlib.sha256(self.payload).digest()

    @cached_property
    def members(self) -> dict[bytes, ListedMember]:
        """The members by their keys."""
        return {member.key: member for member in self.roll.members}

    def may_sign(self, key: bytes) -> bool:
        """Whether the holder of `key` may change the roll."""
        return key == self.charter.founder or key in self.charter.leads

    def invitation(self, key: bytes) -> Invitation | None:
        """Return the invitation with `key`."""
        return next((one for one in self.roll.invitations if one.key == key), None)

    def find(self, text: str) -> ListedMember:
        """Return the member whose node or name is `text`. Raises NotTrusted where there is none, or are several."""
        found = [one for one in self.roll.members if one.node == text]  # an id before a name: names are free to choose
        found = found or [one for one in self.roll.members if one.name == text]
        if len(found) != 1:
            known = ", ".join(f"{one.name} ({one.node})" for one in found or self.roll.members[:MOST_SHOWN])
            raise NotTrusted(
                f"{text}: is {'no' if not found else 'more than one'} member of this cluster; it has {known}"
            )
        return found[0]


def canonical(value: object) -> bytes:
    """Return `value` as JSON in the one form that is accepted. Raises ValueError for NaN."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8")


def signed(
    signer: DeviceKey,
    charter: Charter,
    charter_signature: bytes,
    roll: Roll,
    handed: tuple[tuple[bytes, bytes], ...] = (),
) -> MemberList:
    """Return the list of `charter` and `roll`, signed by `signer`; so is the charter where it has no signature."""
    charter_signature = charter_signature or signer.sign(_signed_charter(charter))
    return MemberList(
        charter, charter_signature, roll, signer.public_key, signer.sign(_signed_roll(charter, roll)), handed
    )


def handing(cluster: str, founder: bytes) -> bytes:
    """Return what the founder signs to hand `cluster` on to the holder of `founder`."""
    return b"edge-run founder\0" + cluster.encode() + founder


def read_list(payload: bytes, cluster: str, first_founder: bytes) -> MemberList:
    """Return the list in `payload`, of the cluster that the holder of `first_founder` founded.

    Raises ProtocolError for what is malformed or too large, NotTrusted for what nobody signed who may.
    """
    found = parse_list(payload)
    _check_signatures(found, cluster, first_founder)
    return found


def parse_list(payload: bytes) -> MemberList:
    """Return the list in `payload`, whoever signed it. Raises ProtocolError for what is malformed or too large."""
    if len(payload) > MOST_BYTES:
        raise ProtocolError(f"member list: has {len(payload)} bytes, at most {MOST_BYTES} are read")
    try:
        found = _parse(parse(payload))
        if found.payload != payload:
            raise ValueError("not as it should be written")
    except (ValueError, TypeError, KeyError) as error:
        raise ProtocolError(f"member list: is malformed ({str(error)[:120]})") from error
    return found


def _check_signatures(found: MemberList, cluster: str, first_founder: bytes) -> None:
    charter, roll, founder = found.charter, found.roll, first_founder
    for key, signature in found.handed:
        if not is_signed(founder, signature, handing(cluster, key)):
            raise NotTrusted("member list: names a founder to whom the cluster was not handed on")
        founder = key
    if charter.cluster != cluster or charter.founder != founder:
        raise NotTrusted(f"member list: is another cluster's than {cluster}")
    if not is_signed(founder, found.charter_signature, _signed_charter(charter)):
        raise NotTrusted("member list: has a charter that the founder did not sign")
    if roll.charter != charter.number or not found.may_sign(found.signer):
        raise NotTrusted("member list: is signed by a device that may not sign it")
    if not is_signed(found.signer, found.signature, _signed_roll(charter, roll)):
        raise NotTrusted("member list: has a signature that is not its signer's")


def _signed_charter(charter: Charter) -> bytes:
    return b"edge-run charter\0" + canonical(_plain(charter))


def _signed_roll(charter: Charter, roll: Roll) -> bytes:
    return b"edge-run roll\0" + charter.cluster.encode() + b"\0" + canonical(_plain(roll))


def _plain(value: Any) -> Any:
    """Return a dataclass as JSON has it: bytes in base64, an object a row of its values."""
    if isinstance(value, bytes):
        return to_text(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value):
        return [_plain(getattr(value, one.name)) for one in dataclasses.fields(value)]
    return value


def _parse(value: Any) -> MemberList:
    """Return the list that a document has. Raises ValueError, TypeError or KeyError where anything is amiss."""
    if not isinstance(value, dict) or value.keys() != {one.name for one in dataclasses.fields(MemberList)}:
        raise ValueError("no member list")
    cluster, number, founder, leads, broker_key, heir, heir_signature = value["charter"]
    charter = Charter(
        _text(cluster),
        _number(number),
        from_text(founder),
        tuple(from_text(one) for one in _rows(leads, MOST_MEMBERS)),
        from_text(broker_key) if broker_key else b"",
        from_text(heir) if heir else b"",
        from_text(heir_signature, SIGNATURE_BYTES) if heir_signature else b"",
    )
    found = MemberList(
        charter,
        from_text(value["charter_signature"], SIGNATURE_BYTES),
        _parse_roll(value["roll"]),
        from_text(value["signer"]),
        from_text(value["signature"], SIGNATURE_BYTES),
        tuple((from_text(key), from_text(one, SIGNATURE_BYTES)) for key, one in _rows(value["handed"], MOST_FOUNDERS)),
    )
    _check_members(found)
    return found


def _parse_roll(value: Any) -> Roll:
    charter, number, members, removed, invitations, generation, secrets = value
    if not isinstance(secrets, dict) or len(secrets) > MOST_MEMBERS:
        raise ValueError("no secrets")
    return Roll(
        _number(charter),
        _number(number),
        tuple(
            ListedMember(from_text(key), from_text(seal_key), _text(name), _role(role))
            for key, seal_key, name, role in _rows(members, MOST_MEMBERS)
        ),
        tuple(_text(node) for node in _rows(removed, MOST_REMOVED)),
        tuple(
            Invitation(from_text(key), from_text(seal_key), _role(role), _number(uses), _number(expires_s))
            for key, seal_key, role, uses, expires_s in _rows(invitations, MOST_INVITATIONS)
        ),
        _number(generation),
        {_text(node): from_text(one, SECRET_BYTES + SEAL_BYTES) for node, one in secrets.items()},
    )


def _check_members(found: MemberList) -> None:
    charter, roll = found.charter, found.roll
    if len(found.members) != len(roll.members) or len({one.key for one in roll.invitations}) != len(roll.invitations):
        raise ValueError("a member or an invitation twice")
    if charter.founder not in found.members or charter.founder in charter.leads:
        raise ValueError("a founder who is no member")
    if {one.key for one in roll.members if one.role == "lead"} != {charter.founder, *charter.leads}:
        raise ValueError("members that lead, and the charter does not say so, or the other way round")


def fitting(name: str) -> str:
    """Return `name` as a list may have it."""
    return "".join(one if one.isprintable() else "?" for one in name)[:MOST_LETTERS] or "device"


def _rows(value: Any, most: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > most:
        raise ValueError(f"no list of at most {most}")
    return value


def _text(value: Any) -> str:
    if not is_name(value, MOST_LETTERS, 1):
        raise ValueError("no name")
    return value


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < MOST_NUMBER:
        raise ValueError("no number")
    return value


def _role(value: Any) -> Role:
    if value not in ROLES:
        raise ValueError("no role")
    return value  # type: ignore[no-any-return]
