"""Joins a cluster with an invitation: asks at the broker until the list of members has this device."""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
import time
from pathlib import Path

from edge_run.base.errors import EdgeRunError, MeshError, NotTrusted
from edge_run.devices.members.cluster import Broker, Cluster, Invited
from edge_run.devices.members.identity import device_key
from edge_run.devices.members.join_request import ask
from edge_run.devices.members.list_changes import secret_of
from edge_run.devices.members.member_list import MemberList, read_list
from edge_run.devices.mesh.channel import Channel, ChannelCallbacks
from edge_run.devices.mesh.home_assistant import PlainMessage
from edge_run.devices.mesh.opening import FIRST_CONNECTION_S, broker_password, locate_broker
from edge_run.devices.messages.outgoing import Outgoing
from edge_run.devices.messages.topics import Topic

logger = logging.getLogger(__name__)

ASK_S, NEWER_S, TICK_S = 2.0, 3.0, 0.25


def come_in(folder: Path, invited: Invited, name: str, *, timeout_s: float, authority: str | None = None) -> Cluster:
    """Return the cluster that `invited` lets this device into, as its member. name: what people call this device.

    Raises NotTrusted where the invitation is used up or has ended, MeshError where nobody lets it in in time.
    """
    entry = _Entry(folder, invited, name, authority)
    try:
        listed = entry.wait(timeout_s)
    finally:
        entry.close()
    secret = secret_of(listed, entry.device)
    return Cluster(invited.cluster, secret, invited.broker, invited.founder, listed, authority=authority)


class _Entry:
    """A device that asks to be let in."""

    def __init__(self, folder: Path, invited: Invited, name: str, authority: str | None) -> None:
        self._invited, self._name = invited, name
        self.device, self._key = device_key(folder), invited.key
        self._listed: MemberList | None = None
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._attempts = 0
        self._asked_s = self._up_s = 0.0
        told = (self._take_in, self._change, self._pass_time, functools.partial(self._change, False))
        callbacks = ChannelCallbacks(self._find, self._make_will, *told)
        members = str(Topic(invited.cluster, "members"))
        self._channel = Channel(self.device.node, [members], callbacks, authority)
        self._channel.start()

    def wait(self, timeout_s: float) -> MemberList:
        """Return the list that has this device. Raises MeshError, NotTrusted."""
        until_s = time.monotonic() + timeout_s
        with self._lock:
            self._changed.wait_for(lambda: self._is_over() or self._channel.is_up, min(FIRST_CONNECTION_S, timeout_s))
            if self._channel.is_up:
                self._changed.wait_for(self._is_over, until_s - time.monotonic())
            is_in, listed = self._is_over(), self._listed
        if listed is not None and self.device.public_key in listed.members:
            return listed
        if listed is not None and self._was_removed(listed):
            raise NotTrusted(
                f"cluster {self._invited.cluster}: this device was removed from it; to come back it needs a new key: "
                "remove node.key from its folder of the mesh, and join with a new line (`edge-run mesh invite`)"
            )
        if is_in or self._is_unknown():
            raise NotTrusted(
                f"cluster {self._invited.cluster}: this invitation is used up, or has ended; ask for another line "
                "(`edge-run mesh invite`)"
            )
        if not self._channel.is_up:
            raise MeshError(f"mesh: {self._channel.why_down}")
        raise MeshError(
            f"cluster {self._invited.cluster}: nobody who may let this device in was there in {timeout_s:.0f} s; let "
            "`edge-run mesh join` run on the device that made the cluster, or on one that leads"
        )

    def _is_unknown(self) -> bool:
        """Whether an embedded broker knows neither the invitation nor this device as a member."""
        return not self._channel.is_up and self._channel.refused_user in (self._key.node, self.device.node)

    def close(self) -> None:
        """Ask no more."""
        self._channel.close()

    def _is_over(self) -> bool:
        listed = self._listed
        if listed is None:
            return False
        if self.device.public_key in listed.members or self._was_removed(listed):
            return True
        invitation = listed.invitation(self._key.public_key)
        if invitation is None:  # the list that the broker keeps may be older than the invitation
            return time.monotonic() - self._up_s > NEWER_S
        return not invitation.is_open(time.time())

    def _was_removed(self, listed: MemberList) -> bool:
        return self.device.node in listed.roll.removed

    # What follows is called on the channel's thread.

    def _find(self) -> Broker:
        """Where the broker is: as a guest, and in turn as the member that this device may be already."""
        invited = self._invited
        broker = locate_broker(invited.broker, invited.cluster, invited.founder)
        key = self.device if self._attempts % 2 else self._key
        self._attempts += 1
        if broker.user is not None or not invited.broker_key:
            return broker
        password = broker_password(key, invited.cluster, invited.broker_key)
        return dataclasses.replace(broker, user=key.node, password=password)

    def _make_will(self) -> Outgoing:
        return Outgoing(Topic(self._invited.cluster, "join", self.device.node), b"")

    def _take_in(self, topic: str, payload: bytes, is_kept: bool) -> None:
        try:
            listed = read_list(payload, self._invited.cluster, self._invited.founder)
        except EdgeRunError as error:
            logger.info("%s", error)
            return
        with self._lock:
            if self._listed is None or self._listed.order < listed.order:
                self._listed = listed
            self._changed.notify_all()

    def _change(self, is_up: bool, why: str) -> None:
        with self._lock:
            self._asked_s, self._up_s = 0.0, time.monotonic()
            self._changed.notify_all()

    def _pass_time(self) -> float:
        now_s = time.monotonic()
        with self._lock:
            self._changed.notify_all()  # what is waited for hangs on time, too
        if self._channel.is_up and now_s - self._asked_s >= ASK_S:
            self._asked_s = now_s
            payload = ask(self._key, self.device, self._invited.cluster, self._name, time.time())
            topic = str(Topic(self._invited.cluster, "join", self.device.node))
            self._channel.publish(PlainMessage(topic, payload, is_kept=False))
        return TICK_S
