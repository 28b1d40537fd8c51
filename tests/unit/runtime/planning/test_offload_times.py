"""What decides how much of a model goes to a GPU: forecasts, corrected by what runs measured. Without a GPU."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench_samples import PROFILE
from edge_run.base.config import ModelConfig
from edge_run.base.profile import DeviceProfile
from edge_run.partition.placement import NOTHING, Placement, fastest, placements, worth_timing
from edge_run.runtime.decoding.progress import Step, Timeline
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.planning.offload_times import FRESH_S, LEAST_PACES, PROCESSOR, known_paces, note_paces
from edge_run.tiers.gguf import read_gguf
from kit_models import KIT

DISTURBED = replace(PROFILE, is_disturbed=True)


def moe(n_layers: int) -> list[Placement]:
    parts = "attn_q.weight", "ffn_up_exps.weight"
    return placements([f"blk.{i}.{part}" for i in range(n_layers) for part in parts], n_layers)


def test_an_moe_is_tried_with_its_experts_without_them_and_not_at_all() -> None:
    choices = moe(4)
    largest = next(one for one in choices if one.n_layers == 5 and one.n_narrow == 2)
    narrow = next(one for one in choices if one.n_layers == 5 and one.n_narrow == 4)
    assert worth_timing(choices, largest, is_asked=False) == [largest, narrow, NOTHING]
    assert worth_timing(choices, largest, is_asked=True) == [largest, narrow]
    assert worth_timing(choices, narrow, is_asked=True) == [narrow]


def test_the_fastest_is_taken_where_all_is_known_and_it_is_faster_by_more_than_a_forecast_is_off() -> None:
    large, narrow = Placement(5, 2), Placement(5, 4)
    seconds = {large: 0.1, narrow: 0.09, NOTHING: 0.2}
    assert fastest([large, narrow, NOTHING], seconds.get) == narrow
    assert fastest([large, narrow, NOTHING], (seconds | {narrow: 0.098}).get) == large
    assert fastest([large, narrow, NOTHING], {large: 0.1, narrow: 0.09}.get) == large
    assert fastest([large, narrow, NOTHING], {}.get) == large


def test_nothing_is_timed_where_there_is_no_choice() -> None:
    def asked(placement: Placement) -> float:
        raise AssertionError("it takes a while to find out")

    assert fastest([Placement(5, 2)], asked) == Placement(5, 2)


def test_the_pace_of_tokens_is_what_they_took_against_what_was_expected() -> None:
    clock = iter([0.0, 0.3, 1.0, 1.5, 2.0, 9.0, 10.0, 11.0])
    timeline = Timeline(clock=lambda: next(clock))
    timeline.begin([Step("prompt", 1, 0.2)], is_timed=True)
    timeline.advance()
    timeline.begin([Step("prompt", 1, 0.2)], is_timed=False)  # units that are no seconds
    timeline.begin([Step("prompt", 8, 0.2)], is_timed=True)
    timeline.advance()
    timeline.begin([Step("reading", 1, 0.2)], is_timed=True)
    timeline.advance()
    assert list(timeline.paces) == pytest.approx([1.5])


def test_paces_are_kept_for_a_day_and_where_there_were_enough(tmp_path: Path) -> None:
    gguf, noon = read_gguf(KIT), 1e9
    note_paces(gguf, tmp_path, "gpu: 3, 1", [1.0] * (LEAST_PACES - 1), lambda: noon)
    assert known_paces(gguf, tmp_path, lambda: noon) == {}
    note_paces(gguf, tmp_path, "gpu: 3, 1", [1.0, *[1.7] * LEAST_PACES], lambda: noon)
    note_paces(gguf, tmp_path, PROCESSOR, [0.9] * LEAST_PACES, lambda: noon + 60)
    assert known_paces(gguf, tmp_path, lambda: noon + 61) == {"gpu: 3, 1": (1.7, noon), PROCESSOR: (0.9, noon + 60)}
    assert known_paces(gguf, tmp_path, lambda: noon + FRESH_S + 1) == {PROCESSOR: (0.9, noon + 60)}


@pytest.mark.parametrize(
    ("own", "expected", "is_noted"),
    [(PROFILE, PROFILE, True), (DISTURBED, DISTURBED, False), (PROFILE, replace(PROFILE, node_s=1.0), False)],
)
def test_only_a_forecast_of_this_device_as_it_is_corrects_the_next(
    own: DeviceProfile, expected: DeviceProfile, is_noted: bool, tmp_path: Path
) -> None:
    """One that was disturbed, or of another device (`Model.expect`), changed what went to a GPU for a day."""
    engine: Any = Engine.__new__(Engine)
    engine.gguf, engine.config, engine.offload = read_gguf(KIT), ModelConfig(cache_folder=tmp_path), None
    engine._profile, engine._mesh, engine._stack = own, None, ExitStack()
    engine._passes = SimpleNamespace(expect=lambda profile: None)
    engine.timeline = SimpleNamespace(paces=[1.5] * LEAST_PACES)
    engine.expect(expected)
    engine.close()
    assert list(known_paces(engine.gguf, tmp_path)) == [PROCESSOR] * is_noted


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', '{"a": ["x", "y"]}', "\xff"])
def test_a_file_of_paces_that_is_none_is_as_good_as_none(tmp_path: Path, text: str) -> None:
    gguf = read_gguf(KIT)
    note_paces(gguf, tmp_path, "a", [1.0] * LEAST_PACES)
    (place,) = (tmp_path / "paces").iterdir()
    place.write_text(text)
    assert known_paces(gguf, tmp_path) == {}
    note_paces(gguf, tmp_path, "a", [1.0] * LEAST_PACES)
    assert known_paces(gguf, tmp_path).keys() == {"a"}
