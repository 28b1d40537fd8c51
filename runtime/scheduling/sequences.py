"""Which tokens the sequences of a context hold, who uses them, and where a new request begins cheapest.

A request that has ended leaves its tokens behind: they are given up last, and until then a prompt that begins with them
costs only what follows. A beginning that a sequence in use holds is shared with it: llama.cpp's cells may belong to
several sequences, so it takes no memory twice.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from edge_run.runtime.decoding.common_prefix import common_prefix_tokens


@dataclass(frozen=True, slots=True)
class Beginning:
    """How a sequence comes to hold the beginning of a request.

    sequence: the sequence.
    source: the sequence that shares its tokens with it; the sequence itself where it holds them already.
    n_tokens: how many tokens it begins with.
    """

    sequence: int
    source: int
    n_tokens: int


@dataclass(slots=True)
class _Held:
    """What a sequence holds.

    tokens: its tokens.
    cells: the cells that they lie in, by numbers of ours, which rise.
    user: the request that uses it; None where its request has ended.
    ended: when that was, counted in requests.
    salt: whom the tokens may serve.
    """

    tokens: list[int] = field(default_factory=list)
    cells: list[int] = field(default_factory=list)
    user: int | None = None
    ended: int = 0
    salt: str = ""


class SequencePool:
    """The sequences of one context. A state machine without I/O; `check` holds after every call.

    n_cells: the cells of the context, for the tokens of all sequences together.
    next_cell: the number of the cell that is taken next; those taken later have higher ones.
    """

    def __init__(
        self, n_sequences: int, n_cells: int, *, can_rewind: bool, can_share: bool, keeps_ended: bool = True
    ) -> None:
        """Make the pool of an empty context.

        can_rewind: sequences can be cut anywhere. can_share: sequences can share their beginnings. keeps_ended: what
        ended requests leave behind serves others.
        """
        self.n_cells = n_cells
        self._can_rewind, self._can_share, self._keeps_ended = can_rewind, can_share, keeps_ended
        self._held = [_Held() for _ in range(n_sequences)]
        self.next_cell, self._endings = 0, itertools.count(1)
        self._uses = Counter[int]()  # of each cell, by sequences

    @property
    def used_cells(self) -> int:
        """The cells in use."""
        return len(self._uses)

    @property
    def shares_beginnings(self) -> bool:
        """Whether requests that begin alike and go on differently may share what is alike while both run."""
        return self._can_share and self._can_rewind

    @property
    def has_free_sequence(self) -> bool:
        """Whether another request could have a sequence."""
        return any(held.user is None for held in self._held)

    def n_held(self, sequence: int) -> int:
        """Return how many tokens `sequence` holds."""
        return len(self._held[sequence].tokens)

    def plan(self, tokens: Sequence[int], salt: str = "") -> Beginning:
        """Return where a request of `tokens` begins cheapest; at least one token is left to be computed.

        salt: what was held for requests of another salt does not serve it.
        """
        idle = [number for number, held in enumerate(self._held) if held.user is None]
        oldest = min(idle, key=lambda number: self._held[number].ended if self._held[number].tokens else 0)
        found = Beginning(oldest, oldest, 0)
        for number, held in enumerate(self._held):
            common = self._usable(held, tokens) if held.salt == salt else 0
            if common <= found.n_tokens:
                continue
            is_continued = held.user is None and common == len(held.tokens)
            if is_continued or (held.user is None and not self._can_share):
                found = Beginning(number, number, common)
            elif self._can_share:
                found = Beginning(oldest, number, common)
        return found

    def room_beside(self, placed: Beginning) -> int:
        """Return how many cells a request that begins as `placed` could have besides, if nothing else were kept."""
        kept = set(self._held[placed.source].cells[: placed.n_tokens])
        kept.update(cell for held in self._held if held.user is not None for cell in held.cells)
        return self.n_cells - len(kept)

    def begin(self, request: int, placed: Beginning, salt: str = "") -> None:
        """Have `request` use a sequence, which holds what `placed` says now."""
        target, source = self._held[placed.sequence], self._held[placed.source]
        assert target.user is None
        if target is not source:
            self.cut(placed.sequence, 0)
            target.tokens, target.cells = source.tokens[: placed.n_tokens], source.cells[: placed.n_tokens]
            self._uses.update(target.cells)
        self.cut(placed.sequence, placed.n_tokens)
        target.user, target.salt = request, salt

    def extend(self, sequence: int, tokens: Sequence[int]) -> None:
        """A pass has computed `tokens`, which `sequence` holds now."""
        held = self._held[sequence]
        cells = range(self.next_cell, self.next_cell + len(tokens))
        self.next_cell = cells.stop
        held.tokens += tokens
        held.cells += cells
        self._uses.update(cells)

    def cut(self, sequence: int, n_tokens: int) -> None:
        """`sequence` holds its first `n_tokens` tokens only."""
        held = self._held[sequence]
        for cell in held.cells[n_tokens:]:
            self._uses[cell] -= 1
            if not self._uses[cell]:
                del self._uses[cell]
        del held.tokens[n_tokens:], held.cells[n_tokens:]

    def holding_since(self, cell: int) -> list[tuple[int, int]]:
        """Return the sequences with tokens in `cell` or later ones, each with how many tokens it has before these."""
        before = [(number, bisect_left(held.cells, cell)) for number, held in enumerate(self._held)]
        return [(number, n_tokens) for number, n_tokens in before if n_tokens < self.n_held(number)]

    def end(self, sequence: int) -> None:
        """The request of `sequence` has ended; what the sequence holds may serve others."""
        held = self._held[sequence]
        held.user, held.ended = None, next(self._endings)

    def make_room(self, n_cells: int) -> list[int]:
        """Give up what ended requests left, the oldest first, until `n_cells` are free; return what was emptied.

        What serves nobody any more is given up at once.
        """
        idle = [number for number, held in enumerate(self._held) if held.user is None and held.tokens]
        emptied = []
        for number in sorted(idle, key=lambda number: self._held[number].ended):
            if self._keeps_ended and self.used_cells + n_cells <= self.n_cells:
                break
            self.cut(number, 0)
            emptied.append(number)
        return emptied

    def check(self) -> None:
        """Check what must always hold."""
        counted = Counter(cell for held in self._held for cell in held.cells)
        assert counted == self._uses
        assert all(len(held.tokens) == len(held.cells) for held in self._held)
        users = [held.user for held in self._held if held.user is not None]
        assert len(users) == len(set(users))

    def _usable(self, held: _Held, tokens: Sequence[int]) -> int:
        """Return how many of `tokens`, but the last, a request could begin with that `held` holds."""
        if held.user is None and not self._keeps_ended:
            return 0
        common = common_prefix_tokens(held.tokens, tokens)
        return common if self._can_rewind or common == len(held.tokens) else 0
