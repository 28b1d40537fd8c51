"""Residency under every order of events: frames are conserved, what is held stays, and nothing is read in vain.

The machine plays the part of `Weights`: it keeps a list of reads under way, a picture of memory (which frame is under
which chunk, and whether the chunk's bytes are in it), and a consumer that walks over a pass segment by segment. Reads
end in any order, well or badly; the consumer may give up anywhere and start a new pass, or ask for chunks that no pass
was expected to use.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from edge_run.partition.plan import plan_residency
from edge_run.partition.window import frames_needed
from edge_run.prefetch.schedule import Segment, join_stage_visits, schedule_pass
from edge_run.tiers.chunk_states import ChunkState, Load
from edge_run.tiers.residency import Residency
from frames_drive import Drive
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


@st.composite
def schedules(draw: st.DrawFn) -> tuple[int, list[Segment]]:
    """A pass as models have it: mostly in file order, boundary chunks shared, some met again, layers reused."""
    random_source = random.Random(draw(st.integers(0, 2**32)))
    n_chunks = draw(st.integers(2, 120))
    needs: list[set[int]] = []
    start = 0
    while start < n_chunks:
        stop = min(n_chunks, start + random_source.randint(1, 6))
        first = start - 1 if start and random_source.random() < 0.5 else start
        node = set(range(first, stop))
        if start and random_source.random() < 0.15:
            node.add(random_source.randrange(start))
        needs.append(node)
        start = stop
    if random_source.random() < 0.2:
        needs += needs[: random_source.randint(1, len(needs))]
    return n_chunks, schedule_pass(needs, [random_source.random() < 0.8 for _ in needs])


@pytest.mark.parametrize("eagerness", [[0], [10**6], [0, 3, 1, 10**6]], ids=["slow disk", "fast disk", "uneven disk"])
@given(model=schedules(), share=st.floats(0, 1), is_ragged=st.booleans())
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
def test_a_steady_cycle_reads_no_chunk_in_vain(
    eagerness: list[int], model: tuple[int, list[Segment]], share: float, is_ragged: bool
) -> None:
    """Under any plan: no deadlock, no more reads in a pass than the plan says, and no chunk leaves unused."""
    n_chunks, schedule = model
    must_pin = frozenset(range(0, n_chunks, 30)) if is_ragged else frozenset()
    largest = frames_needed([segment.needs for segment in schedule], set(range(n_chunks)) - must_pin)
    available = len(must_pin) + largest + int(share * n_chunks)
    plan = plan_residency([segment.needs for segment in schedule], must_pin, 1, available, 0)
    drive = Drive(n_chunks, schedule, plan.pinned, plan.n_frames)
    drive.run_pass(eagerness)
    drive.run_pass(eagerness)
    n_passes = 6
    reads = [drive.run_pass(eagerness) for _ in range(n_passes)]
    # Reads ahead may fall into one pass or the next: what counts is their sum, give or take the window once.
    assert sum(n for n, _ in reads) <= n_passes * plan.streamed_uses + plan.n_frames
    assert sum(n for _, n in reads) == 0


def test_a_chunk_met_twice_in_the_window_stays() -> None:
    """Its frame was given away, then a chunk read ahead was thrown out to read it again, and so on round the cycle."""
    schedule = schedule_pass([{0}, {1}, {0, 2}, {3}, {4}, {5}], [True] * 6, segment_chunks=1)
    drive = Drive(6, schedule, (), 4)
    passes_run = [drive.run_pass([10**6]) for _ in range(4)]
    assert sum(n_in_vain for _, n_in_vain in passes_run) == 0
    assert sum(n_reads for n_reads, _ in passes_run) <= 4 * 7 + 4


def test_what_streams_of_a_stage_visit_is_all_read_before_it() -> None:
    """Its last segment uses a chunk again: taken for wanted once more, that one kept its frame, and a read was late."""
    visits = join_stage_visits(schedule_pass([{0}, {1}, {2, 3}, {0}, {4}, {5}, {6, 7}, {4}], [True] * 8, 1, [4]), [4])
    assert [visit.acquire for visit in visits] == [(0, 1, 2, 3, 0), (4, 5, 6, 7, 4)]
    drive = Drive(8, visits, (), 4)
    drive.run_pass([0])
    for visit in visits * 2:
        while drive.queue:
            drive._end_a_read()
        assert drive.residency.acquire(visit.acquire) == []
        drive._queue(drive.residency.release(visit.release))


def test_after_failed_reads_each_chunk_gets_its_own_frame_back() -> None:
    """The frame of a failed read is still under its chunk: another one moved there would be under it twice."""
    residency = Residency(2, [0, 1], (), 2)
    for load in residency.pump():
        residency.failed(load.chunk)
    assert [(load.chunk, load.source) for load in residency.acquire([0, 1])] == [(0, 0), (1, 1)]


def test_a_read_ahead_that_fails_gives_its_frame_to_who_waits() -> None:
    """The only frame is being filled ahead of need; when that fails, nothing else would start the needed read."""
    residency = Residency(2, [0, 1], (), 1)
    assert [load.chunk for load in residency.pump()] == [0]
    assert residency.acquire([1]) == []
    is_awaited, loads = residency.failed(0)
    assert not is_awaited
    assert loads == [Load(1, 0, is_urgent=True)]


def test_the_same_chunk_asked_for_twice_at_once_is_read_once() -> None:
    """Two weights of one node may lie in one chunk: a second read of it would cost a frame for good."""
    residency = Residency(2, [0, 1], (), 2)
    assert [load.chunk for load in residency.acquire([0, 0])] == [0]
    residency.loaded(0)
    residency.check()
    assert not residency.is_waiting


def test_a_spent_chunk_that_is_next_is_revived_and_not_read() -> None:
    """With a frame to spare at the end of a pass, its last chunk, used again first in the next pass, stays."""
    residency = Residency(3, [0, 1, 2, 0], (), 3)
    for chunk in (0, 1, 2):
        residency.acquire([chunk])
        for _ in range(3):
            if residency.state(chunk) is ChunkState.LOADING:
                residency.loaded(chunk)
        residency.release([chunk])
    assert residency.state(0) is ChunkState.FRESH


def loaded(residency: Residency, *chunks: int) -> None:
    for chunk in chunks:
        residency.loaded(chunk)


def test_the_frame_that_goes_is_the_one_used_last() -> None:
    """In a cycle of three with two frames, the chunk used first comes next: the frame of the other one serves."""
    residency = Residency(3, [0, 1, 2], (), 2)
    loaded(residency, *(load.chunk for load in residency.acquire([0, 1])))
    assert [(load.chunk, load.source) for load in residency.release([0, 1])] == [(2, 1)]
    assert residency.state(0) is ChunkState.FRESH


def test_passes_over_chunks_that_all_have_frames_leave_nothing_behind() -> None:
    residency = Residency(3, [0, 1, 2], (), 3)
    loaded(residency, *(load.chunk for load in residency.pump()))
    for chunk in (0, 1, 2) * 20:
        assert residency.acquire([chunk]) == residency.release([chunk]) == []
    assert len(residency._spent) <= 3


def test_of_the_chunks_read_ahead_the_last_gives_way_and_is_read_again_in_its_turn() -> None:
    residency = Residency(5, [0, 1, 2], (), 2)
    loaded(residency, *(load.chunk for load in residency.pump()))
    assert [(load.chunk, load.source) for load in residency.acquire([4])] == [(4, 1)]
    loaded(residency, 4)
    assert [(load.chunk, load.source) for load in residency.release([4])] == [(1, 4)]


def test_a_chunk_that_no_pass_was_expected_to_use_keeps_no_frame() -> None:
    """Asked for and given up before it came: its frame serves the schedule, as if it had been used."""
    residency = Residency(3, [0, 1], (), 2)
    residency.acquire([2])
    residency.pump()
    residency.release([2])
    loaded(residency, 2, 0)
    assert [(load.chunk, load.source) for load in residency.pump()] == [(1, 2)]


def test_no_read_ahead_starts_what_someone_waits_for_a_second_time() -> None:
    """Chunk 1 waits behind chunk 0 for its read to start; reading it ahead as well would read it twice."""
    residency = Residency(3, [2, 1], (1,), 1)
    residency.pump()
    residency.failed(1)
    assert residency.acquire([0, 1]) == []
    assert residency.pump() == []
    assert [load.chunk for load in residency.loaded(2)] == [0, 1]


def test_too_few_frames_are_noticed_and_what_was_held_stays_held() -> None:
    residency = Residency(3, [0, 1, 2], (), 2)
    for load in residency.acquire([0, 1]):
        residency.loaded(load.chunk)
    assert not residency.is_stuck
    assert residency.acquire([2]) == []
    assert residency.is_stuck, "nobody will ever bring chunk 2"
    residency.release([2])
    assert not residency.is_stuck
    residency.check()
    assert {residency.state(chunk) for chunk in (0, 1)} == {ChunkState.HELD}


def test_while_nothing_else_is_read_pinned_chunks_come_before_their_turn() -> None:
    """As after opening: the one frame is full, and no pass has begun."""
    residency = Residency(8, range(8), (2, 4, 5, 6, 7), 1, most_early=2)
    reads = [load.chunk for load in residency.pump()]
    assert reads == [0], "and nothing beside it"
    for chunk in (0, 2, 4, 5, 6, 7):
        assert reads.pop(0) == chunk
        reads += [load.chunk for load in residency.loaded(chunk)]
        residency.check()
    assert reads == []
    assert not residency.acquire([0])
    residency.release([0])
    assert {chunk for chunk in range(8) if residency.state(chunk) == ChunkState.PINNED} == {2, 4, 5, 6, 7}


def test_a_chunk_whose_early_read_failed_is_read_in_its_turn() -> None:
    residency = Residency(4, range(4), (2, 3), 1, most_early=1)
    assert [load.chunk for load in residency.pump()] == [0]
    assert [load.chunk for load in residency.loaded(0)] == [2]
    assert residency.failed(2) == (False, [])
    residency.check()
    assert [load.chunk for load in residency.pump()] == [3], "it is not tried again before that"
    residency.loaded(3)
    residency.acquire([0])
    assert [load.chunk for load in residency.release([0])] == [1, 2]


def test_who_waits_is_not_held_up_by_early_reads() -> None:
    residency = Residency(6, range(6), (2, 3, 4, 5), 2, most_early=4)
    residency.acquire([0, 1])
    assert not residency.loaded(0), "somebody waits for another"
    assert [load.chunk for load in residency.loaded(1)] == [2, 3, 4, 5]
