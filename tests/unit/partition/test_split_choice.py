"""The choice of a mode, from measurements alone."""

import pytest

from edge_run.partition.split_choice import (
    CODE,
    IMAGE,
    LOCAL,
    LOCAL_MARGIN,
    MOST_PAUSE_FRAMES,
    TRIAL_SHARE,
    Average,
    Chooser,
    FrameCost,
    Mode,
)

LOCAL_S, HEAD_S, TAIL_S, MODEL_S = 0.050, 0.008, 0.004, 0.006
CODE_BYTES, IMAGE_BYTES, ANSWER_BYTES = 250, 900, 20
DEADLINE_S = 1.0
COSTS = {CODE: FrameCost(TAIL_S, ANSWER_BYTES), IMAGE: FrameCost(MODEL_S, ANSWER_BYTES)}
MODES = (Mode(LOCAL), Mode(IMAGE), Mode(CODE, 0))


def chooser() -> Chooser:
    made = Chooser(MODES, {LOCAL: LOCAL_S, CODE: HEAD_S, IMAGE: 0.0})
    made.sized(Mode(CODE, 0), CODE_BYTES)
    made.sized(Mode(IMAGE), IMAGE_BYTES)
    return made


def connect(one: Chooser, bits_per_s: float, round_trip_s: float = 0.002, times: int = 2) -> None:
    one.server_back(COSTS, 0.0)
    measure(one, bits_per_s, round_trip_s, times)


def measure(one: Chooser, bits_per_s: float, round_trip_s: float = 0.002, times: int = 2) -> None:
    for _ in range(times):
        one.crossed(0, round_trip_s)
        one.crossed(500, round_trip_s + 500 * 8 / bits_per_s)


def test_without_a_server_all_is_local() -> None:
    assert chooser().choose(DEADLINE_S) == Mode(LOCAL)


@pytest.mark.parametrize(("bits_per_s", "wanted"), [(2e4, LOCAL), (1e5, CODE), (5e5, CODE), (5e6, IMAGE), (1e8, IMAGE)])
def test_bandwidth_decides(bits_per_s: float, wanted: str) -> None:
    one = chooser()
    connect(one, bits_per_s)
    assert one.choose(DEADLINE_S).kind == wanted
    seconds = {mode: one.expected_s(mode) for mode in MODES}
    assert seconds[one.choose(DEADLINE_S)] == min(seconds.values())  # type: ignore[type-var]


def test_a_change_of_bandwidth_shows_with_the_second_measurement() -> None:
    one = chooser()
    connect(one, 1e8)
    assert one.choose(DEADLINE_S).kind == IMAGE
    measure(one, 1e5, times=2)
    assert one.choose(DEADLINE_S).kind == CODE
    measure(one, 1e8, times=2)
    assert one.choose(DEADLINE_S).kind == IMAGE


def test_one_hiccup_changes_little() -> None:
    average = Average(1.0)
    average.add(10.0)
    assert average.value == pytest.approx(3.25)
    average.add(3.0)
    average.add(3.0)
    assert average.value == pytest.approx(3.14, abs=0.1)


def test_hysteresis_keeps_what_is_about_as_fast() -> None:
    one = Chooser((Mode(CODE, 0), Mode(IMAGE)), {CODE: 0.0100, IMAGE: 0.0102})
    for mode in (Mode(CODE, 0), Mode(IMAGE)):
        one.sized(mode, 0)
    connect(one, 1e9)
    one.served(CODE, MODEL_S, ANSWER_BYTES)
    kept = one.choose(DEADLINE_S)
    one.computed(IMAGE, 0.0099)
    assert one.choose(DEADLINE_S) == kept


def test_a_busy_server_is_left() -> None:
    one = chooser()
    connect(one, 1e8)
    for _ in range(3):
        one.queued(0.2)
        one.served(IMAGE, MODEL_S, ANSWER_BYTES)
    assert one.choose(DEADLINE_S) == Mode(LOCAL)


def test_a_server_that_was_busy_is_asked_again_once_probes_find_no_queue() -> None:
    one = chooser()
    connect(one, 1e8)
    for _ in range(2):
        one.queued(0.6)
    assert one.choose(DEADLINE_S) == Mode(LOCAL)
    for _ in range(2):
        one.queued(0.0)
    assert one.choose(DEADLINE_S).kind == IMAGE


