"""Keys and values that are away in a file, as a feature of a pass: each attention has those of its layer in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from edge_run.base.errors import KernelError, option
from edge_run.base.results import KvSpill
from edge_run.runtime.decoding.driver import Step, Steps
from edge_run.runtime.graph.nodes import ATTENTION, WRITES_ROWS, GraphMap, Node
from edge_run.runtime.llama import _ggml as ggml
from edge_run.tiers.kv.key_bounds import Choice
from edge_run.tiers.kv.spill import Spill, Use


class RowChooser(Protocol):
    """Names the rows that an attention reads, where these are not all."""

    def choose(self, address: int) -> Choice | None:
        """Return which rows the attention at `address` is about to read; None: perhaps all."""
        ...

    def learn(self, address: int) -> None:
        """Those that `choose` named are in memory."""
        ...


class SpilledCells:
    """The feature that brings rows. attentions: as many as have theirs in memory at once, or on the way."""

    def __init__(self, spill: Spill, attentions: int) -> None:
        self.spill, self._attentions = spill, attentions
        self.chooser: RowChooser | None = None
        self._chosen_last: dict[Use, Choice | None] = {}  # which are likely chosen again

    @property
    def addresses(self) -> frozenset[int]:
        """Where the tensors are whose rows may be away."""
        return frozenset(self.spill.numbers)

    @property
    def wait_s(self) -> float:
        """How long passes waited for rows."""
        return self.spill.wait_s

    @property
    def figures(self) -> KvSpill:
        """What was written and read so far, and what is away now."""
        spill = self.spill
        return KvSpill(spill.file.written_bytes, spill.file.read_bytes, spill.away_bytes)

    def register(self, graph: GraphMap, steps: Steps) -> None:
        """Have rows in memory for each node that reads them, and read those of the nodes after it meanwhile."""
        reads = [(i, use) for i, node in enumerate(graph) if (use := self._read_by(node))]
        for number, (ordinal, use) in enumerate(reads):
            following = [reads[(number + 1 + k) % len(reads)][1] for k in range(self._attentions)]
            if self.chooser and graph[ordinal].op == ATTENTION:
                steps.stop_before(ordinal, self._choose_step(use))
            else:
                steps.add_before(ordinal, self._begin_step(use))
            steps.add_after(ordinal, self._end_step(following))
        for i, node in enumerate(graph):
            if node.op == WRITES_ROWS and node.cells:
                steps.add_before(i, self._check_rows)

    def before_unknown(self, node: Node, address: int) -> bool:
        """Bring the rows that `node` reads; stop after it then."""
        if node.op == WRITES_ROWS and node.cells:
            self._check_rows(address)
        use = self._read_by(node)
        if use:
            self.spill.begin(use)
        return bool(use)

    def after_unknown(self) -> None:
        """Let go of the rows."""
        self.spill.end()

    def abandon(self) -> None:
        """Let go of all rows."""
        self.spill.abandon()

    def _read_by(self, node: Node) -> Use:
        """Return the tensors that `node` reads, of those that may be away."""
        if node.op == WRITES_ROWS or not node.is_computed:
            return ()
        numbers = self.spill.numbers
        return tuple(numbers[address] for address in node.cells if address in numbers)

    def _begin_step(self, use: Use) -> Step:
        return lambda _: self.spill.begin(use)

    def _choose_step(self, use: Use) -> Step:
        def choose(address: int) -> None:
            assert self.chooser
            rows = self._chosen_last[use] = self.chooser.choose(address)
            self.spill.begin(use, rows)
            self.chooser.learn(address)

        return choose

    def _end_step(self, following: Sequence[Use]) -> Step:
        return lambda _: self.spill.end(following, self._chosen_last)

    def _check_rows(self, address: int) -> None:
        """Note whose rows the pass reads. Raise KernelError where it would write to rows that may be away."""
        written = ggml.rows_written(address)
        if written is None or not len(written[1]):
            return
        texts, rows = np.divmod(written[1], self.spill.text_cells(written[0]))
        taken = rows < np.array([states.n_rows for states in self.spill.texts])[texts]
        if taken.any():
            raise KernelError(
                f"llama.cpp puts a token into cell {written[1][taken][0]}, which has one; "
                f"{option('kv_spill', 'off')} does without; please report this model"
            )
        self.spill.read_of(range(int(texts.min()), int(texts.max()) + 1))  # llama.cpp takes all streams in between
