"""Residency under every order of events: frames are conserved, what is held stays, and nothing is read in vain.

The machine plays the part of `Weights`: it keeps a list of reads under way, a picture of memory (which frame is under
which chunk, and whether the chunk's bytes are in it), and a consumer that walks over a pass segment by segment. Reads
end in any order, well or badly; the consumer may give up anywhere and start a new pass, or ask for chunks that no pass
was expected to use.
"""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from edge_run.tiers.chunk_states import ChunkState, Load
from edge_run.tiers.residency import Residency
from frames_model import Memory

Segments = list[tuple[int, ...]]
MAX_CHUNKS = 14


@st.composite
def passes(draw: st.DrawFn, max_chunks: int = MAX_CHUNKS) -> tuple[int, Segments]:
    """A number of chunks and the segments of a pass over some of them; chunks may recur, nearby and far apart."""
    n_chunks = draw(st.integers(1, max_chunks))
    segment = st.lists(st.integers(0, n_chunks - 1), max_size=4, unique=True).map(tuple)
    return n_chunks, draw(st.lists(segment, min_size=1, max_size=10))


def acquired(segments: Segments, i: int) -> tuple[int, ...]:
    """What segment `i` asks for: all it needs that the one before did not hold, as `schedule_pass` says."""
    return tuple(c for c in segments[i] if i == 0 or c not in segments[i - 1])


def released(segments: Segments, i: int) -> tuple[int, ...]:
    """What segment `i` gives back: all but what the next one needs."""
    return tuple(c for c in segments[i] if i + 1 == len(segments) or c not in segments[i + 1])


def order_of(segments: Segments) -> list[int]:
    return [chunk for i in range(len(segments)) for chunk in acquired(segments, i)]


