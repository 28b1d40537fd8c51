"""Where each piece of a context's rows is, memory or a file: a state machine without I/O.

A piece is some bytes of one tensor, and the rows that have any of them. The first pieces, in the order in which rows
complete them, go to the file when memory is short.

    UNWRITTEN -> OPEN -> FULL -> SAVING -> KEPT -> AWAY -> COMING -> KEPT, or OPEN where rows of it were cut

A piece leaves memory only once its write has succeeded, and what is being saved does not change. A cut that takes rows
from a piece ends what it was: with rows left in it, it comes back to memory, without any it is nobody's. A write that
was begun before such a cut counts for nothing, and the piece is not written again before that write has ended.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from enum import Enum


class PieceState(Enum):
    """The state of a piece.

    UNWRITTEN: it has no row yet.
    OPEN: it has some of its rows.
    FULL: it has all of its rows, in memory alone.
    SAVING: it is being written to the file, and stays as it is.
    KEPT: it is in memory and in the file.
    AWAY: it is in the file, and comes to memory for the moment of its use.
    COMING: it is read back to memory of its own, as it has lost rows, or as there is room for it again.
    """

    UNWRITTEN = 0
    OPEN = 1
    FULL = 2
    SAVING = 3
    KEPT = 4
    AWAY = 5
    COMING = 6


class SpillStates:
    """The pieces of one context. Not thread-safe.

    pieces: the rows of each piece.
    order: the pieces, those first that are complete first.
    n_rows: the rows that count.
    n_away: how many pieces are away, the first ones of the order.
    coming: those to be read back before rows are written again.
    """

    def __init__(self, pieces: Sequence[range]) -> None:
        self.pieces = pieces
        self.order = sorted(range(len(pieces)), key=lambda piece: (pieces[piece].stop, piece))
        self._stops = [pieces[piece].stop for piece in self.order]
        self._states: dict[int, PieceState] = {}  # from SAVING on; the others follow from the rows
        self._writing: set[int] = set()  # pieces whose write has not ended, whether it counts or not
        self.n_rows = self.n_away = 0
        self.coming: list[int] = []

    @property
    def n_complete(self) -> int:
        """How many pieces, the first ones of the order, have all of their rows."""
        return bisect_right(self._stops, self.n_rows)

    def stop_of(self, place: int) -> int:
        """Return the row after the last one of the piece at `place` in the order."""
        return self._stops[place]

    def state(self, piece: int) -> PieceState:
        """Return the state of `piece`."""
        if piece in self._states:
            return self._states[piece]
        rows = self.pieces[piece]
        if rows.start >= self.n_rows:
            return PieceState.UNWRITTEN
        return PieceState.FULL if rows.stop <= self.n_rows else PieceState.OPEN

    def grow(self, n_rows: int) -> None:
        """So many rows count now, more than before or as many."""
        assert n_rows >= self.n_rows, "rows that are gone are cut first"
        assert n_rows == self.n_rows or not self.coming, "what comes back does not change"
        self.n_rows = n_rows

    def save(self, n_pieces: int) -> list[int]:
        """Return the pieces to be written, of the first `n_pieces` of the order, as far as these are complete."""
        asked = self.order[self.n_away : min(n_pieces, self.n_complete)]
        pieces = [piece for piece in asked if piece not in self._states and piece not in self._writing]
        self._states.update(dict.fromkeys(pieces, PieceState.SAVING))
        self._writing.update(pieces)
        return pieces

    def saved(self, piece: int, *, is_written: bool) -> bool:
        """Note the end of a write; return whether it counts, which it does not where rows of the piece were cut."""
        self._writing.remove(piece)
        if self._states.get(piece) is not PieceState.SAVING:
            return False
        if is_written:
            self._states[piece] = PieceState.KEPT
        else:
            del self._states[piece]
        return True

    def let_go(self, n_pieces: int) -> list[int]:
        """Return those of the first `n_pieces` pieces whose memory may be given away now: they are away.

        They are taken in order, up to the first that is not kept.
        """
        gone = []
        for piece in self.order[self.n_away : n_pieces]:
            if self._states.get(piece) is not PieceState.KEPT:
                break
            self._states[piece] = PieceState.AWAY
            gone.append(piece)
        self.n_away += len(gone)
        return gone

    def cut(self, n_rows: int) -> list[int]:
        """Only the first `n_rows` rows are left. Return the pieces that lost rows while they were away.

        They need memory of their own again. Those of them that have any row left are `coming`.
        """
        self.n_rows = min(self.n_rows, n_rows)
        hit = {piece: state for piece, state in self._states.items() if self.pieces[piece].stop > self.n_rows}
        for piece in hit:
            del self._states[piece]
        self.n_away = min(self.n_away, self.n_complete)
        away = [piece for piece in hit if hit[piece] is PieceState.AWAY]
        self.coming = [piece for piece in (*self.coming, *away) if self.pieces[piece].start < self.n_rows]
        self._states.update(dict.fromkeys(self.coming, PieceState.COMING))
        return away

    def recall(self, n_away: int) -> list[int]:
        """Return the pieces to be read back so that only the first `n_away` of the order are away."""
        pieces = self.order[n_away : self.n_away]
        self.n_away -= len(pieces)
        self._states.update(dict.fromkeys(pieces, PieceState.COMING))
        self.coming += pieces
        return pieces

    def came(self, piece: int) -> None:
        """`piece` is back in memory of its own; as long as it is whole, the file has it too."""
        self.coming.remove(piece)
        del self._states[piece]
        if self.pieces[piece].stop <= self.n_rows:
            self._states[piece] = PieceState.KEPT

    def check(self) -> None:
        """Raise AssertionError where a state contradicts the rows or another state."""
        away = {piece for piece, state in self._states.items() if state is PieceState.AWAY}
        assert away == set(self.order[: self.n_away]), "what is away are the first pieces"
        assert set(self.coming) == {piece for piece, state in self._states.items() if state is PieceState.COMING}
        saving = {piece for piece, state in self._states.items() if state is PieceState.SAVING}
        assert saving <= self._writing
        for piece, state in self._states.items():
            rows = self.pieces[piece]
            if state is PieceState.COMING:
                assert rows.start < self.n_rows, "nothing comes back without a row that counts"
            else:
                assert rows.stop <= self.n_rows, "what is not complete is neither saved nor away"
