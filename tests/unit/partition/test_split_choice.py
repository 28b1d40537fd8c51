"""The choice of a mode, from measurements alone."""

import pytest

from edge_run.partition.split_choice import CODE, IMAGE, LOCAL, Average, Chooser, Mode

LOCAL_S, HEAD_S, TAIL_S, MODEL_S = 0.050, 0.008, 0.004, 0.006
CODE_BYTES, IMAGE_BYTES = 250, 900
MODES = (Mode(LOCAL), Mode(IMAGE), Mode(CODE, 0))


def chooser() -> Chooser:
    made = Chooser(MODES, {LOCAL: LOCAL_S, CODE: HEAD_S, IMAGE: 0.0}, {})
    made.sized(Mode(CODE, 0), CODE_BYTES)
    made.sized(Mode(IMAGE), IMAGE_BYTES)
    return made


def connect(one: Chooser, bits_per_s: float, round_trip_s: float = 0.002, times: int = 2) -> None:
    one.server_back({CODE: TAIL_S, IMAGE: MODEL_S})
    measure(one, bits_per_s, round_trip_s, times)


def measure(one: Chooser, bits_per_s: float, round_trip_s: float = 0.002, times: int = 2) -> None:
    for _ in range(times):
        one.crossed(0, round_trip_s)
        one.crossed(500, round_trip_s + 500 * 8 / bits_per_s)


def test_without_a_server_all_is_local() -> None:
    assert chooser().choose() == Mode(LOCAL)


@pytest.mark.parametrize(("bits_per_s", "wanted"), [(2e4, LOCAL), (1e5, CODE), (5e5, CODE), (5e6, IMAGE), (1e8, IMAGE)])
def test_bandwidth_decides(bits_per_s: float, wanted: str) -> None:
    one = chooser()
    connect(one, bits_per_s)
    assert one.choose().kind == wanted
    seconds = {mode: one.expected_s(mode) for mode in MODES}
    assert seconds[one.choose()] == min(seconds.values())  # type: ignore[type-var]


def test_a_change_of_bandwidth_shows_with_the_second_measurement() -> None:
    one = chooser()
    connect(one, 1e8)
    assert one.choose().kind == IMAGE
    measure(one, 1e5, times=2)
    assert one.choose().kind == CODE
    measure(one, 1e8, times=2)
    assert one.choose().kind == IMAGE


def test_one_hiccup_changes_little() -> None:
    average = Average(1.0)
    average.add(10.0)
    assert average.value == pytest.approx(3.25)
    average.add(3.0)
    average.add(3.0)
    assert average.value == pytest.approx(3.14, abs=0.1)


def test_hysteresis_keeps_what_is_about_as_fast() -> None:
    one = Chooser((Mode(CODE, 0), Mode(IMAGE)), {CODE: 0.0100, IMAGE: 0.0102}, {})
    for mode in (Mode(CODE, 0), Mode(IMAGE)):
        one.sized(mode, 0)
    connect(one, 1e9)
    one.served(CODE, 0, MODEL_S)
    kept = one.choose()
    one.computed(IMAGE, 0.0099)
    assert one.choose() == kept


def test_a_busy_server_is_left() -> None:
    one = chooser()
    connect(one, 1e8)
    for _ in range(3):
        one.served(IMAGE, 0.2, MODEL_S)
    assert one.choose() == Mode(LOCAL)


def test_losing_the_server_is_local_at_once_and_back_measures_anew() -> None:
    one = chooser()
    connect(one, 1e8)
    one.choose()
    one.server_lost()
    assert one.choose() == Mode(LOCAL)
    assert one.bytes_per_s is None
    one.server_back({CODE: TAIL_S, IMAGE: MODEL_S})
    assert one.choose() == Mode(LOCAL)  # nothing is known of the link yet
    measure(one, 1e8)
    assert one.choose().kind == IMAGE


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
    one.served(CODE, 0.0, 0.1)
    one.served(CODE, 0.0, 0.1)
    for local_s, spent_s, least_s, most_s in ((0.9, 0.05, 0.2, 0.3), (1.2, 0.1, 0.9, 0.9), (0.2, 2.0, 0.5, 0.5)):
        one.computed(LOCAL, local_s)
        one.computed(LOCAL, local_s)
        assert least_s <= one.patience_s(Mode(CODE, 0), 1.0, spent_s) <= most_s


def test_a_kind_that_is_refused_is_tried_less_and_less_often_and_others_are_not() -> None:
    one = chooser()
    connect(one, 1e5)
    kinds = []
    for _ in range(12):
        kinds.append(one.choose().kind)
        if kinds[-1] == CODE:
            one.refused(CODE)
    assert CODE not in (kinds[1], *kinds[3:5], *kinds[6:10])
    assert [number for number, kind in enumerate(kinds) if kind == CODE] == [0, 2, 5, 10]
    one = chooser()
    connect(one, 1e5)
    for _ in range(2):
        assert one.choose().kind == CODE
        one.refused(CODE)
        assert one.choose().kind != CODE
        assert one.choose().kind == CODE
        one.served(CODE, 0.0, TAIL_S)  # an answer ends it
