"""A share of a model while this device computes it: its programs, and the memory lent to its weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from edge_run.runtime.decoding.driver import ONE_TOKEN, Driver, PassShape, Program, compile_program
from edge_run.runtime.engine.supply import Supply
from edge_run.runtime.slices.maps import SliceMaps
from edge_run.runtime.slices.slice import Share, Slice, Transport, own_part
from edge_run.runtime.streaming.lent_residency import LentResidency
from edge_run.runtime.streaming.weights import StageVisits, WeightStreaming


class Assignment:
    """Makes the driver compute `share`, with the weights of `supply`.

    lent_residency: lends memory to the weights that stream; None where none is lent.
    """

    def __init__(
        self,
        share: Share,
        transport: Transport,
        maps: SliceMaps,
        supply: Supply,
        driver: Driver,
        lent_residency: LentResidency | None,
    ) -> None:
        self.share, self._transport, self._maps, self._supply, self._driver = share, transport, maps, supply, driver
        self._tail_programs: dict[PassShape, Program] = {}
        self.lent_residency = lent_residency
        if lent_residency:
            lent_residency.on_end = self._compile_all
        driver.features[:] = supply.streams
        driver.before_pass = self._before_pass
        self._compile_all()

    def compile(self, shape: PassShape, like: PassShape | None = None) -> None:
        """Compile the program of `shape`, from its own graph or from that of the shape `like`."""
        graph, layout = self._maps[like or shape]
        is_lent = shape.tokens == 1 and not (self.lent_residency and self.lent_residency.has_ended)
        streams = self._supply.streams
        features = [StageVisits(one) if is_lent and isinstance(one, WeightStreaming) else one for one in streams]

        def program(share: Share) -> Program:
            return compile_program(own_part(graph, layout, share), [Slice(share, self._transport, layout), *features])

        self._driver.programs[shape] = program(self.share.body)
        if self.share.tail:
            self._tail_programs[shape] = program(self.share.tail)

    @contextlib.contextmanager
    def computing_tail(self) -> Iterator[None]:
        """Have passes in this block compute the tail, and nothing else."""
        driver, programs = self._driver, self._driver.programs
        driver.programs = self._tail_programs
        try:
            yield
        finally:
            driver.programs = programs

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

    def _before_pass(self, shape: PassShape) -> None:
        if self.lent_residency:
            self.lent_residency.before_pass(shape.tokens)
