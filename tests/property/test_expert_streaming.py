"""Streaming by expert under random choices, guesses and reads: every chunk is held as often as somebody needs it.

Passes of one token and of many, guesses that are right and wrong, reads that end in any order. No llama.cpp, no files:
the state of chunks is real (`OnDemand`), reads are made up.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_run.prefetch.experts import ExpertCache, MoeShape
from edge_run.prefetch.policies import POLICIES, make_policy
from edge_run.runtime.forecasting.routing import Usage
from edge_run.runtime.planning.expert_plan import least_frames
from edge_run.runtime.planning.experts import ExpertMap, ExpertTensor
from edge_run.runtime.streaming.experts import Adaptation, ExpertRoom, ExpertStreaming
from edge_run.tiers.address_space import AddressSpace, MappedSpan
from edge_run.tiers.chunk_states import Load
from edge_run.tiers.on_demand import OnDemand
from edge_run.tiers.readers import ReadTotals
from frames_model import Memory

CHUNK, STRIDE, ROW, LAYERS, EXPERTS, USED = 4096, 10_000, 20, 4, 6, 2
MICRO_BATCH_TOKENS = 64
BASE = 1 << 30
TENSORS = [
    ExpertTensor(layer, BASE + (2 * layer + part) * EXPERTS * STRIDE, STRIDE, EXPERTS, ROW)
    for layer in range(LAYERS)
    for part in range(2)
]


class Chunks:
    """What `Weights` is to streaming; reads begin and end when chance will have it."""

    totals, read_bytes = ReadTotals(), 0

    def __init__(self, n_chunks: int, n_frames: int, chance: random.Random) -> None:
        self.state, self.chance = OnDemand(n_chunks, n_frames), chance
        self.memory = Memory(frozenset(), n_frames)
        self.holders: Counter[int] = Counter()
        self.begun: set[int] = set()

    def hold(self, chunks: Iterable[int], is_guess: bool = False) -> None:
        chunks = list(chunks)
        self.holders.update(chunks)
        self._start(self.state.hold(chunks))

    def acquire(self, chunks: Iterable[int]) -> float:
        chunks = list(chunks)
        self.holders.update(chunks)
        self._start(self.state.acquire(chunks))
        while self.state.is_waiting:
            assert not self.state.is_stuck, "too few frames"
            self.read()
        assert set(chunks) <= self.memory.readable
        return 0.0

    def release(self, chunks: Iterable[int]) -> None:
        chunks = list(chunks)
        self.holders.subtract(chunks)
        assert all(self.holders[chunk] >= 0 for chunk in chunks), "released more often than held"
        self._start(self.state.release(chunks))

    def unread(self, chunks: Iterable[int]) -> int:
        waiting = {load.chunk for load in self.memory.loading if load.chunk not in self.begun and not load.is_urgent}
        return sum(chunk in waiting for chunk in chunks)

    def read(self) -> None:
        """Begin a read, or end one; what nobody holds any more is not read."""
        load = self.chance.choice(self.memory.loading)
        if load.chunk not in self.begun and self.state.is_held(load.chunk):
            self.begun.add(load.chunk)
            return
        self.memory.loading.remove(load)
        if load.chunk in self.begun:
            self.begun.discard(load.chunk)
            self.memory.readable.add(load.chunk)
            self._start(self.state.loaded(load.chunk))
        else:
            self._start(self.state.failed(load.chunk)[1])

    def _start(self, loads: list[Load]) -> None:
        self.memory.start(loads, {chunk for chunk, n in self.holders.items() if n > 0} & self.memory.readable)


class Products:
    """Makes sure that the rows which are multiplied by are in memory, all of them in the end."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.n_rows = bench, 0

    def multiply(self, tensor: int, rows: range) -> None:
        chunks = self.bench.experts.chunks_of_rows(TENSORS[tensor], self.bench.streaming._chosen, rows)
        state = self.bench.chunks.state
        assert set(chunks) <= self.bench.chunks.memory.readable
        assert all(state.is_held(chunk) for chunk in chunks)
        assert rows.start == self.n_rows % (STRIDE // ROW)
        self.n_rows += len(rows)


class Bench:
    """A streaming, and what it must hold by what its cache says."""

    def __init__(self, n_extra: int, policy: str, seed: int) -> None:
        self.chance = random.Random(seed)
        address_space = AddressSpace([MappedSpan(0, BASE, BASE + LAYERS * 2 * EXPERTS * STRIDE, BASE)], CHUNK)
        self.experts = ExpertMap(TENSORS, address_space, frozenset())
        n_frames = least_frames(self.experts, USED, MICRO_BATCH_TOKENS) + n_extra
        self.chunks = Chunks(address_space.n_chunks, n_frames, self.chance)
        moe = MoeShape(tuple(range(LAYERS)), EXPERTS, USED)
        sizes = dict(enumerate(self.experts.sizes))
        self.cache = ExpertCache(n_frames, sizes, make_policy(policy, moe), self.experts.size_of)
        usage = Usage(0.5, 1, self.chunks, self.chunks)  # type: ignore[arg-type]
        self.streaming = ExpertStreaming(
            self.experts,
            self.cache,
            self.chunks,  # type: ignore[arg-type]
            ExpertRoom(n_frames, 0, n_frames, USED, MICRO_BATCH_TOKENS),
            Adaptation(usage),
            Products(self),  # type: ignore[arg-type]
        )

    def run_pass(self, n_tokens: int) -> None:
        """Compute a pass, guessing ahead where it is of one token."""
        streaming, draw = self.streaming, self.chance
        plan = [[e for _ in range(n_tokens) for e in draw.sample(range(EXPERTS), USED)] for _ in range(LAYERS)]
        for layer, ids in enumerate(plan):
            for part, tensor in enumerate(self.experts.layers[layer]):
                if part == 0:
                    streaming._choose(layer, ids, n_tokens)
                    if n_tokens == 1:
                        self.guess(layer, plan)
                if not streaming._use(tensor):
                    assert len(self.cache) == 0
                    streaming._multiply_in_slices(tensor, TENSORS.index(tensor))
                for _ in range(draw.randrange(6)):
                    if self.chunks.memory.loading:
                        self.chunks.read()
                self.check()
            if n_tokens == 1 and draw.random() < 0.5:
                self.guess(layer, plan)

    def guess(self, layer: int, plan: list[list[int]]) -> None:
        for ahead in (1, 2):
            if layer + ahead < LAYERS and self.chance.random() < 0.8:
                right = [expert for expert in plan[layer + ahead] if self.chance.random() < 0.7]
                wrong = [expert for expert in range(EXPERTS) if self.chance.random() < 0.2]
                self.streaming._read_predicted([(layer + ahead, list(dict.fromkeys(right + wrong)))])
                self.check()

    def check(self) -> None:
        wanted = Counter([*self.streaming._in_use, *self.streaming._ahead])
        for layer in range(LAYERS):
            for expert in range(EXPERTS):
                if (layer, expert) in self.cache:
                    wanted.update(self.streaming._chunks((layer, expert)))
        assert +self.chunks.holders == +wanted
        self.chunks.state.check()
        assert 0 <= self.streaming.prefetched.n_unused <= self.streaming.prefetched.n_read


@given(
    stride_rows=st.integers(1, 700),
    row=st.integers(1, 3000),
    n_experts=st.integers(1, EXPERTS),
    n_extra=st.integers(0, 300),
    start=st.integers(0, CHUNK),
)
def test_slices_have_room_and_are_all_rows(
    stride_rows: int, row: int, n_experts: int, n_extra: int, start: int
) -> None:
    tensor = ExpertTensor(0, BASE + start, stride_rows * row, EXPERTS, row)
    space = AddressSpace([MappedSpan(0, BASE, BASE + start + EXPERTS * tensor.stride, BASE)], CHUNK)
    experts = ExpertMap([tensor], space, frozenset())
    n_frames = experts.least_at_once(tensor, n_experts) + n_extra
    slices = experts.row_slices(tensor, n_experts, n_frames)
    assert [row for rows in slices for row in rows] == list(range(stride_rows))
    found = [experts.chunks_of_rows(tensor, range(n_experts), rows) for rows in slices]
    assert all(len(set(chunks)) <= n_frames for chunks in found)
    assert {c for chunks in found for c in chunks} == {c for e in range(n_experts) for c in experts.pieces(tensor)[e]}


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=40, deadline=None)
@given(
    n_extra=st.integers(0, 120),
    seed=st.integers(0, 2**32),
    passes=st.lists(st.sampled_from([1, 1, 1, 2, 24, 64]), min_size=1, max_size=12),
)
def test_chunks_are_held_as_often_as_they_are_needed(policy: str, n_extra: int, seed: int, passes: list[int]) -> None:
    bench = Bench(n_extra, policy, seed)
    for n_tokens in passes:
        bench.run_pass(n_tokens)
    bench.streaming.abandon()
    bench.check()
