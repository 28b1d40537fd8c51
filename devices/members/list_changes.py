"""Changes to the list of members by a device that may make them. Without I/O.

Each change returns a new signed list with a later number. Only the founder changes the charter: who leads, whether a
leading device is removed, and who the next founder is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from edge_run.base.errors import NotTrusted
from edge_run.devices.members.join_request import REQUEST_AGE_S, JoinRequest
from edge_run.devices.members.keys import (
    DeviceKey,
    node_of,
    seal,
)
from edge_run.devices.members.member_list import (
    MOST_FOUNDERS,
    MOST_INVITATIONS,
    MOST_MEMBERS,
    MOST_NUMBER,
    MOST_REMOVED,
    ROLES,
    Charter,
    Invitation,
    ListedMember,
    MemberList,
    Role,
    Roll,
    fitting,
    handing,
    parse_list,
    signed,
)


def found(device: DeviceKey, cluster: str, name: str, secret: bytes, *, runs_broker: bool) -> MemberList:
    """Return the list of a cluster that `device` founds, its only member."""
    member = ListedMember(device.public_key, device.seal_key, fitting(name), "lead")
    charter = Charter(cluster, 1, device.public_key, (), device.seal_key if runs_broker else b"")
    return signed(device, charter, b"", Roll(1, 1, (member,), (), (), 1, _sealed([member], secret, cluster)))


def secret_of(listed: MemberList, device: DeviceKey) -> bytes:
    """Return the secret that the list has for `device`. Raises NotTrusted where it has none."""
    sealed = listed.roll.secrets.get(device.node)
    if sealed is None:
        raise NotTrusted("the member list has no secret for it", node=device.node)
    return device.unseal(sealed, _purpose(listed.charter.cluster))


@dataclass(frozen=True, slots=True)
class ListEditor:
    """A device that may change a list: its key, the list as it is, and the cluster's secret."""

    device: DeviceKey
    listed: MemberList
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if not self.listed.may_sign(self.device.public_key):
            raise NotTrusted(
                "member list: this device may not change it; do it on the founder's device, "
                f"{self._name(self.listed.charter.founder)}, or on one with the role lead"
            )

    def invite(self, invitation: Invitation, now_s: float) -> MemberList:
        """Return the list with one more invitation; those that are over for a day go, sooner where room is needed."""
        if invitation.role == "lead":
            self._check_founder()
        kept = tuple(one for one in self.listed.roll.invitations if not one.has_long_ended(now_s))
        if len(kept) >= MOST_INVITATIONS:
            kept = tuple(one for one in kept if one.is_open(now_s))
        if len(kept) >= MOST_INVITATIONS:
            raise NotTrusted(
                f"invitations: {len(kept)} are open, at most {MOST_INVITATIONS} may be; wait until some end"
            )
        return self._signed(invitations=(*kept, invitation))

    def admit(self, request: JoinRequest, now_s: float) -> MemberList:
        """Return the list with the device of `request` in it. Raises NotTrusted where it may not come in."""
        node, roll = request.member.node, self.listed.roll
        invitation = self.listed.invitation(request.invitation)
        if invitation is None or not invitation.is_open(now_s):
            raise NotTrusted("its invitation is used up, has ended, or was never given", node=node)
        if abs(request.time_s - now_s) > REQUEST_AGE_S:
            raise NotTrusted(f"asks with a clock that is off by more than {REQUEST_AGE_S:.0f} s", node=node)
        if node in roll.removed:
            raise NotTrusted("was removed from this cluster", node=node)
        if request.member.key in self.listed.members:
            return self.listed
        if len(roll.members) >= MOST_MEMBERS:
            raise NotTrusted(f"is one too many, a cluster has at most {MOST_MEMBERS} members", node=node)
        used = dataclasses.replace(invitation, uses=invitation.uses - 1)
        member = dataclasses.replace(request.member, role=invitation.role)
        return self._signed(
            members=(*roll.members, member),
            invitations=tuple(used if one.key == used.key else one for one in roll.invitations),
        )

    def remove(self, node: str) -> MemberList:
        """Return the list without the member `node`, and without invitations: it may know the lines that are out.

        Raises NotTrusted for the founder, and for who is no member.
        """
        member = self.listed.find(node)
        if member.key == self.listed.charter.founder:
            raise NotTrusted(f"{member.name}: founded this cluster; hand it on first (`edge-run mesh hand-on NODE`)")
        return self._without([member])

    def remove_again(self, other: MemberList) -> MemberList:
        """Return the list without the members that `other` had removed; the same list where it has none of them.

        `other` was made without hearing of this list, or this list without hearing of it. A removal counts where its
        signer still leads. It takes nobody away who leads, or is to be the founder: only the founder decides that, and
        the lists of others are older than his then. Raises as other changes do.
        """
        charter = self.listed.charter
        if not self.listed.may_sign(other.signer):
            return self.listed
        kept = {charter.founder, charter.heir, *charter.leads}
        gone = [one for one in self.listed.roll.members if one.node in other.roll.removed and one.key not in kept]
        return self._without(gone) if gone else self.listed

    def change_role(self, node: str, role: Role) -> MemberList:
        """Return the list where `node` has another role. Whose role may less takes the open invitations with it.

        Raises NotTrusted where this device may not decide it.
        """
        member = self.listed.find(node)
        if member.key == self.listed.charter.founder:
            raise NotTrusted(f"{member.name}: founded this cluster, and leads; hand it on first")
        members = self.listed.roll.members
        changed = dataclasses.replace(member, role=role)
        is_less = ROLES.index(role) < ROLES.index(member.role)
        return self._signed(
            members=tuple(changed if one == member else one for one in members),
            invitations=() if is_less else self.listed.roll.invitations,
        )

    def rotate(self, secret: bytes) -> MemberList:
        """Return the list with another secret for all its members."""
        generation = (self.listed.roll.generation + 1) % MOST_NUMBER
        return dataclasses.replace(self, secret=secret)._signed(generation=generation, secrets={})

    def hand_on(self, node: str) -> MemberList:
        """Return the list by which `node` may become the founder; it does so when it hears of it (`take_over`)."""
        heir, cluster = self.listed.find(node), self.listed.charter.cluster
        if len(self.listed.handed) >= MOST_FOUNDERS:
            raise NotTrusted(f"cluster {cluster}: was handed on {MOST_FOUNDERS} times, which is as often as it can be")
        signature = self.device.sign(handing(cluster, heir.key))
        return self._signed(heir=heir.key, heir_signature=signature)

    def _without(self, gone: Sequence[ListedMember]) -> MemberList:
        """Return the list without `gone`, and without invitations."""
        roll = self.listed.roll
        removed = (*roll.removed, *(one.node for one in gone))[-MOST_REMOVED:]
        members = tuple(one for one in roll.members if one not in gone)
        return self._signed(members=members, removed=removed, invitations=())

    def _signed(self, *, heir: bytes = b"", heir_signature: bytes = b"", **changes: Any) -> MemberList:
        """Return the list with what changed of the roll, and the charter that it needs.

        What another device that leads may have written there neither holds up the founder nor takes its own seal key
        away. Raises NotTrusted, ProtocolError where others would not take the list.
        """
        old, device = self.listed.charter, self.device
        roll = dataclasses.replace(self.listed.roll, **changes)
        members = tuple(
            dataclasses.replace(one, seal_key=device.seal_key) if one.key == device.public_key else one
            for one in roll.members
        )
        leads = tuple(one.key for one in members if one.role == "lead" and one.key != old.founder)
        if not heir and any(one.key == old.heir for one in members):
            heir, heir_signature = old.heir, old.heir_signature
        charter, charter_signature = old, self.listed.charter_signature
        is_full = roll.number + 1 >= MOST_NUMBER
        if set(leads) != set(old.leads) or heir != old.heir or is_full:
            self._check_founder()
            number, charter_signature = old.number + 1, b""
            charter = dataclasses.replace(old, number=number, leads=leads, heir=heir, heir_signature=heir_signature)
            roll = dataclasses.replace(roll, charter=number, number=0)
        is_same_key = members == roll.members
        known = roll.secrets if is_same_key else {}
        secrets = known | _sealed([one for one in members if one.node not in known], self.secret, old.cluster)
        kept = {one.node: secrets[one.node] for one in members}
        roll = dataclasses.replace(roll, number=roll.number + 1, members=members, secrets=kept)
        return parse_list(signed(device, charter, charter_signature, roll, self.listed.handed).payload)

    def _check_founder(self) -> None:
        if self.device.public_key != self.listed.charter.founder:
            who = self._name(self.listed.charter.founder)
            raise NotTrusted(f"member list: who leads is decided by the founder; do it on the founder's device, {who}")

    def _name(self, key: bytes) -> str:
        member = self.listed.members.get(key)
        return f"{member.name} ({member.node})" if member else node_of(key)


def take_over(listed: MemberList, device: DeviceKey) -> MemberList | None:
    """Return the list where `device` is the founder, to whom the cluster is handed on; None where it is not."""
    old, roll = listed.charter, listed.roll
    if old.heir != device.public_key or device.public_key not in listed.members:
        return None
    leads = tuple(one.key for one in roll.members if (one.role == "lead" or one.key == old.founder))
    members = tuple(
        dataclasses.replace(one, role="lead") if one.key == device.public_key else one for one in roll.members
    )
    charter = Charter(
        old.cluster, 1, device.public_key, tuple(key for key in leads if key != device.public_key), old.broker_key
    )
    roll = dataclasses.replace(roll, charter=1, number=1, members=members)
    return signed(device, charter, b"", roll, (*listed.handed, (old.heir, old.heir_signature)))


def _sealed(members: Sequence[ListedMember], secret: bytes, cluster: str) -> dict[str, bytes]:
    return {one.node: seal(one.seal_key, secret, _purpose(cluster)) for one in members}


def _purpose(cluster: str) -> bytes:
    return b"edge-run secret\0" + cluster.encode()
