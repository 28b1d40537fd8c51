"""A decoder that has one batch at a time, used as one that can have several in flight."""

from __future__ import annotations

from collections.abc import Sequence

from edge_run.base.protocols import BatchToken, Decoder, Logits, PassQueue


class OneAtATime:
    """Computes each batch when it is begun. Not thread-safe."""

    most_in_flight = 1

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._rows: Logits | None = None

    def begin(self, batch: Sequence[BatchToken]) -> None:
        """Compute a batch. Raises as `Decoder.decode`."""
        assert self._rows is None, "one batch at a time"
        self._rows = self._decoder.decode(batch)

    def finish(self) -> Logits:
        """Return the rows of the batch."""
        rows, self._rows = self._rows, None
        assert rows is not None
        return rows

    def abandon(self) -> None:
        """Forget the rows; what was computed is for the caller to cut."""
        self._rows = None


def pass_queue(decoder: Decoder) -> PassQueue:
    """Return `decoder` as one that can have several batches in flight, though it may have use for one only."""
    return decoder if isinstance(decoder, PassQueue) else OneAtATime(decoder)