def test_a_server_that_is_back_has_the_queue_that_it_says() -> None:
    one = chooser()
    connect(one, 1e8)
    one.server_lost()
    one.server_back(COSTS, 0.6)
    measure(one, 1e8)
    assert one.choose(DEADLINE_S) == Mode(LOCAL)


def test_losing_the_server_is_local_at_once_and_back_measures_anew() -> None:
    one = chooser()
    connect(one, 1e8)
    one.choose(DEADLINE_S)
    one.server_lost()
    assert one.choose(DEADLINE_S) == Mode(LOCAL)
    assert one.bytes_per_s is None
    one.server_back(COSTS, 0.0)
    assert one.choose(DEADLINE_S) == Mode(LOCAL)  # nothing is known of the link yet
    measure(one, 1e8)
    assert one.choose(DEADLINE_S).kind == IMAGE


@pytest.mark.parametrize("local_s", [0.01, 0.1, 0.3, 0.6, 0.75])
def test_a_server_that_does_not_answer_leaves_the_device_its_time(local_s: float) -> None:
    """In each case the device could be in time, and is, whatever was spent before the server was asked."""
    one, deadline_s, spent_s = chooser(), 1.0, 0.15
    connect(one, 1e8)
    one.computed(LOCAL, local_s)
    one.computed(LOCAL, local_s)
    patience_s = one.patience_s(Mode(CODE, 0), deadline_s, spent_s)
    assert patience_s > TAIL_S
    assert spent_s + patience_s + local_s <= deadline_s


def test_a_server_gets_what_it_usually_takes_and_all_where_the_device_would_be_late() -> None:
    one = chooser()
    connect(one, 1e8)
    one.served(CODE, 0.1, ANSWER_BYTES)
    one.served(CODE, 0.1, ANSWER_BYTES)
    for local_s, spent_s, least_s, most_s in ((0.9, 0.05, 0.2, 0.3), (1.2, 0.1, 0.9, 0.9), (0.2, 2.0, 0.5, 0.5)):
        one.computed(LOCAL, local_s)
        one.computed(LOCAL, local_s)
        assert least_s <= one.patience_s(Mode(CODE, 0), 1.0, spent_s) <= most_s


def test_a_kind_that_is_refused_is_tried_less_and_less_often_and_others_are_not() -> None:
    one = chooser()
    connect(one, 1e5)
    kinds = []
    for _ in range(12):
        kinds.append(one.choose(DEADLINE_S).kind)
        if kinds[-1] == CODE:
            one.refused(CODE)
    assert CODE not in (kinds[1], *kinds[3:5], *kinds[6:10])
    assert [number for number, kind in enumerate(kinds) if kind == CODE] == [0, 2, 5, 10]
    one = chooser()
    connect(one, 1e5)
    for _ in range(2):
        assert one.choose(DEADLINE_S).kind == CODE
        one.refused(CODE)
        assert one.choose(DEADLINE_S).kind != CODE
        assert one.choose(DEADLINE_S).kind == CODE
        one.served(CODE, TAIL_S, ANSWER_BYTES)  # an answer ends it


def trials(one: Chooser, wanted: Mode, most_frames: int = 2000) -> tuple[int, float, float]:
    """Return how many frames it takes until `wanted` is chosen, what those took, and what it was expected to take."""
    seconds = 0.0
    for number in range(most_frames):
        mode = one.choose(DEADLINE_S)
        expected_s = one.expected_s(mode)
        assert expected_s is not None
        if mode == wanted:
            return number, seconds, expected_s
        seconds += expected_s
    raise AssertionError(f"{wanted} is never tried")


def test_what_the_device_takes_is_measured_again_now_and_then() -> None:
    """It was busy for two frames, which would else be what it takes for ever."""
    one = chooser()
    connect(one, 1e5)
    for _ in range(2):
        one.computed(LOCAL, 0.5)
    for _ in range(2):
        number, seconds, expected_s = trials(one, Mode(LOCAL))
        assert number > 100
        assert expected_s < 1.01 * TRIAL_SHARE * seconds
        assert one.choose(DEADLINE_S).kind == CODE, "one frame is a trial"
        one.computed(LOCAL, 0.001)
    assert one.choose(DEADLINE_S) == Mode(LOCAL)


