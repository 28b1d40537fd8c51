"""A message to be sent: through the broker under its topic, or over the data link to one node."""

from __future__ import annotations

from dataclasses import dataclass

from edge_run.devices.messages.topics import Topic


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message to be sent, by the topic.

    node: whom it is for, where it is for one.
    is_direct: over the data link to it, also while the broker is there.
    """

    topic: Topic
    payload: bytes
    node: str | None = None
    is_direct: bool = False

    @property
    def is_confirmed(self) -> bool:
        """Whether the broker is to confirm it."""
        return self.topic.is_confirmed

    @property
    def is_kept(self) -> bool:
        """Whether the broker keeps it for later comers."""
        return self.topic.is_kept
