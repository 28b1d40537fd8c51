"""Rows that go to a file and come back, in any order of events: what is read is always what was written last.

The machine plays the part of `Spill`: memory and a file, for which each row is a number that is never used twice.
Writes end in any order, well or badly, also after a cut has made them void; those leave anything in the file.
"""

from __future__ import annotations

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from edge_run.tiers.kv.spill_states import PieceState, SpillStates

N_ROWS = 40
GONE, GARBAGE = "no memory", "garbage"
IN_FILE = (PieceState.KEPT, PieceState.AWAY, PieceState.COMING)


class SpillMachine(RuleBasedStateMachine):
    """rows: what each row is; memory and file: of each piece, its rows as they are there."""

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        """Pieces of several tensors, each with rows of another size, so that pieces share rows at their ends."""
        pieces: list[range] = []
        for _ in range(data.draw(st.integers(1, 3))):
            size, at = data.draw(st.integers(4, 30)), data.draw(st.integers(0, 6))
            while (stop := -(-(at + size) // 3)) <= N_ROWS:
                pieces.append(range(at // 3, stop))
                at += size
        self.states, self.pieces = SpillStates(pieces), pieces
        self.rows: list[int] = []
        self.names = itertools.count()
        self.memory: dict[int, object] = {piece: {} for piece in range(len(pieces))}
        self.file: dict[int, object] = dict.fromkeys(range(len(pieces)), GARBAGE)
        self.writes: dict[int, object] = {}
        self.cut_since: set[int] = set()

    def _of(self, piece: int) -> dict[int, int]:
        """The rows of `piece` that count."""
        return {row: self.rows[row] for row in self.pieces[piece] if row < len(self.rows)}

    @precondition(lambda self: not self.states.coming)
    @rule(n_rows=st.integers(0, 9))
    def run(self, n_rows: int) -> None:
        """A pass: it begins where all rows that count are known, and writes where memory is."""
        self.states.grow(len(self.rows))
        for _ in range(min(n_rows, N_ROWS - len(self.rows))):
            row = len(self.rows)
            self.rows.append(next(self.names))
            for piece, rows in enumerate(self.pieces):
                if row in rows:
                    content = self.memory[piece]
                    assert isinstance(content, dict), "a row is written where no memory is"
                    assert self.states.state(piece) in (PieceState.UNWRITTEN, PieceState.OPEN)
                    content[row] = self.rows[row]
        self.states.grow(len(self.rows))

    @rule(n_pieces=st.integers(0, 12))
    def save(self, n_pieces: int) -> None:
        for piece in self.states.save(n_pieces):
            assert piece not in self.writes, "two writes to one place at once"
            content = self.memory[piece]
            assert isinstance(content, dict)
            self.writes[piece] = dict(content)

    @precondition(lambda self: self.writes)
    @rule(data=st.data(), is_written=st.booleans())
    def end_of_write(self, data: st.DataObject, is_written: bool) -> None:
        piece = data.draw(st.sampled_from(list(self.writes)))
        content, is_void, before = self.writes.pop(piece), piece in self.cut_since, self.states.state(piece)
        self.cut_since.discard(piece)
        assert is_void or content == self.memory[piece], "what was being saved has changed"
        self.file[piece] = content if is_written and not is_void else GARBAGE
        self.states.saved(piece, is_written=is_written)
        after = PieceState.KEPT if is_written else PieceState.FULL
        assert self.states.state(piece) is (before if is_void else after)

    @rule(n_pieces=st.integers(0, 12))
    def let_go(self, n_pieces: int) -> None:
        kept = {piece for piece in range(len(self.pieces)) if self.states.state(piece) is PieceState.KEPT}
        for piece in self.states.let_go(n_pieces):
            assert piece in kept
            self.memory[piece] = GONE

    @rule(share=st.floats(0, 1))
    def cut(self, share: float) -> None:
        n_rows = int(share * len(self.rows))
        n_away = self.states.n_away
        del self.rows[n_rows:]
        pieces = self.states.cut(n_rows)
        assert self.states.n_away == n_away - len(pieces)
        self.cut_since |= {piece for piece in self.writes if self.pieces[piece].stop > n_rows}
        for piece in pieces:
            assert self.memory[piece] == GONE
            self.memory[piece] = {}
        for content in self.memory.values():
            if isinstance(content, dict):
                for row in [row for row in content if row >= n_rows]:
                    del content[row]

    @rule(n_away=st.integers(0, 12))
    def recall(self, n_away: int) -> None:
        before = self.states.n_away
        pieces = self.states.recall(n_away)
        assert len(pieces) == max(0, before - n_away)
        for piece in pieces:
            assert self.memory[piece] == GONE
            self.memory[piece] = {}

    @precondition(lambda self: self.states.coming)
    @rule(data=st.data())
    def come(self, data: st.DataObject) -> None:
        piece = data.draw(st.sampled_from(self.states.coming))
        content = self.file[piece]
        assert isinstance(content, dict)
        self.memory[piece] = {row: name for row, name in content.items() if row < len(self.rows)}
        self.states.came(piece)

    @invariant()
    def every_row_that_counts_is_somewhere(self) -> None:
        if not hasattr(self, "states"):
            return
        self.states.check()
        for piece in range(len(self.pieces)):
            state, wanted = self.states.state(piece), self._of(piece)
            if state in IN_FILE:
                content = self.file[piece]
                assert isinstance(content, dict)
                assert {row: content[row] for row in wanted} == wanted
            if state not in (PieceState.AWAY, PieceState.COMING):
                assert self.memory[piece] == wanted


TestSpillStates = SpillMachine.TestCase
TestSpillStates.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
