"""A tree of guesses, held against the tokens that are chosen one after the other."""

from __future__ import annotations

from typing import cast

import numpy as np

from edge_run.base.protocols import Logits
from edge_run.runtime.speculation.drafting import Acceptance, DraftTree, Kind
from edge_run.runtime.speculation.tally import SpeculationTally

FORESEEN: Kind = ("foreseen", 0, 0)
"""Of what the model's own logits say best: that it comes true says nothing of a drafter, and hangs on the sampling."""


class Verification:
    """Where a text has come to in a tree of guesses of how it goes on.

    tree: the tree.
    rows: the logits after each node, `(n_nodes, vocabulary)`; None where no pass computed them.
    node: the one that the text has come to.
    """

    def __init__(self, tree: DraftTree, rows: Logits | None = None) -> None:
        self.tree, self.rows, self.node = tree, rows, 0

    @property
    def row(self) -> Logits:
        """The logits by which the next token is chosen, `(vocabulary,)`."""
        return np.asarray(cast("Logits", self.rows)[self.node])

    @property
    def n_followed(self) -> int:
        """How many guesses the text has followed."""
        return self.tree.depths[self.node]

    @property
    def is_in_order(self) -> bool:
        """Whether what the text has come to lies in the cache in the order of the text."""
        return self.node < self.tree.main_length

    def follows(self, token: int, acceptance: Acceptance, tally: SpeculationTally) -> bool:
        """Note that `token` comes next; return whether it was guessed."""
        children = self.tree.children[self.node]
        for guessed, child in children.items():
            guess = self.tree.guesses[child]
            if guess is not None:
                acceptance.observe(guess, guessed == token)
                if self.rows is not None and guess.kind != FORESEEN:
                    tally.guessed(self.tree.depths[child], guessed == token)
        self.node = children.get(token, self.node)
        return token in children
