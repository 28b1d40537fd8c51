"""Bounds the bytes of messages that are kept of what members say of themselves, under however many names.

JSON takes up to twenty times its size once it is parsed, and a device can be many nodes, as each of its programs is one
(`envelope.MOST_OF_DEVICE`).
"""

from __future__ import annotations

from collections.abc import Container

from edge_run.base.errors import ProtocolError

MOST_KEPT_BYTES = 2 << 20


class MessageQuota:
    """The bytes of kept messages, by node and kind. A later message replaces the one before."""

    def __init__(self) -> None:
        self._taken: dict[tuple[str, str], int] = {}

    def take(self, node: str, kind: str, size_bytes: int, known: Container[str]) -> None:
        """Note that a message of `node` is kept. known: the nodes of which something is still kept.

        Raises ProtocolError where there is no room for it.
        """
        self._taken = {key: size for key, size in self._taken.items() if key[0] in known and key != (node, kind)}
        held_bytes = sum(self._taken.values())
        if held_bytes + size_bytes > MOST_KEPT_BYTES:
            raise ProtocolError(
                f"says {size_bytes} bytes of itself, and {held_bytes} of {MOST_KEPT_BYTES} are kept of "
                "others already; let devices offer fewer models, or make two clusters",
                node=node,
            )
        self._taken[node, kind] = size_bytes
