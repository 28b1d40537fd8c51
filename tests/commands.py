"""Commands as a member may send them: some that can be, and some that cannot, in all ways that there are."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from edge_run.base.mesh import Message

OPTIONS: dict[str, Any] = {
    "context_tokens": 256,
    "micro_batch_tokens": 8,
    "sequences": 3,
    "outputs_per_pass": 4,
    "threads": 1,
    "check_file": False,
}
_EDGES = (-(2**31), -1, 0, 1, 2, 3, 7, 8, 9, 255, 256, 257, 380, 4000, 2**31 - 1, 0x41414141)
_WILD = st.one_of(st.sampled_from(_EDGES), st.integers(-(2**31), 2**31 - 1))

_BRANCHES: st.SearchStrategy[list[int]] = st.one_of(
    st.just([]),
    st.just([]),
    st.lists(st.integers(0, 2), max_size=2, unique=True),
    st.lists(_WILD, min_size=3, max_size=90),
)


def message(what: str, numbers: list[int], **header: object) -> Message:
    part = memoryview(np.array(numbers, "<i8").astype("<i4").tobytes())
    return Message("rogue", {"kind": "command", "epoch": 1, "number": 1, "what": what, **header}, (part,))


@st.composite
def _batches(draw: st.DrawFn) -> list[int]:
    """A batch that is right but for some numbers."""
    numbers: list[int] = []
    start, sequence = draw(st.integers(0, 20)), draw(st.integers(0, 2))
    for i in range(draw(st.sampled_from((1, 1, 2, 5, 12)))):
        branches = draw(_BRANCHES)
        numbers += [draw(st.integers(0, 300)), start + i, sequence, int(i % 5 == 0), len(branches), *branches]
    for _ in range(draw(st.sampled_from((0, 0, 0, 1, 2)))):
        place = draw(st.integers(0, len(numbers) - 1))
        numbers[place] = draw(_WILD)
    return numbers


_SEQUENCES, _POSITIONS = st.integers(0, 2), st.integers(0, 256)
_RIGHT: dict[str, st.SearchStrategy[list[int]]] = {
    "rewind": st.tuples(_SEQUENCES, _POSITIONS).map(list),
    "branch": st.permutations([0, 1, 2]).map(list),
    "keep": st.tuples(_SEQUENCES, _POSITIONS, _SEQUENCES, _SEQUENCES).map(list),
    "clear": st.just([]),
    "learn": st.tuples(st.integers(1, 8), st.integers(0, 4)).map(list),
}


def wild_commands() -> st.SearchStrategy[tuple[str, list[int]]]:
    """What a command is called, and its numbers."""
    right = st.one_of(*[st.tuples(st.just(what), numbers) for what, numbers in _RIGHT.items()])
    names = st.sampled_from((*_RIGHT, "decode", "format_disk"))
    noise = st.tuples(names, st.lists(_WILD, max_size=20))
    batches = st.tuples(st.just("decode"), _batches())
    return st.one_of(batches, batches, right, noise)
