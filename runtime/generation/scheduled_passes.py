"""The passes that a scheduler plans, computed by a decoder; what becomes of them is told to the scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from edge_run.base.errors import ContextFull
from edge_run.base.protocols import BatchToken, Decoder
from edge_run.runtime.scheduling.scheduler import PassPart, PlannedPass, Scheduler
from edge_run.runtime.speculation.drafting import plan_tree
from edge_run.runtime.speculation.shared_guesses import SharedTree
from edge_run.runtime.speculation.verification import Verification


@dataclass(frozen=True, slots=True)
class ComputedPart:
    """A part of a pass that was computed.

    part: what it was.
    found: of a part that is the last of its request so far, the logits after it and after guesses of what follows; they
        are valid until the next pass.
    tree: those guesses; None where there were none.
    """

    part: PassPart
    found: Verification | None
    tree: SharedTree | None


class ScheduledPasses:
    """Computes what a scheduler plans. Not thread-safe."""

    def __init__(self, scheduler: Scheduler, decoder: Decoder) -> None:
        self._scheduler, self._decoder = scheduler, decoder

    def admit(self) -> None:
        """Admit the requests that can be, and have their sequences hold what they begin with."""
        while (place := self._scheduler.admit()) is not None:
            if place.source != place.sequence:
                self._decoder.branch(place.source, (place.sequence,))
            held = self._decoder.rewind(place.sequence, place.n_tokens)
            if held < place.n_tokens:  # a window has left what they would need
                self._scheduler.placed(place.sequence, held)

    def plan(self, n_guesses: int = 0) -> PlannedPass | None:
        """Return the next pass, which may have so many guesses; None where no request needs one."""
        planned = self._scheduler.next_pass(n_guesses)
        if planned is not None:
            self._empty(planned.emptied)
        return planned

    def compute(self, planned: PlannedPass, trees: Mapping[int, SharedTree]) -> list[ComputedPart]:
        """Compute a pass, with guesses of some requests; return nothing where it had no room and others gave way.

        Each part has to be `settle`d once tokens were chosen.

        Raises the errors of `Decoder.decode`; then the requests are as they were before, and `plan` may go on.
        """
        try:
            rows = self._decoder.decode([token for part in planned.parts for token in self._batch(part, trees)])
        except ContextFull:
            self._undo(planned, trees)
            if trees:
                return self.compute(planned, {})
            emptied = self._scheduler.give_way()
            if emptied is None:
                raise
            self._empty(emptied)
            return []
        except BaseException:
            self._undo(planned, trees)
            raise
        self._scheduler.computed(planned)
        computed, at = [], 0
        for part in planned.parts:
            tree, found = trees.get(part.request), None
            if part.is_last:
                verified = tree.tree if tree else plan_tree(part.tokens[-1], {}, ())
                found = Verification(verified, rows[at : at + len(verified)])
                at += len(verified)
            computed.append(ComputedPart(part, found, tree))
        return computed

    def settle(self, computed: ComputedPart) -> None:
        """Let the sequence of a part hold what its text followed of the guesses, and nothing else of them."""
        part, tree, found = computed.part, computed.tree, computed.found
        if tree is None or found is None:
            return
        branch = tree.sequences[tree.tree.sequences()[found.node][0]]
        n_tokens = part.start + 1 + found.n_followed
        self._decoder.keep(part.sequence, part.start, branch, tree.sequences[1:])
        held = self._decoder.rewind(part.sequence, n_tokens)
        if held < n_tokens:
            self._scheduler.placed(part.sequence, held)

    def _empty(self, sequences: Iterable[int]) -> None:
        for sequence in sequences:
            self._decoder.rewind(sequence, 0)

    def _undo(self, planned: PlannedPass, trees: Mapping[int, SharedTree]) -> None:
        """Note what the sequences of a pass hold that was not computed: what they held before, or nothing."""
        for tree in trees.values():
            self._empty(tree.sequences[1:])
        for part in planned.parts:
            self._scheduler.placed(part.sequence, self._decoder.rewind(part.sequence, part.start))

    def _batch(self, part: PassPart, trees: Mapping[int, SharedTree]) -> list[BatchToken]:
        if tree := trees.get(part.request):
            if branches := tree.sequences[1:]:
                self._decoder.branch(part.sequence, branches)
            return tree.tree.batch(part.start, tree.sequences)
        last = len(part.tokens) - 1
        return [
            BatchToken(token, part.start + i, part.sequence, wants_logits=part.is_last and i == last)
            for i, token in enumerate(part.tokens)
        ]
