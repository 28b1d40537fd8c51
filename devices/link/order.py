"""Checks that no message of a peer is missing: a connection that breaks may lose some."""

from __future__ import annotations

from collections.abc import Container

from edge_run.base.errors import ProtocolError
from edge_run.devices.link.frames import Head

MOST_NODES = 1024  # of which something is remembered: four times the members of a mesh, as each program is a node


class MessageOrder:
    """Checks that the messages of each peer come in the order of its connection. Not thread-safe."""

    def __init__(self) -> None:
        self._expected: dict[str, tuple[str, int, int]] = {}  # incarnation, connection, place of its next message

    def skip(self, node: str, head: Head) -> None:
        """A message was refused that nobody waits for: what comes after it is in order."""
        incarnation = self._expected.pop(node, ("", 0, 0))[0]
        self._expected[node] = (incarnation, head.connection_number, head.sequence + 1)

    def take(self, node: str, incarnation: str, head: Head) -> bool:
        """Return whether a message counts; one of a connection before the latest of the same incarnation does not.

        Raises ProtocolError where messages before it are missing.
        """
        known, number, expected = self._expected.get(node, ("", 0, 0))
        if known not in ("", incarnation):  # its clock may have been put back
            number, expected = 0, 0
        if head.connection_number < number:
            return False
        if head.connection_number > number:
            expected = 0
        if head.sequence != expected:
            raise ProtocolError(f"message {head.sequence} came where {expected} was to come", node=node)
        self._expected.pop(node, None)  # behind those that spoke before
        self._expected[node] = (incarnation, head.connection_number, expected + 1)
        return True

    def forget(self, peers: Container[str]) -> None:
        """Forget nodes beyond MOST_NODES, those that spoke longest ago first, and none of `peers`."""
        if len(self._expected) > MOST_NODES:
            others = [node for node in self._expected if node not in peers]
            for node in others[: len(self._expected) - MOST_NODES]:
                del self._expected[node]
