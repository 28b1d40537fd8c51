"""The count of cells against llama.cpp's search for them: no cell in use, or written, lies above what is counted.

The cache is one as llama.cpp keeps: a pass takes free cells from a head on, which moves behind them; where cells are
freed, the head moves back to the lowest. The decoder counts as `LocalDecoder` does: texts grow, are cut and cleared;
trees of guesses are verified, of which a path is kept or none; other sequences have texts of their own; passes fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from edge_run.tiers.kv.cells import CellCount

SEQUENCES, WIDTH, VERIFIED = 4, 8, 6
Token = tuple[int, tuple[int, ...]]  # its position, and the sequences that it belongs to


@dataclass
class Cell:
    position: int = -1
    sequences: set[int] = field(default_factory=set)


class Cache:
    """Cells of one stream, as llama.cpp gives them out."""

    def __init__(self, n_cells: int) -> None:
        self.cells = [Cell() for _ in range(n_cells)]
        self.head = 0

    @property
    def used(self) -> list[int]:
        return [i for i, cell in enumerate(self.cells) if cell.sequences]

    def place(self, tokens: Sequence[Token]) -> list[int]:
        """Write a pass; return the cells, none where there are too few."""
        at = 0 if self.head > len(self.used) + 2 * len(tokens) else self.head
        order = [*range(at, len(self.cells)), *range(at)]
        chosen = [i for i in order if not self.cells[i].sequences][: len(tokens)]
        if len(chosen) < len(tokens):
            return []
        for i, (position, sequences) in zip(chosen, tokens, strict=True):
            self.cells[i] = Cell(position, set(sequences))
        self.head = chosen[-1] + 1
        return chosen

    def remove(self, sequence: int, position: int = 0) -> None:
        freed = []
        for i, cell in enumerate(self.cells):
            if sequence in cell.sequences and cell.position >= position:
                cell.sequences.discard(sequence)
                if not cell.sequences:
                    freed.append(i)
        self.head = min([self.head, *freed])

    def copy(self, source: int, target: int, position: int = 0) -> None:
        for cell in self.cells:
            if source in cell.sequences and cell.position >= position:
                cell.sequences.add(target)

    def length(self, sequence: int) -> int:
        return 1 + max((cell.position for cell in self.cells if sequence in cell.sequences), default=-1)


class FullError(Exception):
    """There are too few cells."""


class Decoder:
    """Does and counts what `LocalDecoder` does."""

    def __init__(self, most_tokens: int, is_short: bool) -> None:
        self.most_tokens, self.is_short = most_tokens, is_short
        self.cache = Cache(4 * (most_tokens + VERIFIED) if is_short else most_tokens)
        self.count, self.is_cut = CellCount(most_tokens, VERIFIED), False

    def lengths(self) -> list[int]:
        return [self.cache.length(sequence) for sequence in range(SEQUENCES)]

    def decode(self, batch: Sequence[Token], fails_after: int | None = None) -> None:
        self.count_cut()
        involved = {sequence for _, sequences in batch for sequence in sequences}
        involved.update(sequence for sequence, length in enumerate(self.lengths()) if length)
        if len(involved) > 1:
            self.count.fork(min(position for position, _ in batch))
        if self.is_short and not self.count.has_room(len(batch)):
            raise FullError
        try:
            for number, start in enumerate(range(0, len(batch), WIDTH)):
                part = batch[start : start + WIDTH]
                self.count_cut()
                self.count.add(len(part))
                if number == fails_after:
                    raise FullError
                written = self.cache.place(part)
                if not written:
                    raise FullError
                assert max(written) < self.count.top, "a pass writes where weights may lie"
        except FullError:
            for sequence in {sequences[0] for _, sequences in batch}:
                self.rewind(sequence, min(position for position, sequences in batch if sequences[0] == sequence))
            for branch in {branch for _, sequences in batch for branch in sequences[1:]}:
                self.cache.remove(branch)
            self.is_cut = True
            raise

    def rewind(self, sequence: int, position: int) -> None:
        self.cache.remove(sequence, position)
        self.is_cut = True

    def branch(self, sequence: int, branches: Sequence[int]) -> None:
        self.count_cut()
        for branch in branches:
            self.cache.remove(branch)
            self.cache.copy(sequence, branch)

    def keep(self, sequence: int, position: int, branch: int, branches: Sequence[int]) -> None:
        if branch != sequence:
            self.cache.remove(sequence, position)
            self.cache.copy(branch, sequence, position)
        for other in branches:
            self.cache.remove(other)
        self.is_cut = True

    def clear(self) -> None:
        self.cache = Cache(len(self.cache.cells))
        self.is_cut = True

    def count_cut(self) -> None:
        if not self.is_cut:
            return
        lengths, self.is_cut = self.lengths(), False
        if sum(length > 0 for length in lengths) > 1:
            self.count.lower(sum(lengths))
        else:
            self.count.cut(max(lengths))


class CellCountMachine(RuleBasedStateMachine):
    """A decoder with texts in any of its sequences, of which the first is also guessed for."""

    @initialize(most_tokens=st.integers(8, 60), is_short=st.booleans())
    def begin(self, most_tokens: int, is_short: bool) -> None:
        self.decoder = Decoder(most_tokens, is_short)

    def _decode(self, batch: Sequence[Token], fails_after: int | None = None) -> bool:
        try:
            self.decoder.decode(batch, fails_after)
        except FullError:
            return False
        return True

    @rule(
        n_tokens=st.one_of(st.just(1), st.integers(1, 30)),
        sequence=st.sampled_from((0, 0, 0, 1, 2)),
        fails_after=st.sampled_from((None, None, None, 0, 1)),
    )
    def text(self, n_tokens: int, sequence: int, fails_after: int | None) -> None:
        start = self.decoder.cache.length(sequence)
        stop = min(start + n_tokens, self.decoder.most_tokens)
        if start < stop:
            self._decode([(position, (sequence,)) for position in range(start, stop)], fails_after)

    @rule(data=st.data())
    def verify(self, data: st.DataObject) -> None:
        """A token and a tree of guesses beside others or none; a path of the tree is kept, and then cut perhaps."""
        decoder, start = self.decoder, self.decoder.cache.length(0)
        paths = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=SEQUENCES), "lengths of paths")
        batch: list[Token] = [(start, tuple(range(len(paths))))]
        for sequence, length in enumerate(paths):
            batch += [(start + 1 + i, (sequence,)) for i in range(length)]
        batch = [token for token in batch[:VERIFIED] if token[0] < decoder.most_tokens]
        if not batch:
            return
        decoder.branch(0, range(1, len(paths)))
        if self._decode(batch):
            chosen = data.draw(st.integers(0, len(paths) - 1), "path")
            decoder.keep(0, start, chosen, range(1, SEQUENCES))
            decoder.rewind(0, start + data.draw(st.integers(0, 5), "tokens kept"))

    @rule(sequence=st.sampled_from((0, 0, 1, 2)), share=st.floats(0, 1))
    def rewind(self, sequence: int, share: float) -> None:
        self.decoder.rewind(sequence, int(share * self.decoder.cache.length(sequence)))

    @rule(branch=st.integers(1, SEQUENCES - 1))
    def fork(self, branch: int) -> None:
        """Another sequence goes on where the first one is, for as long as it likes."""
        self.decoder.branch(0, [branch])

    @precondition(lambda self: self.decoder.cache.used)
    @rule()
    def clear(self) -> None:
        self.decoder.clear()

    @invariant()
    def no_cell_in_use_lies_above(self) -> None:
        if hasattr(self, "decoder"):
            used, count = self.decoder.cache.used, self.decoder.count
            assert not used or max(used) < count.top
            assert len(used) <= count.used
            assert count.top <= self.decoder.most_tokens + VERIFIED


CellCountMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestCellCount = CellCountMachine.TestCase
