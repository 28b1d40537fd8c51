"""OnDemand under every order of events: frames are conserved, what is held stays, and nothing is read in vain.

The machine plays the part of `Weights` and of those who hold chunks: a pass that waits for what it acquires, and caches
that hold what they will want without waiting. Chunks are held more than once; reads end in any order, well or badly.
Chunks at the ends may stick out of their mapping: they have memory of their own, and no frame moves to or from them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from edge_run.tiers.chunk_states import ChunkState, Load
from edge_run.tiers.on_demand import OnDemand
from frames_model import Memory

MAX_CHUNKS = 12


class OnDemandMachine(RuleBasedStateMachine):
    """Any number of holders and reads, in any order; never more is held than there are frames."""

    @initialize(n_chunks=st.integers(1, MAX_CHUNKS), data=st.data())
    def begin(self, n_chunks: int, data: st.DataObject) -> None:
        self.n_chunks, self.n_frames = n_chunks, data.draw(st.integers(1, n_chunks), "frames")
        self.fixed = frozenset(data.draw(st.sets(st.sampled_from((0, n_chunks - 1))), "ragged"))
        self.states = OnDemand(n_chunks, self.n_frames, self.fixed)
        self.memory = Memory(self.fixed, self.n_frames)
        self.holders: Counter[int] = Counter()
        self.asked: tuple[int, ...] = ()

    def _some(self, data: st.DataObject) -> tuple[int, ...]:
        """Chunks that there is room for, the same one perhaps twice."""
        drawn = data.draw(st.lists(st.integers(0, self.n_chunks - 1), max_size=5), "chunks")
        kept: list[int] = []
        for chunk in drawn:
            if len({*+self.holders, *kept, chunk} - self.fixed) <= self.n_frames:
                kept.append(chunk)
        return tuple(kept)

    @precondition(lambda self: not self.asked)
    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        self.asked = self._some(data)
        self.holders.update(self.asked)
        self._start(self.states.acquire(self.asked))
        self._note_arrival()

    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        chunks = self._some(data)
        self.holders.update(chunks)
        self._start(self.states.hold(chunks))

    @precondition(lambda self: +self.holders and not self.asked)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        chunks = data.draw(st.lists(st.sampled_from(sorted(+self.holders)), max_size=4, unique=True), "chunks")
        self._release(tuple(chunks))

    @precondition(lambda self: self.asked)
    @rule()
    def give_up(self) -> None:
        asked, self.asked = self.asked, ()
        self._release(asked)

    @precondition(lambda self: self.memory.loading)
    @rule(data=st.data())
    def a_read_ends(self, data: st.DataObject) -> None:
        self._end(data.draw(st.sampled_from(self.memory.loading), "load"))

    @precondition(lambda self: self.memory.loading)
    @rule(data=st.data(), has_frame=st.booleans(), is_retried=st.booleans())
    def a_read_fails(self, data: st.DataObject, has_frame: bool, is_retried: bool) -> None:
        """Who waits for it gives up, or has it read again; who only holds it still does, and finds it absent."""
        load = data.draw(st.sampled_from(self.memory.loading), "load")
        self.memory.fail(load, has_frame)
        is_awaited, loads = self.states.failed(load.chunk, has_frame)
        self._start(loads)
        if is_awaited and is_retried:
            self._start(self.states.retry(load.chunk))
        elif is_awaited:
            assert load.chunk in self.asked
            self.give_up()

    @rule(n_frames=st.integers(1, 4))
    def more_frames(self, n_frames: int) -> None:
        self.n_frames += n_frames
        self.memory.grow(n_frames)
        self._start(self.states.grow(n_frames))

    @precondition(lambda self: self.n_frames > len({*+self.holders} - self.fixed))
    @rule(data=st.data())
    def fewer_frames(self, data: st.DataObject) -> None:
        """Only frames whose chunks nobody holds can go; reads on their way keep theirs."""
        spare = self.n_frames - len({*+self.holders} - self.fixed)
        n_frames = data.draw(st.integers(1, spare), "frames")
        n_gone, chunks = self.states.shrink(n_frames)
        assert len(chunks) <= n_gone <= n_frames
        assert self.fixed.isdisjoint(chunks)
        assert not any(self.holders[chunk] > 0 and chunk in self.memory.readable for chunk in chunks)
        self.n_frames -= n_gone
        self.memory.shrink(n_gone, chunks)

    def _release(self, chunks: tuple[int, ...]) -> None:
        self.holders.subtract(chunks)
        self._start(self.states.release(chunks))

    def _end(self, load: Load) -> None:
        self.memory.end(load)
        self._start(self.states.loaded(load.chunk))
        self._note_arrival()

    def _start(self, loads: Sequence[Load]) -> None:
        self.memory.start(loads, set(+self.holders) & self.memory.readable)

    def _note_arrival(self) -> None:
        if not self.states.is_waiting:
            assert set(self.asked) <= self.memory.readable
            self.asked = ()

    @invariant()
    def no_state_contradicts_another(self) -> None:
        if hasattr(self, "states"):
            self.states.check()

    @invariant()
    def memory_is_as_the_states_say(self) -> None:
        if hasattr(self, "states"):
            resident = {ChunkState.HELD, ChunkState.SPENT}
            assert self.memory.readable == {c for c in range(self.n_chunks) if self.states.state(c) in resident}

    @invariant()
    def waiting_ends(self) -> None:
        """Whoever waits, waits for a read that is under way: there are frames for all that is held."""
        if hasattr(self, "states"):
            assert not self.states.is_waiting or self.memory.loading
            assert not self.states.is_stuck

    def teardown(self) -> None:
        """Let all reads end well: what was asked for must then be there."""
        if hasattr(self, "memory"):
            while self.memory.loading:
                self._end(self.memory.loading[0])
            assert not self.asked


OnDemandMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestOnDemand = OnDemandMachine.TestCase


def test_frames_of_chunks_in_a_row_go_to_others_in_the_same_order() -> None:
    """So they can be moved together."""
    state = OnDemand(20, 8)
    for load in state.acquire(range(8)):
        state.loaded(load.chunk)
    state.release(range(8))
    assert [(load.chunk, load.source) for load in state.acquire(range(12, 16))] == [(12 + i, i) for i in range(4)]
