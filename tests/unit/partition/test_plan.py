"""Which chunks stay and which stream: never more than there is room for, and as little reading as that allows."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from edge_run.base.errors import BudgetError
from edge_run.base.units import GIB, MIB
from edge_run.partition.mesh_plan import DeviceSpec, MeshPlan, UnitWork, plan_mesh
from edge_run.partition.plan import (
    LOOKAHEAD_CHUNKS,
    LOOKAHEAD_SHARE,
    MOST_RUNS,
    SHARED_LOOKAHEAD_SHARE,
    ResidencyPlan,
    plan_residency,
    reads_beside,
    too_small,
)
from edge_run.partition.stage_visits import plan_stage_visits
from edge_run.partition.window import frames_needed
from edge_run.prefetch.schedule import Segment, schedule_pass
from edge_run.runtime.graph.nodes import Node, WeightRead
from edge_run.runtime.graph.segments import chunks_of
from edge_run.runtime.planning.memory_plan import row_ranges
from frames_drive import Drive
from mapped import PAGE, mapped

CHUNK = 2 * MIB
Segments = list[tuple[int, ...]]
segments_of_a_pass = st.lists(st.lists(st.integers(0, 60), max_size=5, unique=True).map(tuple), min_size=1, max_size=30)


def chain(n_chunks: int, per_segment: int = 4) -> Segments:
    """Every chunk once, in order."""
    return [tuple(range(i, min(i + per_segment, n_chunks))) for i in range(0, n_chunks, per_segment)]


def plan_for(
    segments: Segments, n_places: int, must_pin: frozenset[int] = frozenset(), ahead: int | None = None
) -> ResidencyPlan:
    return plan_residency(segments, must_pin, CHUNK, n_places * CHUNK, 0, ahead)


def largest_of(segments: Segments, must_pin: frozenset[int]) -> int:
    """The frames that any segment needs, wherever a pass is cut."""
    return frames_needed(segments, {chunk for segment in segments for chunk in segment} - must_pin)


@given(segments=segments_of_a_pass, must_pin=st.frozensets(st.integers(0, 60)), extra=st.integers(0, 70))
def test_no_plan_exceeds_what_is_available(segments: Segments, must_pin: frozenset[int], extra: int) -> None:
    used = {chunk for segment in segments for chunk in segment}
    least = len(used & must_pin) + largest_of(segments, must_pin)
    plan = plan_for(segments, least + extra, must_pin)
    assert len(plan.pinned) + plan.n_frames <= least + extra
    assert used & must_pin <= set(plan.pinned)
    assert sorted((*plan.pinned, *plan.streamed)) == sorted(used), "every chunk of the pass is planned once, no other"
    streamed = set(plan.streamed)
    assert all(len(streamed.intersection(segment)) <= plan.n_frames for segment in segments), "each fits the frames"
    assert plan.minimum_chunks == least


@example(sizes=[1, 2, 2, 1, 2], share=0.0, left_out={0})
@given(
    sizes=st.lists(st.integers(1, 60) | st.integers(1, 3), min_size=5, max_size=60),
    share=st.floats(0, 1),
    left_out=st.sets(st.integers(0, 59), max_size=20),
)
def test_a_pass_that_is_cut_elsewhere_fits_the_frames_too(sizes: list[int], share: float, left_out: set[int]) -> None:
    """A pass of more tokens, or one without logits, may be cut before other matrices, but never within one."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    matrices = [frozenset(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]
    planned = [segment.needs for segment in schedule_pass(matrices, [True] * len(sizes))]
    plan = plan_for(planned, frames_needed(planned, range(sum(sizes))) + int(share * sum(sizes)))
    streamed = set(plan.streamed)
    others = [matrix for i, matrix in enumerate(matrices) if i not in left_out]
    for segment in schedule_pass(others, [True] * len(others)) if others else ():
        assert len(streamed.intersection(segment.needs)) <= max(plan.n_frames, 0), (plan.n_frames, segment.needs)


