"""Which type keys and values get where it is left open: room first, then time against quality, and no wavering."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench_samples import PROFILE
from edge_run.base.config import ModelConfig
from edge_run.base.errors import ConfigError
from edge_run.base.profile import DeviceProfile
from edge_run.base.results import Plan
from edge_run.base.units import MIB
from edge_run.partition.cost import TILE_TOKENS
from edge_run.runtime.planning import kv_type_choice
from edge_run.runtime.planning.kv_type_choice import LEAST_GAINS
from edge_run.runtime.planning.offload_times import OffloadTimes
from edge_run.runtime.planning.plan import plan, planner
from edge_run.runtime.planning.planner import Planner
from edge_run.runtime.planning.prepare import _recalled, prepare
from edge_run.runtime.planning.prepared import Prepared
from edge_run.runtime.planning.weighing import Weighed, best
from edge_run.runtime.probing import attention, kernels, probe
from edge_run.tiers.gguf import GgufModel, read_gguf
from tiny_models import make_model

SLOW = replace(PROFILE, attention_flops_per_s=(1e3, 1e3))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model."""
    return make_model("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def gguf(path: Path) -> GgufModel:
    return read_gguf(path)


@pytest.fixture
def cache(tmp_path: Path, path: Path) -> Path:
    """A cache folder of a test's own, but for what others found out about the model: in a process, for each shape."""
    known, own = path.with_name("inspected"), tmp_path / "cache"
    known.mkdir(exist_ok=True)
    own.mkdir()
    (own / "inspected").symlink_to(known)
    return own


def options(*costs_s: float) -> list[Weighed[str]]:
    nothing: Any = None
    given = zip(LEAST_GAINS.items(), costs_s, strict=True)
    return [Weighed(kind, nothing, nothing, cost_s, gain) for (kind, gain), cost_s in given if cost_s]


@pytest.mark.parametrize(
    ("found", "kept", "wanted"),
    [
        (options(10, 9.5, 9.5), None, "f16"),  # not worth the quality
        (options(10, 8, 7), None, "q8_0"),
        (options(10, 8, 5), None, "q8_0/q4_0"),
        (options(10, 9.5, 20), "q8_0", "q8_0"),  # what was chosen before stays for a small loss
        (options(10, 20, 30), "q8_0", "f16"),
        (options(10, 0, 20), "q8_0", "f16"),  # which has no room now
    ],
)
def test_the_best(found: list[Weighed[str]], kept: str | None, wanted: str) -> None:
    assert best(found, kept).way == wanted


def speeds(slowness: float, *, is_disturbed: bool = False) -> Any:
    found = {kind: (1e12 / slowness**i, 1e12 / slowness**i) for i, kind in enumerate(LEAST_GAINS)}
    return lambda config, types, budget_bytes: attention.AttentionSpeeds(found, is_disturbed)


def test_a_plan_says_what_was_weighed(path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {"context_tokens": 16384, "micro_batch_tokens": 64, "threads": 1, "check_file": False}
    given["cache_folder"] = cache
    monkeypatch.setattr(attention, "attention_speeds", speeds(3.0))
    roomy = plan(path, memory="1GiB", kv_type="auto", **given)
    assert roomy.kv_type_reason.startswith("f16, for 8,192 tokens of text and 256 more: f16 ")
    plan(path, memory="1GiB", kv_type="auto", embeddings=False, **given)  # as the command line says it
    (place,) = cache.glob("kv-types/*")
    assert list(json.loads(place.read_bytes()).values()) == ["f16"], "one decision for both"
    small = plan(path, memory="1GiB", kv_type="q8_0", **given)
    assert not small.kv_type_reason
    config = ModelConfig(memory="1GiB", kv_type="q8_0", **given)
    assert attention.is_ratio_missing(config)
    assert planner(path, config).prepared.attention is None, "nothing was measured"
    kept = {"1 threads, 8 bytes": {"f16": (8.0, 8.0)}, "1 threads, 9 bytes": {"f16": (8.0, 8.0), "q8_0": (4.0, 2.0)}}
    attention._findings(config).write({**kept, "2 threads, 9 bytes": kept["1 threads, 9 bytes"]})
    assert planner(path, config).prepared.attention == attention.AttentionRatio(0.5, 0.25)
    assert not attention.is_ratio_missing(config)
    needed = sum(item.size_bytes for item in small.items)
    assert small.kv_bytes < roomy.kv_bytes
    short = plan(path, memory=needed + 8 * MIB, kv_type="auto", **given)
    assert short.kv_type_reason.startswith("q8_0, for")
    assert "f16" in short.kv_type_reason
    assert "no room for the whole context" in short.kv_type_reason
    assert (short.kv_bytes, short.context_tokens) == (small.kv_bytes, 16384)


def test_without_leave_to_measure_nothing_is_weighed(
    gguf: GgufModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `plan --no-probe`: what was chosen before stays, at first 16 bits; what is known is weighed all the same."""
    monkeypatch.setattr(attention, "_measure", lambda *given: pytest.fail("it measures"))
    sizes: dict[str, Any] = {"context_tokens": 512, "micro_batch_tokens": 64, "threads": 1}
    config = ModelConfig(memory="1GiB", kv_type="auto", cache_folder=cache, **sizes)
    unknown = prepare(gguf, config, is_opened=False, may_measure=False)
    assert unknown.kv_type_reason.startswith("f16: how fast attention is on fewer bits was not measured")
    assert not list(cache.glob("kv-types/*")), "nothing was decided"
    kept = {kind: (1e3 * 1e6**i, 1e3 * 1e6**i) for i, kind in enumerate(LEAST_GAINS)}
    attention._findings(config).write({attention._measured_as(1, 1 << 30): kept})
    known = prepare(gguf, config, is_opened=False, may_measure=False)
    assert known.kv_type_reason.startswith("q8_0/q4_0, for ")
    attention._findings(config).write({})
    assert prepare(gguf, config, is_opened=False, may_measure=False).config.kv_type == "q8_0/q4_0"


def test_a_disturbed_measurement_changes_no_choice(path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {"context_tokens": 16384, "micro_batch_tokens": 64, "threads": 1, "check_file": False}

    def choose(slowness: float, *, is_disturbed: bool) -> str:
        monkeypatch.setattr(attention, "attention_speeds", speeds(slowness, is_disturbed=is_disturbed))
        found = plan(path, memory="1GiB", kv_type="auto", cache_folder=cache, **given)
        return found.kv_type_reason.partition(",")[0]

    faster, slower = 1e-3, 1e3  # with fewer bits
    assert choose(faster, is_disturbed=True) != "f16"
    assert not list(cache.glob("kv-types/*")), "not kept"
    assert choose(slower, is_disturbed=False) == "f16"
    assert choose(faster, is_disturbed=True) == "f16"
    assert choose(faster, is_disturbed=False) != "f16"


def test_a_speed_is_kept_and_for_ten_minutes_where_it_was_disturbed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, measured = ModelConfig(threads=1, cache_folder=tmp_path), list[str]()
    now = attention.utc_now()

    def measure(kind: str, threads: int, budget_bytes: int) -> tuple[float, float]:
        measured.append(kind)
        return 1e9, 1e9

    monkeypatch.setattr(attention, "_measure", measure)
    for share, minutes, is_disturbed in ((0.5, 0, True), (0.0, 9, True), (0.0, 11, False)):
        monkeypatch.setattr(attention, "utc_now", lambda minutes=minutes: now + timedelta(minutes=minutes))
        monkeypatch.setattr(attention, "OtherLoad", lambda share=share: SimpleNamespace(share=share))
        found = attention.attention_speeds(config, ["f16"], 1 << 30)
        assert (found.by_type, found.is_disturbed) == ({"f16": (1e9, 1e9)}, is_disturbed)
    assert measured == ["f16"] * 2
    assert not attention.attention_speeds(config, ["f16"], 1 << 30).is_disturbed
    assert measured == ["f16"] * 2, "known"
    attention.attention_speeds(config, ["f16", "q5_1"], 1 << 30)
    attention.attention_speeds(config, ["f16", "q8_0"], 1 << 30)
    assert measured[2:] == ["f16", "q5_1", "f16", "q8_0", "q5_1"], "what is compared is measured at one time"
    assert attention.known_ratio(replace(config, kv_type="q5_1")) == attention.AttentionRatio(1.0, 1.0)


def test_a_disturbed_speed_of_attention_is_used_but_decides_nothing_that_stays(
    gguf: GgufModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig(threads=1, cache_folder=tmp_path, kv_type="q8_0/q8_0")
    speed, load = {"f16": 4.0, "q8_0": 1.0}, SimpleNamespace(share=0.5)
    monkeypatch.setattr(attention, "_measure", lambda kind, threads, budget_bytes: (speed[kind], speed[kind]))
    monkeypatch.setattr(attention, "OtherLoad", lambda: load)
    monkeypatch.setattr(kernels, "narrow_bytes", lambda budget_bytes: budget_bytes)
    assert attention.is_ratio_missing(config)
    attention.attention_speeds(config, [attention.PLAIN, attention.kind_of_keys(config)], 1 << 30)
    ratio = attention.known_ratio(config)
    assert ratio == attention.AttentionRatio(0.25, 0.25, is_disturbed=True)
    for profile, known, is_disturbed in ((PROFILE, ratio, True), (PROFILE, None, False), (None, ratio, None)):
        monkeypatch.setattr(probe, "recall", lambda gguf, config, profile=profile: profile)
        prepared = Prepared(gguf, config, 0, attention=known)
        assert getattr(_recalled(prepared), "is_disturbed", None) is is_disturbed
        times = OffloadTimes(prepared, _recalled)
        assert times.token_s(None) is None
        assert getattr(times.profile, "is_disturbed", None) is is_disturbed
    speed["q8_0"], load.share = 2.0, 0.0
    attention.attention_speeds(config, ["f16", "q8_0"], 2 << 30)  # which is measured with more memory
    assert attention.known_ratio(config) == attention.AttentionRatio(0.5, 0.5)
    speed["q8_0"], load.share = 3.0, 0.5
    attention.attention_speeds(config, ["f16", "q8_0"], 3 << 30)
    assert attention.known_ratio(config) == attention.AttentionRatio(0.5, 0.5), "what was disturbed counts for less"


@pytest.mark.parametrize(
    ("kv_type", "is_missing"), [("f16", False), ("f16/f16", False), ("auto", False), ("f32", True)]
)
def test_attention_on_16_bits_is_nothing_to_be_measured(kv_type: str, is_missing: bool, tmp_path: Path) -> None:
    assert attention.is_ratio_missing(ModelConfig(kv_type=kv_type, cache_folder=tmp_path)) == is_missing


def test_what_a_type_is_weighed_among_is_what_the_model_and_the_settings_allow(gguf: GgufModel) -> None:
    given: dict[str, Any]
    for given in ({"exact": True}, {"flash_attention": "off"}, {"context_shift": True}):
        config = ModelConfig(kv_type="auto", **given)
        able = [kind for kind in LEAST_GAINS if kv_type_choice._can_be(gguf, config, kind)]
        assert able == ["f16"]
    with pytest.raises(ConfigError, match="gpu_memory=0"):
        ModelConfig(kv_type="auto", gpu_memory="1GiB")


def test_a_type_that_has_no_room_is_left_out(gguf: GgufModel, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a plan, which does not ask before whether opening the model has room."""
    monkeypatch.setattr(attention, "attention_speeds", speeds(1.0))
    config = ModelConfig(
        memory="1GiB", kv_type="auto", context_tokens=512, micro_batch_tokens=64, threads=1, cache_folder=cache
    )

    def prepared(typed: ModelConfig) -> Prepared:
        asked = replace(typed, memory=1) if typed.kv_type == "f16" else typed
        return prepare(gguf, asked, is_opened=False)

    found = kv_type_choice.choose_kv_type(gguf, config, prepared, lambda prepared: None)
    assert found.config.kv_type == "q8_0"


def test_each_type_is_planned_once(gguf: GgufModel, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "attention_speeds", speeds(1.0))
    planned, plan_it = list[str](), Planner.plan

    def noted(planner: Planner, budget_bytes: int | None = None) -> Plan:
        planned.append(planner.config.kv_type)
        return plan_it(planner, budget_bytes)

    config = ModelConfig(
        memory="1GiB", kv_type="auto", context_tokens=512, micro_batch_tokens=64, threads=1, cache_folder=cache
    )
    able = [kind for kind in LEAST_GAINS if kv_type_choice._can_be(gguf, config, kind)]
    prepared = {kind: prepare(gguf, replace(config, kv_type=kind), is_opened=False) for kind in able}
    monkeypatch.setattr(Planner, "plan", noted)
    kv_type_choice.choose_kv_type(gguf, config, lambda typed: prepared[typed.kv_type], lambda prepared: None)
    assert planned == able
    assert len(able) > 1


def prepared_as(
    gguf: GgufModel, cache: Path, kv_type: str, profile: DeviceProfile | None = None, memory: str = "1GiB"
) -> Prepared:
    """Return a model prepared with that type, which may be left open, on a device of that profile."""
    sizes: dict[str, Any] = {"context_tokens": 512, "micro_batch_tokens": 64, "threads": 1}
    config = ModelConfig(memory=memory, kv_type=kv_type, cache_folder=cache, **sizes)
    if kv_type != "auto":
        return prepare(gguf, config, is_opened=False)
    return kv_type_choice.choose_kv_type(
        gguf, config, lambda typed: prepare(gguf, typed, is_opened=False), lambda prepared: profile
    )


def test_a_choice_that_changes_is_the_last_to_be_forgotten(
    gguf: GgufModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for slowness, memory in ((1e3, "1GiB"), (1e3, "2GiB"), (1e-3, "1GiB")):  # with fewer bits
        monkeypatch.setattr(attention, "attention_speeds", speeds(slowness))
        prepared_as(gguf, cache, "auto", SLOW, memory)
    (place,) = cache.glob("kv-types/*")
    first, last = json.loads(place.read_bytes()).values()
    assert first == "f16"
    assert last != "f16"


def test_a_forecast_rests_on_the_speeds_that_the_type_was_chosen_by(
    gguf: GgufModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "attention_speeds", speeds(1e-3))
    found = prepared_as(gguf, cache, "auto", SLOW)
    assert found.config.kv_type != "f16"
    planners = [Planner(prepared) for prepared in (found, replace(found, attention=None))]
    measured, guessed = (one.times(one.plan(), SLOW).compute_s(TILE_TOKENS, 0) for one in planners)
    assert measured < guessed / 100


def test_passes_of_many_tokens_are_as_slow_on_few_bits_whoever_asks_where_that_was_not_measured(
    gguf: GgufModel, cache: Path
) -> None:
    """One who asks is the choice of their width."""
    planners = [Planner(prepared_as(gguf, cache, kv_type)) for kv_type in ("f16", "q8_0")]
    profile = replace(PROFILE, attention_flops_per_s=(1e3, 1e6))
    f16, q8_0 = (one.times(one.plan(), profile) for one in planners)
    assert q8_0.compute_s(1, 0) == pytest.approx(f16.compute_s(1, 0))
    assert q8_0.compute_s(TILE_TOKENS, 0) > 100 * f16.compute_s(TILE_TOKENS, 0)


def test_a_disturbed_device_changes_no_choice(gguf: GgufModel, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(slowness: float, *, is_disturbed: bool) -> str:
        monkeypatch.setattr(attention, "attention_speeds", speeds(slowness))
        return str(prepared_as(gguf, cache, "auto", replace(SLOW, is_disturbed=is_disturbed)).config.kv_type)

    faster, slower = 1e-6, 1e6  # with fewer bits
    assert choose(faster, is_disturbed=True) != "f16"
    assert not list(cache.glob("kv-types/*")), "not kept"
    assert choose(slower, is_disturbed=False) == "f16"
    assert choose(faster, is_disturbed=True) == "f16"
