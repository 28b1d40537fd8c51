"""Speculation: a conversation that verifies guesses in the passes that it has to make anyway.

A pass over streamed weights reads the same for one token as for many. So the token that is certain is given to the
decoder together with a tree of guesses of what follows it (Leviathan et al. 2023; Miao et al., SpecInfer, 2024), and as
long as what is chosen next is in the tree, its logits are there already, and no pass is made.

What is chosen is chosen as ever, by the same sampler from the target's own logits, one token after the other. For
guesses that are not drawn themselves that is rejection sampling: to accept a guess x with its chance p(x), and
otherwise to draw from the rest, is to draw from p and to look whether it is x. So the distribution is the target's, a
seed gives the tokens that it gives without speculation, and grammars and penalties hold.

Logits depend a little on the width of a pass. With `exact` they do not (`LocalDecoder`), but for those of tokens that
do not lie in the cache in the order of the text: they are those outside the tree's main line. Then such a token is
computed again, as the beginning of the next pass, and what seemed to follow it is the best guess there is.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import numpy as np

from edge_run.base.errors import Cancelled, EdgeRunError
from edge_run.base.protocols import BatchToken, Clock, Decoder, Logits
from edge_run.base.results import Speculation
from edge_run.runtime.decoding.session import Session
from edge_run.runtime.inspection.draft_file import MOST_DEPTH
from edge_run.runtime.speculation.drafting import (
    Acceptance,
    Drafter,
    DraftTree,
    Guess,
    Guesses,
    Path,
    WantedGuesses,
    merged,
    plan_tree,
    rank_guesses,
)
from edge_run.runtime.speculation.overlap import Overlap
from edge_run.runtime.speculation.tally import SpeculationTally
from edge_run.runtime.speculation.verification import FORESEEN, Verification
from edge_run.runtime.speculation.width_control import WidthControl

_SURE = 0.99


class SpeculativeSession(Session):
    """A `Session` on sequence 0 that guesses tokens and verifies them. Not thread-safe.

    decoder: verifies the guesses.
    drafters: guess.
    control: decides how many guesses a pass verifies.
    tally: counts the figures.
    branches: sequences for the branches of trees; none where guesses must be a chain.
    is_exact: whether logits do not depend on the width of a pass, to the bit.
    counters: returns the seconds that passes waited for weights so far, the seconds with a read in flight, and the
        bytes read.

    It is over 200 lines because drafting, verifying and accepting all walk through the same tree of guesses.
    """

    def __init__(
        self,
        decoder: Decoder,
        drafters: Sequence[Drafter],
        control: WidthControl,
        tally: SpeculationTally,
        *,
        branches: Sequence[int] = (),
        is_exact: bool = False,
        counters: Callable[[], tuple[float, float, int]] = lambda: (0.0, 0.0, 0),
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(decoder)
        self._drafters, self._control, self._tally = drafters, control, tally
        self._branches, self._is_exact = tuple(branches), is_exact
        self._overlaps = [drafter for drafter in drafters if isinstance(drafter, Overlap)]
        self._guessed_s = 0.0  # for the pass at hand
        self._counters, self._clock = counters, clock
        self._acceptance = Acceptance()
        self._has_drafted = False
        self._guessed: Verification | None = None
        self._holds_guesses = False  # the decoder, beside the conversation
        self._plain_row: Logits | None = None  # after the last token, where its pass had no other

    def feed(self, prompt: Sequence[int]) -> tuple[Logits, int]:
        """Make the conversation be `prompt`; see `Session.feed`. The figures begin anew."""
        self._settle(goes_on=False)
        self._guessed = self._plain_row = None
        self._has_drafted = False
        self._acceptance.forget(FORESEEN)  # the next answer may be sampled otherwise
        self._tally.begin()
        self._control.begin()
        return super().feed(prompt)

    def forget(self) -> None:
        """Leave the conversation, and what was guessed of it."""
        self._empty_branches()
        super().forget()
        self._guessed = self._plain_row = None
        self._holds_guesses = False

    def finish(self) -> None:
        """The answer is complete: what is kept of it has no guesses that did not come true."""
        if self.keeper is not None:
            self._settle()
        super().finish()

    def step(self, token: int, n_more: int | None = None) -> Logits:
        """Append one token; see `Session.step`. The logits are there without a pass where a guess came true."""
        most_depth = self._decoder.capabilities.context_tokens if n_more is None else n_more
        guessed = self._guessed
        is_guessed = guessed is not None and guessed.follows(token, self._acceptance, self._tally)
        if guessed is None or guessed.rows is None or not is_guessed:
            if guessed and guessed.rows is None and not is_guessed:
                self._guessed = None
            return self._verify(token, (), most_depth)
        tree, node = guessed.tree, guessed.node
        if self._is_exact and node >= tree.main_length:
            foreseen = self._foreseen(tree, node, guessed.rows)
            guessed.node = tree.parents[node]
            return self._verify(token, foreseen, most_depth)
        self.history.append(token)
        self._tally.accepted()
        self._tally.looked_at(guessed.row)
        return guessed.row

    def speculation(self) -> Speculation:
        """Return the figures since the last prompt."""
        decisions = tuple(itertools.chain.from_iterable(overlap.decisions for overlap in self._overlaps))
        return replace(self._tally.figures(), decisions=decisions)

    def _foreseen(self, tree: DraftTree, node: int | None, rows: Logits) -> list[int]:
        """Return what follows `node` in the tree by its best logits, and what follows that."""
        tokens: list[int] = []
        while node is not None:
            tokens.append(int(rows[node].argmax()))
            node = tree.children[node].get(tokens[-1])
        return tokens

    def _settle(self, *, goes_on: bool = True) -> None:
        """Let the decoder hold the conversation and nothing else; what it lost of that is computed again.

        goes_on: else another conversation comes, and is read from where this one is lost.
        """
        if not self._holds_guesses:
            return
        guessed = self._guessed
        if guessed is None or guessed.rows is None:  # Ctrl-C came between the pass and what is made of it
            self._empty_branches()
        elif self._branches:
            start = len(self.history) - guessed.n_followed - 1
            branch = guessed.tree.sequences()[guessed.node][0]
            self._decoder.keep(self._sequence, start, self._names()[branch], self._branches)
        kept = self._decoder.rewind(self._sequence, len(self.history))
        self._guessed, self._holds_guesses = None, False  # last: what is ended before is done again
        lost = self.history[kept:]
        if lost:
            del self.history[kept:]
            if goes_on:
                self._append(lost)

    def _empty_branches(self) -> None:
        for branch in self._branches:
            self._decoder.rewind(branch, 0)

    def _names(self) -> tuple[int, ...]:
        return (self._sequence, *self._branches)

    def _verify(self, token: int, foreseen: Sequence[int], most_depth: int) -> Logits:
        """Append `token` with a pass over it and guesses of what follows; see `_guess`."""
        self._settle()
        guesses = self._guess(token, foreseen, most_depth)
        values = [guess.value for guess in guesses.values()]
        width = self._control.choose(values) if values else 1
        again = width > 1 and self._plain_row is not None and not self._is_exact and bool(self._branches)
        tree = plan_tree(token, guesses, list(guesses)[: width - 1 - again])
        if self._control.plain_s() is not None:
            expected_s = self._control.expected_s(len(tree), is_guessed=len(tree) > 1)
            self._tally.planned(1 + sum(values[: len(tree) - 1]), expected_s)
        self._tally.decided(is_on=self._control.is_on)
        rows = self._run(tree, again)
        if width > 1:
            self._guessed, self._plain_row = Verification(tree, rows), None
            self._tally.looked_at(rows[0])
        else:
            self._plain_row = rows[0].copy()
            if guesses:  # held against what comes, without being verified
                self._guessed = Verification(plan_tree(token, guesses, list(guesses)))
        return np.asarray(rows[0])

    def _guess(self, token: int, foreseen: Sequence[int], most_depth: int) -> Guesses:
        """Return guesses of what follows the history and `token`, in the order in which a tree takes them.

        foreseen: tokens that follow surely, where always the likeliest one is chosen.
        most_depth: as many tokens after `token` are of use.

        There are as many guesses as there is room for, and none where they are not worth their time.
        """
        capabilities = self._decoder.capabilities
        room = capabilities.most_guesses(len(self.history))
        most = min(room, capabilities.outputs_per_pass - 1, capabilities.micro_batch_tokens - 1)
        deepest = min(most, most_depth)
        if deepest < 1 or self._tally.has_given_up or not self._control.wants_guesses():
            return {}
        started = self._clock()
        before, sure = tuple(foreseen[:deepest]), self._acceptance.chance(FORESEEN, _SURE)
        depth = min(MOST_DEPTH, deepest - len(before))
        history = [*self.history, token, *before]
        several = self._drafted(history, depth, most) if depth > 0 else []
        guesses: dict[Path, Guess] = {before[:n]: Guess(sure**n, FORESEEN, _SURE) for n in range(1, len(before) + 1)}
        for path, guess in merged(several).items():
            if len(path) <= depth:  # those that were made beside the pass before may be longer
                guesses[(*before, *path)] = replace(guess, value=guess.value * sure ** len(before))
        ranked = rank_guesses(guesses, 1 + len(self._branches))[:most]
        self._guessed_s = self._clock() - started
        once_s = sum(overlap.once_s for overlap in self._overlaps)
        once_s = min(self._guessed_s, once_s) if self._has_drafted else self._guessed_s  # first the prompt is read
        self._control.observe_drafting(self._guessed_s, once_s=once_s)
        self._has_drafted = True
        self._tally.drafted(self._guessed_s)
        return {path: guesses[path] for path in ranked}

    def _drafted(self, history: Sequence[int], depth: int, most: int) -> list[Guesses]:
        """Return what each drafter guesses; where one fails, nothing, and from then on in this answer."""
        wanted = WantedGuesses(depth, most, self._acceptance, self._control.pace)
        try:
            return [drafter.draft(history, wanted) for drafter in self._drafters]
        except Cancelled:
            raise
        except EdgeRunError as error:
            self._tally.gave_up(error)
            return []

    def _run(self, tree: DraftTree, again: bool) -> Logits:
        """Append the first token of `tree` with a pass over all of it; return the logits after each node.

        again: the token before is computed again with it, to see how far its logits depend on the width.
        """
        started, before = self._clock(), self._counters()
        self._holds_guesses = again or len(tree) > 1
        if again:
            self._decoder.rewind(self._sequence, len(self.history) - 1)
        try:
            with self._going_on(tree):
                rows = self._decoder.decode(self._batch(tree, again))
            self.history.append(tree.tokens[0])
        except BaseException:
            self._guessed = self._plain_row = None
            self._empty_branches()  # of a pass that did not begin
            del self.history[self._decoder.rewind(self._sequence, len(self.history)) :]
            self._holds_guesses = False
            raise
        wait_s, read_s, read_bytes = self._counters()
        seen = wait_s - before[0], read_s - before[1], read_bytes - before[2]
        wall_s = self._clock() - started
        if again and self._plain_row is not None:
            self._tally.differed(float(np.abs(rows[0] - self._plain_row).max()))
            rows = rows[1:]
        if not any(overlap.was_trial for overlap in self._overlaps):  # such a pass says nothing of those to come
            self._control.observe_pass(len(tree) + again, wall_s, *seen)
        if len(tree) > 1:
            for overlap in self._overlaps:
                overlap.note(self._guessed_s, wall_s, seen[0], len(tree) + again)
        self._tally.passed(len(tree), wall_s, self._control.plain_s() or 0.0)
        return rows

    @contextmanager
    def _going_on(self, tree: DraftTree) -> Iterator[None]:
        """Let drafters that can go on along the tree's main line while the block runs."""
        line = [*self.history, *tree.tokens[: tree.main_length]]
        with ExitStack() as stack:
            for overlap in self._overlaps if len(tree) > 1 else ():
                stack.enter_context(overlap.going_on(line))
            yield

    def _batch(self, tree: DraftTree, again: bool) -> list[BatchToken]:
        start = len(self.history)
        batch = tree.batch(start, self._names())
        used = batch[0].branches
        if used:
            self._decoder.branch(self._sequence, used)
        if again:
            batch.insert(0, BatchToken(self.history[-1], start - 1, self._sequence, True, used))
        return batch