class ResidencyMachine(RuleBasedStateMachine):
    """One consumer, any number of reads, in any order."""

    @initialize(shape=passes(), data=st.data())
    def begin(self, shape: tuple[int, Segments], data: st.DataObject) -> None:
        n_chunks, self.segments = shape
        pinned = data.draw(st.frozensets(st.integers(0, n_chunks - 1)), "pinned")
        self.movable = [chunk for chunk in range(n_chunks) if chunk not in pinned]
        largest = max(sum(c not in pinned for c in segment) for segment in self.segments)
        n_frames = data.draw(st.integers(largest, max(largest, len(self.movable))), "frames")
        self.n_frames = n_frames
        most_early = data.draw(st.integers(0, 8), "early")
        self.residency = Residency(n_chunks, order_of(self.segments), pinned, n_frames, most_early)
        self.memory = Memory(pinned, n_frames)
        self.n_chunks = n_chunks
        self.held: set[int] = set()
        self.asked: tuple[int, ...] = ()
        self.position = 0
        self.lent: frozenset[int] = frozenset()

    # Between passes

    @precondition(lambda self: not self.asked and not self.held and not self.lent)
    @rule(data=st.data())
    def pin_more(self, data: st.DataObject) -> None:
        """Chunks that stream get memory of their own; a frame that is under one of them already is theirs."""
        self.lent = data.draw(st.frozensets(st.sampled_from(self.movable)) if self.movable else st.just(frozenset()))
        for chunk in self.lent:
            self.memory.frame_under.pop(chunk, None)
        self.memory.pinned |= self.lent
        self._start(self.residency.pin(self.lent))

    @precondition(lambda self: not self.asked and not self.held and not self.residency.is_loading(self.lent))
    @rule()
    def unpin(self) -> None:
        self.residency.unpin(self.lent)
        self.memory.pinned -= self.lent
        self.memory.readable -= self.lent
        self.lent = frozenset()

    # The consumer

    @precondition(lambda self: not self.asked)
    @rule()
    def take_next_segment(self) -> None:
        """Give back what the last segment does not share with the next, then ask for what is new."""
        self._release(released(self.segments, self.position - 1) if self.position > 0 else tuple(self.held))
        if self.position == len(self.segments):
            self.position = 0
            return
        self._acquire(acquired(self.segments, self.position))
        self.position += 1

    @precondition(lambda self: not self.asked and not self.held)
    @rule(data=st.data())
    def ask_for_the_unexpected(self, data: st.DataObject) -> None:
        """A node of an unknown graph: any chunks, in any order, the same one twice too."""
        some = st.lists(st.integers(0, self.n_chunks - 1), max_size=6)
        few_enough = some.filter(lambda chunks: len(set(chunks) & set(self.movable)) <= self.n_frames)
        self._acquire(tuple(data.draw(few_enough, "chunks")))
        self.position = 0

    @precondition(lambda self: self.held or self.asked)
    @rule()
    def give_up(self) -> None:
        """The pass is cancelled: Weights releases what it asked for, the feature what it holds."""
        self._release(self.asked)
        self.asked = ()
        self._release(tuple(self.held))
        self.position = 0

    def _acquire(self, chunks: tuple[int, ...]) -> None:
        self.asked = chunks
        self._start(self.residency.acquire(chunks))
        self._note_arrival()

    def _release(self, chunks: tuple[int, ...]) -> None:
        self.held.difference_update(chunks)
        self._start(self.residency.release(chunks))

    def _start(self, loads: Sequence[Load]) -> None:
        self.memory.start(loads, self.held)

    def _note_arrival(self) -> None:
        if not self.residency.is_waiting:
            self.held.update(self.asked)
            self.asked = ()

    # The readers

    @rule()
    def pump(self) -> None:
        self._start(self.residency.pump())

    @precondition(lambda self: self.memory.loading)
    @rule(data=st.data())
    def a_read_ends(self, data: st.DataObject) -> None:
        load = data.draw(st.sampled_from(self.memory.loading), "load")
        self.memory.end(load)
        self._start(self.residency.loaded(load.chunk))
        self._note_arrival()

    @precondition(lambda self: self.memory.loading)
    @rule(data=st.data(), has_frame=st.booleans(), is_retried=st.booleans())
    def a_read_fails(self, data: st.DataObject, has_frame: bool, is_retried: bool) -> None:
        """The frame stays under the chunk, or its move failed too; who waits gives up, or has it read again."""
        load = data.draw(st.sampled_from(self.memory.loading), "load")
        self.memory.fail(load, has_frame)
        is_awaited, loads = self.residency.failed(load.chunk, has_frame)
        assert is_awaited == (load.chunk in self.asked)
        self._start(loads)
        if is_awaited and is_retried:
            self._start(self.residency.retry(load.chunk))
        elif is_awaited:
            self.give_up()

    @invariant()
    def no_state_contradicts_another(self) -> None:
        self.residency.check()

    @invariant()
    def what_is_held_is_readable(self) -> None:
        assert self.held <= self.memory.readable

    @invariant()
    def memory_is_as_the_states_say(self) -> None:
        resident = {ChunkState.FRESH, ChunkState.HELD, ChunkState.SPENT, ChunkState.PINNED}
        assert self.memory.readable == {c for c in range(self.n_chunks) if self.residency.state(c) in resident}

    @invariant()
    def waiting_ends(self) -> None:
        """Whoever waits, waits for a read that is under way: a wait without one would never end."""
        assert not self.residency.is_waiting or self.memory.loading
        assert not self.residency.is_stuck

    def teardown(self) -> None:
        """Let all reads end well: what was asked for must then be there."""
        if not hasattr(self, "memory"):
            return
        while self.memory.loading:
            load = self.memory.loading.pop(0)
            self.memory.readable.add(load.chunk)
            self._start(self.residency.loaded(load.chunk))
            self._note_arrival()
        assert not self.asked
        assert self.held <= self.memory.readable


ResidencyMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestResidency = ResidencyMachine.TestCase
