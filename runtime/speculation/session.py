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

import copy
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from edge_run.base.protocols import BatchToken, Clock, Decoder, Logits
from edge_run.base.results import Speculation
from edge_run.runtime.decoding.session import Session
from edge_run.runtime.speculation.drafting import DraftTree, plan_tree
from edge_run.runtime.speculation.shared_drafters import OpenText
from edge_run.runtime.speculation.shared_guesses import SharedGuesses, SharedTree
from edge_run.runtime.speculation.verification import Verification

_TEXT = 0  # the number of the conversation


class SpeculativeSession(Session):
    """A `Session` on sequence 0 that guesses tokens and verifies them. Not thread-safe.

    decoder: verifies the guesses.
    guesses: of what follows this conversation, which is the only one they are of.
    is_exact: whether logits do not depend on the width of a pass, to the bit.
    counters: returns the seconds that passes waited for weights so far, the seconds with a read in flight, and the
        bytes read.
    """

    def __init__(
        self,
        decoder: Decoder,
        guesses: SharedGuesses,
        *,
        is_exact: bool = False,
        counters: Callable[[], tuple[float, float, int]] = lambda: (0.0, 0.0, 0),
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(decoder)
        self._guesses, self._branches, self._is_exact = guesses, guesses.branches, is_exact
        self._counters, self._clock = counters, clock
        self._compares_widths = bool(self._branches) and not is_exact
        self._found: Verification | None = None  # what the latest pass computed
        self._found_at = 0  # the place of its first token
        self._holds_guesses = False  # the decoder, beside the conversation
        self._plain_row: Logits | None = None  # after the last token, where its pass had no other
        guesses.begin(_TEXT)

    def feed(self, prompt: Sequence[int]) -> tuple[Logits, int]:
        """Make the conversation be `prompt`; see `Session.feed`. The figures begin anew."""
        self._settle(goes_on=False)
        self._found = self._plain_row = None
        self._guesses.begin(_TEXT)
        return super().feed(prompt)

    def forget(self) -> None:
        """Leave the conversation, and what was guessed of it."""
        self._empty_branches()
        super().forget()
        self._found = self._plain_row = None
        self._holds_guesses = False

    def finish(self) -> None:
        """The answer is complete: what is kept of it has no guesses that did not come true."""
        if self.keeper is not None:
            self._settle()
        super().finish()

    def step(self, token: int, n_more: int | None = None) -> Logits:
        """Append one token; see `Session.step`. The logits are there without a pass where a guess came true."""
        found, foreseen = self._found, list[int]()
        if found is not None:
            if self._guesses.follows(_TEXT, found, token, wants_order=self._is_exact):
                self.history.append(token)
                return found.row
            if self._is_exact and not found.is_in_order:
                foreseen = _foreseen(found)
                found.node = found.tree.parents[found.node]
        return self._verify(token, foreseen, n_more)

    def speculation(self) -> Speculation:
        """Return the figures since the last prompt."""
        return self._guesses.figures_of(_TEXT)

    def _settle(self, *, goes_on: bool = True) -> None:
        """Let the decoder hold the conversation and nothing else; what it lost of that is computed again.

        goes_on: else another conversation comes, and is read from where this one is lost.
        """
        if not self._holds_guesses:
            return
        found = self._found
        if found is None:  # Ctrl-C came between the pass and what is made of it
            self._empty_branches()
        elif self._branches:
            branch = found.tree.sequences()[found.node][0]
            self._decoder.keep(self._sequence, self._found_at, self._names()[branch], self._branches)
        kept = self._decoder.rewind(self._sequence, len(self.history))
        self._found, self._holds_guesses = None, False  # last: what is ended before is done again
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

    def _verify(self, token: int, foreseen: Sequence[int], n_more: int | None) -> Logits:
        """Append `token` with a pass over it and guesses of what follows, of which the first are those of `foreseen`.

        n_more: see `step`.
        """
        self._settle()
        able = self._decoder.capabilities
        room = min(able.most_guesses(len(self.history)), able.outputs_per_pass - 1, able.micro_batch_tokens - 1)
        depth = max(0, room if n_more is None else min(room, n_more))
        coming = tuple(foreseen[:depth])
        text = OpenText([*self.history, token], self._sequence, depth, salt=None, foreseen=coming)
        n_beside = int(self._compares_widths and self._plain_row is not None)
        trees = self._guesses.plan({_TEXT: text}, room, n_beside)
        tree = trees[_TEXT].tree if trees else plan_tree(token, {})
        rows = self._run(tree, trees)
        self._found, self._plain_row = Verification(tree, rows), None if trees else rows[0].copy()
        return np.asarray(rows[0])

    def _run(self, tree: DraftTree, trees: Mapping[int, SharedTree]) -> Logits:
        """Append the first token of `tree` with a pass over all of it; return the logits after each node.

        trees: that one, where it has guesses. Where a token has a place beside them, that is the one before, which is
            computed again to see how far its logits depend on the width.
        """
        again = bool(trees and trees[_TEXT].n_beside)
        started, before = self._clock(), self._counters()
        self._holds_guesses, self._found_at = bool(trees), len(self.history)
        if again:
            self._decoder.rewind(self._sequence, len(self.history) - 1)
        try:
            with self._guesses.going_on():
                rows = self._decoder.decode(self._batch(tree, again=again))
            self.history.append(tree.tokens[0])
        except BaseException:
            self._found = self._plain_row = None
            self._empty_branches()  # of a pass that did not begin
            del self.history[self._decoder.rewind(self._sequence, len(self.history)) :]
            self._holds_guesses = False
            raise
        wait_s, read_s, read_bytes = self._counters()
        seen = wait_s - before[0], read_s - before[1], read_bytes - before[2]
        wall_s = self._clock() - started
        if again and self._plain_row is not None:
            self._guesses.differed(_TEXT, float(np.abs(rows[0] - self._plain_row).max()))
            rows = rows[1:]
        self._guesses.observe_pass(len(tree) + again, wall_s, *seen)
        self._guesses.passed(trees, [_TEXT], wall_s, seen[0], has_prompts=False)
        return rows

    def _batch(self, tree: DraftTree, *, again: bool) -> list[BatchToken]:
        start = len(self.history)
        batch = tree.batch(start, self._names())
        used = batch[0].branches
        if used:
            self._decoder.branch(self._sequence, used)
        if again:
            batch.insert(0, BatchToken(self.history[-1], start - 1, self._sequence, True, used))
        return batch


def _foreseen(found: Verification) -> list[int]:
    """Return what follows in the tree by its best logits, and what follows that."""
    tokens, ahead = list[int](), copy.copy(found)
    while True:
        tokens.append(int(ahead.row.argmax()))
        if (below := ahead.tree.children[ahead.node].get(tokens[-1])) is None:
            return tokens
        ahead.node = below
