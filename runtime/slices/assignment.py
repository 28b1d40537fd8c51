"""A share of a model while this device computes it: its programs, and the memory lent to its weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from edge_run.runtime.decoding.driver import ONE_TOKEN, Driver, PassShape, Program, compile_program
from edge_run.runtime.engine.supply import Supply
from edge_run.runtime.graph.cell_uses import with_cells
from edge_run.runtime.slices.maps import SliceMaps
from edge_run.runtime.slices.slice import Share, Slice, Transport, own_part
from edge_run.runtime.streaming.lent_residency import LentResidency
from edge_run.runtime.streaming.spilled_cells import SpilledCells
from edge_run.runtime.streaming.weights import StageVisits, WeightStreaming


class Assignment:
    """Makes the driver compute `share`, with the weights of `supply`.

    lent_residency: lends memory to the weights that stream; None where none is lent. spilled: brings keys and values
    that are in a file.
    """

    def __init__(
        self,
        share: Share,
        transport: Transport,
        maps: SliceMaps,
        supply: Supply,
        driver: Driver,
        lent_residency: LentResidency | None,
        spilled: SpilledCells | None = None,
    ) -> None:
        self.share, self._transport, self._maps, self._supply, self._driver = share, transport, maps, supply, driver
        self._programs, self._tail_programs = driver.programs, dict[PassShape, Program]()
        self.lent_residency, self._spilled = lent_residency, spilled
        self._weights = [one for one in supply.streams if isinstance(one, WeightStreaming)]
        self._by_visits = self._visiting()
        driver.features[:] = [*supply.streams, *self._bringing]
        driver.before_pass = self._before_pass
        self._compile_all()

    def compile(self, shape: PassShape, like: PassShape | None = None) -> None:
        """Compile the program of `shape`, from its own graph or from that of the shape `like`."""
        graph, layout = self._maps[like or shape]
        if self._spilled:
            graph = with_cells(graph, layout.flow, self._spilled.addresses)
        by_visits = self._by_visits if shape.tokens == 1 else []
        features = [StageVisits(one) if one in by_visits else one for one in self._supply.streams]

        def program(share: Share) -> Program:
            slice_ = Slice(share, self._transport, layout)
            return compile_program(own_part(graph, layout, share), [slice_, *features, *self._bringing])

        self._programs[shape] = program(self.share.body)
        if self.share.tail:
            self._tail_programs[shape] = program(self.share.tail)

    @property
    def _bringing(self) -> list[SpilledCells]:
        return [self._spilled] if self._spilled else []

    @contextlib.contextmanager
    def computing_tail(self) -> Iterator[None]:
        """Have passes in this block compute the tail, and nothing else."""
        self._driver.programs = self._tail_programs
        try:
            yield
        finally:
            self._driver.programs = self._programs

    def end(self) -> None:
        """Make the driver compute nothing."""
        self._driver.features.clear()
        self._driver.programs.clear()
        self._driver.before_pass = lambda shape: None

    def _compile_all(self) -> None:
        for shape in self._maps:
            self.compile(shape)
        batch = PassShape(2, 1)
        if batch not in self._maps:  # unknown shapes of several tokens are guessed from it: they hold no stage visits
            self.compile(batch, like=ONE_TOKEN)

    def _visiting(self) -> list[WeightStreaming]:
        """Return which weights are held by stage visits in passes of one token."""
        return [one for one in self._weights if one.may_hold_stage_visits]

    def _before_pass(self, shape: PassShape) -> None:
        if self.lent_residency:
            self.lent_residency.before_pass(shape.tokens, shape.outputs)
        if shape.tokens == 1 and (visiting := self._visiting()) != self._by_visits:
            self._by_visits = visiting
            self._compile_all()
