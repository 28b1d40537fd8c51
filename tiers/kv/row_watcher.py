"""Who is told of the rows in a context's cells."""

from __future__ import annotations

from collections.abc import Sequence

from edge_run.base.protocols import BatchToken


class RowWatcher:
    """What is told of the rows in a context's cells as they come and go; this one does nothing with it."""

    def ran(self, tokens: Sequence[BatchToken]) -> None:
        """A pass has computed rows for `tokens`."""

    def cut(self, sequence: int, position: int) -> None:
        """`sequence` is about to lose its rows from `position` on."""

    def cleared(self) -> None:
        """The context is as when it was opened: what comes next lies in its first cells."""

    def taken_back(self, n_tokens: int) -> None:
        """Passes over up to `n_tokens` tokens were begun, not all of which have `ran`: they are about to be cut."""

    def branched(self, position: int) -> None:
        """Several sequences have tokens from `position` on: cells need not be in the order of the text there."""