def served_slowly(seconds: float) -> Chooser:
    """Return a chooser whose server took so long for the last frames."""
    one = chooser()
    connect(one, 1e8)
    for kind in (CODE, IMAGE):
        for _ in range(2):
            one.served(kind, seconds, ANSWER_BYTES)
    return one


def test_what_the_server_takes_is_measured_again_now_and_then() -> None:
    one = served_slowly(0.6)
    assert one.choose(DEADLINE_S) == Mode(LOCAL)
    for _ in range(2):
        trials(one, Mode(IMAGE))
        one.served(IMAGE, MODEL_S, ANSWER_BYTES)
    assert one.choose(DEADLINE_S) == Mode(IMAGE)


def test_no_trial_makes_a_frame_late() -> None:
    """The device takes longer than the deadline: it is not tried. A server is that does, as the device can help."""
    one = chooser()
    connect(one, 1e8)
    for _ in range(2):
        one.computed(LOCAL, 2 * DEADLINE_S)
    assert all(one.choose(DEADLINE_S) != Mode(LOCAL) for _ in range(20_000))
    one = served_slowly(3 * DEADLINE_S)
    trials(one, Mode(IMAGE), 20_000)
    patience_s = one.patience_s(Mode(IMAGE), DEADLINE_S, 0.0)
    assert patience_s + LOCAL_MARGIN * LOCAL_S <= DEADLINE_S


def test_a_large_answer_counts_as_what_it_is() -> None:
    """A mask of 2 MiB for a code of 250 bytes, at 10 MB/s: the link is as fast as that, the mask takes its time."""
    one, answer_bytes, bytes_per_s = chooser(), 2 << 20, 1e7
    connect(one, 8 * bytes_per_s)
    for _ in range(4):
        one.crossed(CODE_BYTES + answer_bytes, 0.002 + (CODE_BYTES + answer_bytes) / bytes_per_s)
        one.served(CODE, TAIL_S, answer_bytes)
    assert one.bytes_per_s == pytest.approx(bytes_per_s, rel=0.05)
    expected_s = one.expected_s(Mode(CODE, 0))
    assert expected_s == pytest.approx(HEAD_S + 0.002 + 0.21 + TAIL_S, rel=0.05)


def test_what_a_server_says_of_its_answers_counts_before_the_first() -> None:
    one = chooser()
    one.server_back({kind: FrameCost(0.001, 4 << 20) for kind in (CODE, IMAGE)}, 0.0)
    measure(one, 1e8)
    assert one.choose(DEADLINE_S) == Mode(LOCAL)


def test_a_server_that_does_not_answer_is_asked_less_and_less_often_however_often_it_is_back() -> None:
    one = chooser()
    connect(one, 1e8)
    asked = list[int]()
    for number in range(4 * MOST_PAUSE_FRAMES):
        mode = one.choose(DEADLINE_S)
        if mode.kind != LOCAL:
            asked.append(number)
            one.unanswered(mode.kind)
            one.server_lost()
            connect(one, 1e8)
    assert len(asked) < 30
    for _ in range(2 * MOST_PAUSE_FRAMES):
        mode = one.choose(DEADLINE_S)
        if mode.kind != LOCAL:
            one.served(mode.kind, MODEL_S, ANSWER_BYTES)
    assert one.choose(DEADLINE_S).kind == IMAGE, "one that answers again is asked again"


def test_a_kind_that_is_never_answered_does_not_stop_the_others() -> None:
    """Images are too much for the link in time, although they look best: codes are sent meanwhile."""
    one = chooser()
    connect(one, 1e8)
    kinds = list[str]()
    for _ in range(200):
        kinds.append(one.choose(DEADLINE_S).kind)
        if kinds[-1] == IMAGE:
            one.unanswered(IMAGE)
        elif kinds[-1] == CODE:
            one.served(CODE, TAIL_S, ANSWER_BYTES)
    assert kinds.count(IMAGE) < 10
    assert kinds.count(CODE) > 180