@given(
    segments=segments_of_a_pass,
    must_pin=st.frozensets(st.integers(0, 60)),
    available=st.integers(0, 40 * MIB),
    other=st.integers(0, 4 * GIB),
)
def test_the_minimum_that_a_refusal_names_works(
    segments: Segments, must_pin: frozenset[int], available: int, other: int
) -> None:
    used = {chunk for segment in segments for chunk in segment}
    least = len(used & must_pin) + largest_of(segments, must_pin)
    assume(available < least * CHUNK)
    with pytest.raises(BudgetError) as caught:
        plan_residency(segments, must_pin, CHUNK, available, other)
    minimum = caught.value.minimum_bytes
    assert minimum > available + other == caught.value.found_bytes
    assert f"{minimum // MIB} MiB" in str(caught.value)
    plan_residency(segments, must_pin, CHUNK, minimum - other, other)


def test_what_fits_is_pinned_and_nothing_streams() -> None:
    assert plan_for(chain(40), 40) == ResidencyPlan(tuple(range(40)), (), 0, 0, 4)


def test_with_room_for_all_but_one_only_a_window_streams() -> None:
    """A window of frames is taken from what could be pinned, so a little more than what is missing must stream."""
    plan = plan_for(chain(1000), 999)
    assert plan.n_frames <= 2 * 4 + 2 + LOOKAHEAD_CHUNKS + 1
    assert len(plan.streamed) == plan.n_frames + 1


def test_frames_to_read_ahead_through_take_a_share_of_what_is_left() -> None:
    """Where answers share passes, which compute longer than they read, they may take more of it."""
    n_frames = [
        plan_residency(chain(200), frozenset(), CHUNK, 24 * CHUNK, 0, lookahead_share=share).n_frames
        for share in (LOOKAHEAD_SHARE, SHARED_LOOKAHEAD_SHARE)
    ]
    assert n_frames[1] - n_frames[0] == (24 - 4) // SHARED_LOOKAHEAD_SHARE - (24 - 4) // LOOKAHEAD_SHARE


def test_what_is_pinned_of_a_segment_needs_no_frame() -> None:
    """Where little streams, a window for that is enough, however large a segment is."""
    plan = plan_for(chain(1000, per_segment=200), 990)
    assert plan.n_frames < 60
    assert plan.streamed_uses == len(plan.streamed) == plan.n_frames + 10


def test_what_streams_is_spread_over_the_pass() -> None:
    """Reads then take turns with computing all along, and the drive is never idle for long."""
    n_chunks = 500
    plan = plan_for(chain(n_chunks), 350)
    gaps = [after - before for before, after in pairwise(plan.streamed)]
    gaps.append(n_chunks - plan.streamed[-1] + plan.streamed[0])
    assert max(gaps) - min(gaps) <= 1


