"""The messages that the broker keeps for clients that subscribe later. The oldest messages go first.

The messages are bounded for each user and in all. A user fills its own share only, so no user can push out the lease
or the plan of another. Only who may publish to a topic can put another message in its place, and have one forgotten:
its own, and a plan of anybody, as who leads has that of who led before forgotten.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from edge_run.devices.broker.access import covers, is_plan
from edge_run.devices.broker.packets import Publish

MOST_OF_USER, MOST_BYTES_OF_USER = 128, 1 << 20
MOST, MOST_BYTES = 1024, 4 << 20
EACH_BYTES = 256  # what a message takes besides its topic and its payload, about


@dataclass(frozen=True, slots=True)
class _Kept:
    user: str
    message: Publish
    size: int


class KeptMessages:
    """The last kept message of each topic."""

    def __init__(self) -> None:
        self._messages: dict[str, _Kept] = {}  # in the order in which they came

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def total_bytes(self) -> int:
        """How much is kept."""
        return sum(one.size for one in self._messages.values())

    def put(self, user: str, message: Publish) -> None:
        """Keep a message of `user`, who may publish to its topic; an empty one has the one there forgotten."""
        if not message.payload:
            known = self._messages.get(message.topic)
            if known and (known.user == user or is_plan(message.topic)):
                del self._messages[message.topic]
            return
        self._messages.pop(message.topic, None)
        size = EACH_BYTES + len(message.topic) + len(message.payload)
        self._messages[message.topic] = _Kept(user, message, size)
        self._drop_oldest(user)
        while len(self._messages) > MOST or self.total_bytes > MOST_BYTES:
            of_users = Counter[str]()
            for one in self._messages.values():
                of_users[one.user] += one.size
            greediest = max(of_users, key=of_users.__getitem__)
            del self._messages[next(topic for topic, one in self._messages.items() if one.user == greediest)]

    def matching(self, filter_: str) -> Iterator[Publish]:
        """Return what is kept of the topics that `filter_` matches."""
        return (one.message for topic, one in self._messages.items() if covers(filter_, topic))

    def drop_user(self, user: str) -> None:
        """Forget all of a user."""
        self._messages = {topic: one for topic, one in self._messages.items() if one.user != user}

    def _drop_oldest(self, user: str) -> None:
        own = [(topic, one.size) for topic, one in self._messages.items() if one.user == user]
        size = sum(bytes_ for _, bytes_ in own)
        for topic, bytes_ in own[:-1]:
            if len(own) <= MOST_OF_USER and size <= MOST_BYTES_OF_USER:
                return
            del self._messages[topic]
            own, size = own[1:], size - bytes_
