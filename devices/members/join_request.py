"""Requests to become a member, signed by the device and with its invitation. Without I/O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from edge_run.base.errors import NotTrusted, ProtocolError
from edge_run.base.strict_json import parse
from edge_run.devices.members.keys import SIGNATURE_BYTES, DeviceKey, from_text, is_signed, node_of, to_text
from edge_run.devices.members.member_list import ListedMember, canonical, fitting

MOST_REQUEST_BYTES = 1 << 10
REQUEST_AGE_S = 120.0
_REQUEST = {"key", "seal_key", "name", "invitation", "time_s", "invited", "signature"}


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """A device asks to become a member.

    invitation: the key of the invitation that it has.
    """

    member: ListedMember
    invitation: bytes
    time_s: int


def ask(invitation: DeviceKey, device: DeviceKey, cluster: str, name: str, now_s: float) -> bytes:
    """Return what `device` says to come into `cluster` with an invitation, signed by both keys."""
    words: dict[str, Any] = {
        "key": to_text(device.public_key),
        "seal_key": to_text(device.seal_key),
        "name": fitting(name),
        "invitation": to_text(invitation.public_key),
        "time_s": int(now_s),
    }
    content = _asking(cluster, words)
    return canonical(words | {"invited": to_text(invitation.sign(content)), "signature": to_text(device.sign(content))})


def read_request(payload: bytes, cluster: str, is_known: Callable[[bytes], bool]) -> JoinRequest:
    """Return who asks to come in. `is_known` says whether there is such an invitation: of others, nothing is verified.

    Raises ProtocolError for what is malformed, NotTrusted for what is not signed with both keys.
    """
    try:
        words = parse(payload) if len(payload) <= MOST_REQUEST_BYTES else None
        if not isinstance(words, dict) or words.keys() != _REQUEST or canonical(words) != payload:
            raise ValueError
        key, seal_key, invitation = (from_text(words.pop(name)) for name in ("key", "seal_key", "invitation"))
        invited, signature = (from_text(words.pop(name), SIGNATURE_BYTES) for name in ("invited", "signature"))
        name, time_s = words["name"], words["time_s"]
        if not isinstance(name, str) or fitting(name) != name or type(time_s) is not int or not 0 < time_s < 1 << 40:
            raise ValueError
    except (ValueError, TypeError):
        raise ProtocolError("a request to come in that is malformed") from None
    node = node_of(key)
    if not is_known(invitation):
        raise NotTrusted("asks to come in with an invitation that is not known", node=node)
    content = _asking(
        cluster,
        words | {"key": to_text(key), "seal_key": to_text(seal_key), "invitation": to_text(invitation)},
    )
    if not is_signed(invitation, invited, content) or not is_signed(key, signature, content):
        raise NotTrusted("asks to come in, and did not sign that so", node=node)
    return JoinRequest(ListedMember(key, seal_key, name, "compute"), invitation, time_s)


def _asking(cluster: str, words: dict[str, Any]) -> bytes:
    return b"edge-run request\0" + cluster.encode() + b"\0" + canonical(words)