def test_many_chunks_stream_in_runs() -> None:
    """Of a large model neighbours stream together, evenly spread: longer reads, and fewer mappings."""
    plan = plan_for(chain(4000), 2000)
    groups = {chunk // 8 for chunk in plan.streamed}
    assert len(plan.streamed) / 8 <= len(groups) <= len(plan.streamed) / 8 + 1
    gaps = [after - before for before, after in pairwise(sorted(groups))]
    assert max(gaps) - min(gaps) <= 1


def test_chunks_that_would_be_read_twice_stay_first() -> None:
    """Pinning one saves two reads of every pass."""
    met_again = [(chunk,) for chunk in range(30)]
    plan = plan_for([*chain(100), *met_again], 90)
    assert not set(plan.streamed) & set(range(30))
    assert plan.streamed_uses == len(plan.streamed)


@pytest.mark.parametrize("eagerness", [0, 10**6], ids=["slow drive", "fast drive"])
@pytest.mark.parametrize(
    ("segments", "n_frames", "n_reads"),
    [
        ([(0,), (1,), (2,), (3,), (0, 4), (5, 6, 7, 8), *((chunk,) for chunk in range(9, 20))], 6, 20),
        ([(0, 1), (2,), (0,), (3,), (4,), (5,)], 2, 6),
        ([(0, 1), (2,), (3,), (0,), (4,), (5,)], 2, 7),
    ],
    ids=["beside a large segment", "released first", "too far"],
)
def test_plans_know_which_chunks_are_read_again(
    segments: Segments, n_frames: int, n_reads: int, eagerness: int
) -> None:
    """A chunk that reading ahead reaches again stays, however large the largest segment is."""
    n_chunks = 1 + max(map(max, segments))
    plan = ResidencyPlan((), tuple(range(n_chunks)), n_frames, 0, 0)
    assert reads_beside(plan, segments, [0]) == [n_reads]
    schedule = [
        Segment(i, i, now, tuple(sorted({*now}.difference(before))), tuple(sorted({*now}.difference(after))))
        for i, (before, now, after) in enumerate(zip([(), *segments], segments, [*segments[1:], ()], strict=False))
    ]
    drive = Drive(n_chunks, schedule, (), n_frames)
    drive.run_pass([eagerness])
    reads = [drive.run_pass([eagerness])[0] for _ in range(5)]
    assert abs(sum(reads) - 5 * n_reads) <= n_frames


def test_a_chunk_that_neighbours_share_is_read_once() -> None:
    """The end of a matrix and the start of the next one lie in one chunk, which stays from segment to segment."""
    plan = plan_for([(i, i + 1) for i in range(100)], 10)
    assert plan.streamed_uses == len(plan.streamed) == len(set(plan.streamed))


def test_more_memory_never_means_more_reading() -> None:
    reads = [plan_for(chain(300), n_places).streamed_uses for n_places in range(4, 302)]
    assert reads == sorted(reads, reverse=True)
    assert reads[-1] == 0


def test_mappings_stay_few_in_a_large_model() -> None:
    """What is pinned and what streams take turns; each change is a mapping, of which Linux allows 65,530."""
    n_chunks = 6 * MOST_RUNS
    streamed = plan_for(chain(n_chunks), n_chunks // 2).streamed
    n_runs = 1 + sum(after != before + 1 for before, after in pairwise(streamed))
    assert n_runs <= MOST_RUNS


def test_too_little_is_refused_with_the_figures() -> None:
    with pytest.raises(BudgetError, match=r"budget 1\.00 GiB.*at least 1039 MiB.*1\.00 GiB besides") as caught:
        plan_residency(chain(40), frozenset(), CHUNK, 0, GIB)
    assert (caught.value.found_bytes, caught.value.minimum_bytes) == (GIB, 1039 * MIB)


def test_a_table_is_read_by_row_only_where_nothing_reads_it_whole() -> None:
    """Frames would be moved over its pages otherwise. A part of it that is a matrix counts, wherever it begins."""
    with mapped([40 * PAGE], PAGE) as address_space:
        base = address_space.spans[0].start
        lookup = Node(b"embd", "GET_ROWS", (WeightRead("table", base + 100, 20 * PAGE, row_bytes=256),), True)
        (table,) = row_ranges((lookup,), address_space, micro_batch_tokens=2)
        assert (table.start, table.stop) == (base + PAGE, base + 20 * PAGE), "what no other weight has a part in"
        assert table.file_offset == PAGE
        for start, length in ((base + 100, 20 * PAGE), (base + 15 * PAGE, PAGE)):
            matrix = Node(b"out", "MUL_MAT", (WeightRead("table", start, length),), True)
            assert row_ranges((lookup, matrix), address_space, micro_batch_tokens=2) == []
        behind = Node(b"out", "MUL_MAT", (WeightRead("other", base + 100 + 20 * PAGE, PAGE),), True)
        assert row_ranges((lookup, behind), address_space, micro_batch_tokens=2) == [table]


def test_a_table_that_row_slices_read_whole_is_read_by_row_elsewhere() -> None:
    """Its lookups need no chunk, and are told from those in a table that begins on its last page."""
    with mapped([40 * PAGE], PAGE) as address_space:
        base = address_space.spans[0].start
        read = WeightRead("table", base + 100, 20 * PAGE, row_bytes=256)
        matrix = Node(b"out", "MUL_MAT", (replace(read, row_bytes=0, product_row_bytes=256),), True)
        lookup = Node(b"embd", "GET_ROWS", (read,), True)
        (table,) = row_ranges((lookup, matrix), address_space, micro_batch_tokens=2, has_row_slices=True)
        assert (table.start, table.stop, table.file_offset, table.is_apart) == (base, base + 21 * PAGE, 0, True)
        assert list(chunks_of(read, address_space, [table])) == []
        assert list(chunks_of(matrix.reads[0], address_space, [table])) == list(range(21))
        behind = WeightRead("positions", base + 100 + 20 * PAGE, 300, row_bytes=100)
        assert list(chunks_of(behind, address_space, [table])) == [20]


def test_a_small_table_is_not_worth_reading_by_row() -> None:
    with mapped([40 * PAGE], PAGE) as address_space:
        start = address_space.spans[0].start
        lookup = Node(b"embd", "GET_ROWS", (WeightRead("table", start, 3 * PAGE, row_bytes=256),), True)
        assert row_ranges((lookup,), address_space, micro_batch_tokens=2) == []


@given(n_chunks=st.integers(600, 6_000), per_segment=st.integers(1, 20), share=st.floats(0.1, 0.9))
def test_the_planner_of_a_mesh_predicts_what_streaming_takes(n_chunks: int, per_segment: int, share: float) -> None:
    n_places = int(share * n_chunks)
    plan = plan_for(chain(n_chunks, per_segment), n_places, ahead=LOOKAHEAD_CHUNKS)
    spec = DeviceSpec(
        node="n",
        memory_bytes=n_places * CHUNK,
        compute_bytes_per_s=1e15,
        disk_bytes_per_s=1e9,
        window_bytes=(LOOKAHEAD_CHUNKS + 2) * CHUNK,
        pair_bytes=2 * per_segment * CHUNK,
    )
    units = [UnitWork(0), UnitWork(n_chunks * CHUNK), UnitWork(0)]
    told = plan_mesh(units, [spec])
    assert told is not None
    assert told.read_bytes["n"] / CHUNK == pytest.approx(len(plan.streamed), abs=4 + len(plan.streamed) // 100)


@settings(deadline=None)  # NumPy is imported in the first
@given(rounds=st.integers(2, 6), whole=st.integers(10, 20), lacking=st.integers(1, 60))
def test_and_what_it_takes_in_visits(rounds: int, whole: int, lacking: int) -> None:
    """The ends of a device's ranges lie within chunks, which it has whole."""
    per_unit = whole + 0.3
    unit = UnitWork(int(per_unit * CHUNK))
    units = [UnitWork(0), *[unit] * 8 * rounds, UnitWork(0)]
    n_places = int(4 * rounds * per_unit) - lacking
    assume((lacking + rounds) / (rounds - 1) < LOOKAHEAD_CHUNKS)
    here, there = (
        DeviceSpec(
            node=name,
            memory_bytes=n_places * CHUNK,
            compute_bytes_per_s=1e12,
            disk_bytes_per_s=1e9,
            window_bytes=(LOOKAHEAD_CHUNKS + 2) * CHUNK,
            pair_bytes=4 * CHUNK,
            range_bytes=CHUNK,
        )
        for name in ("here", "there")
    )
    told = plan_mesh(units, [here, there], among=(rounds,))
    assert told is not None
    visits = [
        range(int((first - 1) * per_unit), math.ceil((end - 1) * per_unit)) for first, end in ranges_of(told, "there")
    ]
    segments = [tuple(visit[i : i + 2]) for visit in visits for i in range(0, len(visit), 2)]
    by_segment = plan_for(segments, n_places, ahead=LOOKAHEAD_CHUNKS)
    plan = plan_stage_visits(by_segment, segments, [tuple(visit) for visit in visits], frozenset(), 0)
    assert plan is not None
    assert len(visits) == rounds
    assert told.read_bytes["there"] / CHUNK == pytest.approx(len(plan.streamed), abs=rounds + 1)


def ranges_of(plan: MeshPlan, node: str) -> list[tuple[int, int]]:
    owners = [None, *plan.owners, None]
    borders = [i for i in range(1, len(owners)) if (owners[i - 1] == node) != (owners[i] == node)]
    return [(first - 1, end - 1) for first, end in zip(borders[::2], borders[1::2], strict=True)]


def test_a_budget_without_a_unit_is_told_what_it_means() -> None:
    assert "memory budget 4 B (a number without a unit is bytes): too small" in str(too_small(4, 2**20, 2**19))
    assert "memory budget 20 MiB: too small" in str(too_small(20 * 2**20, 2**26, 2**25))
