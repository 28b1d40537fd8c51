"""Fetched parts of a model until they are stored. Each part is verified before it counts."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from edge_run.base.errors import EdgeRunError, TierReadError, lacks_room
from edge_run.base.units import MIB
from edge_run.runtime.fetch.schedule import Fetching
from edge_run.runtime.fetch.store import FetchedModel
from edge_run.tiers.pieces import DIGEST_BYTES, PIECE_BYTES, Pieces, model_hash, piece_digest

logger = logging.getLogger(__name__)

SYNC_BYTES, SYNC_S = 32 * MIB, 1.0
PIECE, DIGESTS = "piece", "digests"


class PieceSink:
    """Takes pieces into a model that is partly here, each verified by its digest."""

    what = PIECE

    def __init__(self, fetched: FetchedModel) -> None:
        self.model, self._partial, self._digests = fetched.model, fetched.partial, fetched.digests

    def length(self, number: int) -> int:
        """Return the bytes of piece `number`."""
        return self._partial.pieces.place(number).length

    def put(self, number: int, data: memoryview) -> bool:
        """Write a piece, if it is what it should be, and return whether it is."""
        wanted = self._digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
        if piece_digest(data) != wanted:
            return False
        self._partial.write(number, data)
        return True

    def sync(self) -> None:
        """Have the pieces on the disk."""
        self._partial.sync()


class DigestSink:
    """Takes the list of a model's digests, which can be verified when it is there as a whole."""

    what = DIGESTS

    def __init__(self, model: str, sizes: Sequence[int]) -> None:
        self.model, self._sizes = model, tuple(sizes)
        self.content = bytearray(Pieces(sizes).count * DIGEST_BYTES)

    @property
    def count(self) -> int:
        """The number of its parts."""
        return Pieces([len(self.content)]).count

    @property
    def is_right(self) -> bool:
        """Whether all of it is there, and is that of the model."""
        return model_hash(self._sizes, bytes(self.content)) == self.model

    def length(self, number: int) -> int:
        """Return the bytes of part `number`."""
        return min(PIECE_BYTES, len(self.content) - number * PIECE_BYTES)

    def put(self, number: int, data: memoryview) -> bool:
        """Take a part of the list."""
        self.content[number * PIECE_BYTES : number * PIECE_BYTES + len(data)] = data
        return True

    def sync(self) -> None:
        """It is in memory only."""


Sink: TypeAlias = PieceSink | DigestSink  # where fetched parts go: `what` they are, and of which `model`


class Transfer:
    """The fetching of parts into a sink. Any thread may read its fields.

    why: it ended short; empty where it did not.
    error: that this device met with what came, where it ended with one: no provider is to blame.
    wrong: nodes that sent other bytes than the model has.
    """

    def __init__(self, sink: Sink, wanted: Sequence[int], providers: Sequence[str]) -> None:
        self.sink, self.fetching = sink, Fetching(wanted, providers)
        self.wanted_bytes = sum(map(sink.length, wanted))
        self.done_bytes = self._unsynced_bytes = 0
        self.why = ""
        self.error: EdgeRunError | None = None
        self.wrong: set[str] = set()
        self.over = threading.Event()
        self._synced_s = time.monotonic()

    @property
    def failures(self) -> dict[str, str]:
        """Why a node sends no more."""
        return dict(self.fetching.failures)

    def take(self, node: str, number: int, data: memoryview) -> None:
        """`data` came from `node` as part `number`. Raises TierReadError."""
        if not self.fetching.was_asked(node, number):
            return
        if len(data) != self.sink.length(number) or not self.sink.put(number, data):
            self.wrong.add(node)
            self.fetching.fail(node, "sent other bytes than the model has")
            logger.warning("node %s sent other bytes than the model has: it is asked no more", node)
            return
        self.fetching.came(node, number, time.monotonic())
        self.done_bytes += len(data)
        self._unsynced_bytes += len(data)

    def settle(self) -> None:
        """Keep what came for good, from time to time; end where nothing is left to come. Raises TierReadError."""
        now, is_stuck = time.monotonic(), self.fetching.is_stuck
        is_ending = self.fetching.is_done or is_stuck
        if is_ending or self._unsynced_bytes >= SYNC_BYTES or now - self._synced_s >= SYNC_S:
            self._unsynced_bytes, self._synced_s = 0, now
            self.sink.sync()
        if is_ending:
            self.end("nobody sends the rest" if is_stuck else "")

    def end(self, why: str) -> None:
        """It is over; why: short of the end."""
        self.why = why
        self.over.set()

    def end_with(self, error: EdgeRunError) -> None:
        """It is over, because this device cannot keep what comes; a full drive says how much had room."""
        if isinstance(error, TierReadError) and lacks_room(error):
            error = replace(error, found_bytes=self.done_bytes, needed_bytes=self.wanted_bytes)
        self.error = error
        self.end(error.message)
