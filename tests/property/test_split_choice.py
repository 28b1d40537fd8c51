"""The choice of a mode, whatever is measured: trials are few, what fails is asked seldom, and what is wrong mends."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from edge_run.partition.split_choice import (
    CODE,
    HYSTERESIS,
    IMAGE,
    LOCAL,
    LOCAL_MARGIN,
    MOST_PAUSE_FRAMES,
    SERVER_MARGIN,
    TRIAL_SHARE,
    Chooser,
    FrameCost,
    Mode,
)

MODES = (Mode(LOCAL), Mode(IMAGE), Mode(CODE, 1), Mode(CODE, 0))
KINDS = (LOCAL, IMAGE, CODE)
seconds = st.floats(0, 10)
sizes = st.integers(0, 1 << 24)
away = st.sampled_from((IMAGE, CODE))
costs = st.fixed_dictionaries({kind: st.builds(FrameCost, seconds, sizes) for kind in (IMAGE, CODE)})
events = st.one_of(
    st.tuples(st.just("choose"), st.integers(1, 60)),
    st.tuples(st.just("computed"), st.sampled_from(KINDS), seconds),
    st.tuples(st.just("sized"), st.sampled_from(MODES), sizes),
    st.tuples(st.just("crossed"), sizes, seconds),
    st.tuples(st.just("queued"), seconds),
    st.tuples(st.just("served"), away, seconds, sizes),
    st.tuples(st.just("refused"), away),
    st.tuples(st.just("unanswered"), away),
    st.tuples(st.just("server_back"), costs, seconds),
    st.tuples(st.just("server_lost")),
)


def opened(device_s: dict[str, float], server: dict[str, FrameCost] | None = None) -> Chooser:
    """Return a chooser that knows a way of each kind, over a link of 1 MB/s."""
    one = Chooser(MODES, device_s)
    for mode, size_bytes in zip(MODES[1:], (5000, 900, 300), strict=True):
        one.sized(mode, size_bytes)
    if server is not None:
        connect(one, server)
    return one


def connect(one: Chooser, server: dict[str, FrameCost]) -> None:
    one.server_back(server, 0.0)
    one.crossed(0, 0.001)
    one.crossed(2000, 0.003)


@given(st.lists(events, max_size=60), st.floats(0.01, 5))
def test_trials_take_a_small_share_and_make_no_frame_late(happens: list[tuple[Any, ...]], deadline_s: float) -> None:
    one = opened(dict.fromkeys(KINDS, 0.01), {kind: FrameCost(0.005, 100) for kind in (IMAGE, CODE)})
    all_s, tried_s = 0.0, defaultdict[str, float](float)
    for name, *rest in happens:
        if name != "choose":
            getattr(one, name)(*rest)
            continue
        for _ in range(rest[0]):
            expected = {mode: one.expected_s(mode) for mode in MODES}
            mode = one.choose(deadline_s)
            chosen_s, current_s = expected[mode], expected[one._current] if one._current else None
            assert chosen_s is not None
            assert current_s is not None
            assert one.has_server or mode == Mode(LOCAL)
            all_s += chosen_s
            if one._is_trial:
                tried_s[mode.kind] += chosen_s
                rescued_s = one._device[mode.kind].value + LOCAL_MARGIN * expected[Mode(LOCAL)]  # type: ignore[operator]
                is_rescued = mode != Mode(LOCAL) and rescued_s < deadline_s
                is_late_anyway = current_s > deadline_s and chosen_s <= SERVER_MARGIN * current_s
                assert chosen_s <= deadline_s or is_rescued or is_late_anyway
                if mode != Mode(LOCAL) and chosen_s <= deadline_s:
                    own_s = one._device[mode.kind].value or 0.0
                    assert one.patience_s(mode, deadline_s, own_s) >= chosen_s - own_s - 1e-9
                assert mode.kind != one._current.kind  # type: ignore[union-attr]
            assert all(spent_s <= TRIAL_SHARE * all_s * (1 + 1e-9) for spent_s in tried_s.values())


@settings(max_examples=25)
@given(st.lists(st.booleans(), min_size=1, max_size=200))
def test_a_server_that_fails_is_asked_seldom(loses: list[bool]) -> None:
    """Whether it is lost by that, and found again, or not."""
    server = {kind: FrameCost(0.001, 100) for kind in (IMAGE, CODE)}
    one, frames, asked = opened({LOCAL: 1.0, CODE: 0.01, IMAGE: 0.0}, server), 2 * MOST_PAUSE_FRAMES, 0
    for number in range(frames):
        mode = one.choose(1.0)
        if mode != Mode(LOCAL):
            asked += 1
            one.unanswered(mode.kind)
            if loses[number % len(loses)]:
                one.server_lost()
                connect(one, server)
    assert asked <= 2 * (frames.bit_length() + 1)


@settings(max_examples=8)
@given(
    st.fixed_dictionaries({kind: st.floats(0.002, 0.05) for kind in KINDS}),
    st.fixed_dictionaries({kind: st.floats(0.002, 0.05) for kind in (IMAGE, CODE)}),
    st.lists(st.tuples(st.sampled_from(KINDS), st.floats(0.1, 10)), max_size=6),
)
def test_in_the_end_the_fastest_is_chosen(
    device_s: dict[str, float], server_s: dict[str, float], wrong: list[tuple[str, float]]
) -> None:
    """Whatever was measured at first, by a device or a server that was busy then."""
    server = {kind: FrameCost(server_s[kind], 100) for kind in server_s}
    one = opened(device_s, server)
    for kind, factor in wrong:
        one.computed(kind, factor * device_s[kind])
        if kind != LOCAL:
            one.served(kind, factor * server_s[kind], 100)
            one.queued(factor)
    for number in range(15_000):
        mode = one.choose(100.0)
        one.computed(mode.kind, device_s[mode.kind])
        if mode.kind != LOCAL:
            one.served(mode.kind, server_s[mode.kind], 100)
        if mode.kind != LOCAL or number % 20 == 0:  # a frame, or a probe
            one.queued(0.0)
    right = opened(device_s, server)
    expected = {mode: right.expected_s(mode) or 0.0 for mode in MODES}
    assert one._current is not None
    assert expected[one._current] <= (1 + 2 * HYSTERESIS) * min(expected.values())
