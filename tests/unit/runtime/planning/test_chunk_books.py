"""What is noted of each chunk of a large mixture takes what a plan says, however many of them were read."""

from __future__ import annotations

import tracemalloc

from edge_run.base.units import GIB, KIB, MIB
from edge_run.runtime.planning.expert_plan import CHUNK_BOOK_BYTES
from edge_run.tiers.address_space import PLACES_KEPT, AddressSpace, MappedSpan
from edge_run.tiers.content_sums import ContentSums
from edge_run.tiers.on_demand import OnDemand
from edge_run.tiers.residency import Residency

CHUNK_BYTES = 64 * KIB
BASE = 1 << 40
N_CHUNKS = 132 * GIB // CHUNK_BYTES
ROOM_BYTES = 6 * MIB  # for the places that are kept, and what does not grow


def test_it_takes_what_the_plan_says_and_does_not_grow() -> None:
    tracemalloc.start()
    try:
        space = AddressSpace([MappedSpan(0, BASE, BASE + N_CHUNKS * CHUNK_BYTES, BASE)], CHUNK_BYTES)
        experts, dense = OnDemand(space.n_chunks, 100), Residency(space.n_chunks, range(10), (), 10)
        sums, dense_sums = ContentSums(space.n_chunks), ContentSums(space.n_chunks)
        for chunk in range(0, N_CHUNKS, 97):
            assert space.place(chunk).address == BASE + chunk * CHUNK_BYTES
            assert not sums.has_all([chunk])
            experts.acquire([chunk])
            experts.loaded(chunk)
            experts.release([chunk])
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert CHUNK_BOOK_BYTES * N_CHUNKS / 2 < held < CHUNK_BOOK_BYTES * N_CHUNKS + ROOM_BYTES
    assert peak < CHUNK_BOOK_BYTES * N_CHUNKS + ROOM_BYTES + 4 * N_CHUNKS, "an account is copied once while it is made"
    assert len(space._places) <= PLACES_KEPT
    assert dense.state(0) == experts.state(1)
    assert not dense_sums.has_all([0])
