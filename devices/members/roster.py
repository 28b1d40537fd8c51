"""What a device does about the list of members: a state machine without I/O.

The machine takes every newer list, says its own list to members with an older one, admits devices with an invitation
where it may, and becomes the founder where the cluster was handed on to its device. A device that leads lets no removal
be undone: where one of two lists that were made at once has it and the newer has not, the device makes it once more.
Once a founder has handed the cluster on, a list of another founder whom he named is refused. After each connection the
machine waits for the list that the broker keeps before anything else is believed (`is_settled`): until it is there, or
something comes back that this device said on that connection, as the broker hands on what it keeps before that. So a
device that was away learns first who was removed.

Lists to be sent are left in `said`; `cluster` is the cluster as it is now. Clocks and chance are passed in.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from random import Random

from edge_run.base.errors import EdgeRunError, NotTrusted, ProtocolError
from edge_run.base.protocols import Clock
from edge_run.devices.members.cluster import Cluster
from edge_run.devices.members.identity import Identity
from edge_run.devices.members.join_request import JoinRequest, read_request
from edge_run.devices.members.list_changes import ListEditor, take_over
from edge_run.devices.members.member_list import MemberList, Version, read_list

LEARN_S = 10.0  # how long the list that the broker keeps is waited for, where this device hears nothing at all
ASK_S = 1.0  # how long a newer list is waited for that a member says there is
SAY_WITHIN_S = 0.4  # who is behind is told by one of many, at a random moment
LET_IN_S = 0.5  # after which a leading device lets in whom the founder did not
BEHIND_PAUSE_S = 30.0  # between two moments in which it is believed that there is a newer list
MOST_WAITING = 32


class Roster:
    """The list of members as `identity` has it."""

    def __init__(
        self,
        identity: Identity,
        cluster: Cluster,
        steady: Clock,
        wall: Clock,
        random: Random,
    ) -> None:
        self._identity, self._steady, self._wall, self._random = identity, steady, wall, random
        self.cluster = cluster
        self.said: list[bytes] = []
        self.heard: MemberList | None = None  # the last that came back
        self._settle_s, self._behind_s = float("inf"), float("-inf")
        self._is_settled = self._is_connecting = False
        self._say_s: float | None = None
        self._waiting: OrderedDict[str, tuple[float, JoinRequest]] = OrderedDict()

    @property
    def listed(self) -> MemberList:
        """The newest list that is known."""
        return self.cluster.listed

    @property
    def is_heard(self) -> bool:
        """Whether the list that is known came back from the broker."""
        return self.heard is self.listed

    @property
    def is_settled(self) -> bool:
        """Whether what others say may be believed."""
        return self._is_settled

    @property
    def is_member(self) -> bool:
        """Whether this device is a member; removed devices are none."""
        return self.cluster.admits(self._identity.device.public_key)

    @property
    def may_lead(self) -> bool:
        """Whether this device may run models on others."""
        return self.cluster.role_of(self._identity.device.public_key) in ("use", "lead")

    @property
    def wait_s(self) -> float:
        """In how many seconds something is due."""
        times_s = [due_s for due_s, _ in self._waiting.values()]
        times_s += [] if self._is_settled else [self._settle_s]
        times_s += [] if self._say_s is None else [self._say_s]
        return max(0.0, min(times_s, default=float("inf")) - self._steady())

    def check_leads(self) -> None:
        """Raise NotTrusted where this device may not run models on others."""
        if self.is_member and not self.may_lead:
            raise NotTrusted(
                f"mesh: in cluster {self.cluster.id} this device computes for others and may not run models on them; "
                "a device that leads can change it: edge-run mesh role NODE use"
            )

    def connect(self) -> None:
        """The broker is there from now on; what it keeps is about to be heard."""
        self._settle_s, self._is_settled, self._is_connecting = self._steady() + LEARN_S, False, True

    def hear_self(self) -> None:
        """What this device said on this connection came back: the broker has handed on all that it keeps."""
        if self._is_connecting:
            self._settle()

    def take(self, payload: bytes) -> bool:
        """Take in a list; return whether it is newer, and `cluster` has it. Raises NotTrusted, ProtocolError."""
        own, is_settled = self.listed, self._is_settled
        if payload == own.payload:
            self._is_settled, self._say_s, self.heard = True, None, own
            return False
        found = read_list(payload, self.cluster.id, self.cluster.founder)
        older, newer = sorted((found, own), key=lambda one: one.order)
        if newer is found and _founders(found)[: len(own.handed)] != _founders(own):
            raise NotTrusted("member list: is of a founder to whom the one that is known did not hand the cluster on")
        if newer is found:
            self._adopt(found)
        is_removed_again = self._remove_again(older)
        if newer is own:
            self._is_settled = is_settled  # an older list says nothing of the newest
            if not is_removed_again:
                self._say_soon()
        return newer is found or is_removed_again

    def hear(self, version: Version) -> bool:
        """A member has a list of this version; return whether it is newer, so that it is to be asked for."""
        own, now_s = self.cluster.version, self._steady()
        if version < own:
            self._say_soon()
        if version <= own or now_s - self._behind_s < BEHIND_PAUSE_S:
            return False
        self._behind_s, self._settle_s, self._is_settled = now_s, now_s + ASK_S, False
        self._is_connecting = False
        return True

    def ask(self, payload: bytes) -> None:
        """Somebody asks to come in. Raises NotTrusted, ProtocolError where he may not."""
        listed = self.listed
        if not self._identity.is_lasting or not listed.may_sign(self._identity.device.public_key):
            return
        request = read_request(payload, self.cluster.id, lambda key: listed.invitation(key) is not None)
        is_founder = listed.charter.founder == self._identity.device.public_key
        due_s = self._steady() + (0.0 if is_founder else LET_IN_S * (1 + self._random.random()))
        if request.member.node not in self._waiting and len(self._waiting) < MOST_WAITING:
            self._waiting[request.member.node] = due_s, request

    def pass_time(self) -> tuple[bool, list[EdgeRunError]]:
        """Do what is due; return whether the list changed, and why who asked was not let in."""
        now_s, refusals, before = self._steady(), list[EdgeRunError](), self.listed
        if not self._is_settled and now_s >= self._settle_s:
            self._settle()
        if self._is_settled:  # by the newest list: what another one changed since it was handed on stays
            self._take_over()
        for node, (due_s, request) in list(self._waiting.items()):
            if now_s >= due_s:
                del self._waiting[node]
                try:
                    self._let_in(request)
                except NotTrusted as error:
                    refusals.append(error)
        if self._say_s is not None and now_s >= self._say_s:
            self.say()
        return self.listed is not before, refusals

    def take_own(self, payload: bytes) -> bool:
        """Take in a list as `take` does, of another program here: it says nothing of what the broker keeps."""
        is_settled = self._is_settled
        try:
            return self.take(payload)
        finally:
            self._is_settled = is_settled

    def _remove_again(self, other: MemberList) -> bool:
        """Have who was removed in `other` stay so; return whether the list changed. The two may have been made at once.

        Every device that leads does so, with whichever of the two it heard last. All that do make the same change, and
        of their lists one is the newest.
        """
        if not self.listed.may_sign(self._identity.device.public_key):
            return False
        with contextlib.suppress(NotTrusted, ProtocolError):  # only the founder could, or there is no room
            changed = ListEditor(self._identity.device, self.listed, self.cluster.secret).remove_again(other)
            if changed is not self.listed:
                self._adopt(changed)
                self.say()
                return True
        return False

    def _let_in(self, request: JoinRequest) -> None:
        """Raises NotTrusted where the device may not come in."""
        listed = self.listed
        if request.member.key not in listed.members:
            changed = ListEditor(self._identity.device, listed, self.cluster.secret).admit(request, self._wall())
            self._adopt(changed)
        self.say()  # who was let in already did not hear it

    def _take_over(self) -> None:
        """Become the founder where the cluster is handed on to this device, whichever of its programs heard that."""
        if self._identity.is_lasting and (taken := take_over(self.listed, self._identity.device)) is not None:
            self._adopt(taken)
            self.say()  # nobody else can, and what others change until they hear it is dropped

    def _adopt(self, listed: MemberList) -> None:
        self.cluster = self.cluster.adopt(listed, self._identity.device)
        self._is_settled = True

    def _settle(self) -> None:
        """Go by the list that is here."""
        if not self._is_settled:
            self._is_settled, self._is_connecting = True, False
            self._say_soon()  # the broker keeps none

    def _say_soon(self) -> None:
        if self._say_s is None:
            self._say_s = self._steady() + self._random.uniform(0, SAY_WITHIN_S)

    def say(self) -> None:
        """Say the list as it is."""
        self._say_s = None
        self.said.append(self.listed.payload)

    def take_said(self) -> list[bytes]:
        """Return what is to be said; whoever takes it says it."""
        said, self.said = self.said, []
        return said

    def check(self) -> None:
        """Assert what always holds; tests call it after every event."""
        assert len(self._waiting) <= MOST_WAITING, "who asks is bounded"


def _founders(listed: MemberList) -> list[bytes]:
    """Return the keys of the founders after the first."""
    return [key for key, _ in listed.handed]
