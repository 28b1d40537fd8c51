"""What a plan says where the device could not be measured, or what was measured not kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench_samples import FORECAST, PLAN, PROFILE
from edge_run.base.config import ModelConfig
from edge_run.base.errors import ContextFull, TierReadError
from edge_run.base.profile import DeviceProfile
from edge_run.base.results import Plan
from edge_run.cli.commands.plan import _measured, _timed
from edge_run.devices.host.profile import ProfileStore
from edge_run.devices.host.scratch import NoScratchError

PROBE = "edge_run.runtime.probing.probe"


@pytest.fixture
def said() -> list[str]:
    """What is said."""
    return []


def profile(said: list[str], folder: Path) -> DeviceProfile | None:
    planned: Any = SimpleNamespace(gguf=None, config=ModelConfig(cache_folder=folder))
    terminal: Any = SimpleNamespace(say=lambda text, *style: said.append(text), show=lambda text: None)
    return _measured(planned, folder / "model.gguf", terminal)


def test_a_disk_that_cannot_be_measured_leaves_a_plan_without_times(
    said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object, **options: object) -> DeviceProfile:
        raise NoScratchError("/models: writing 256 MiB to measure this disk failed (Permission denied)")

    monkeypatch.setattr(f"{PROBE}.probe", fail)
    assert profile(said, tmp_path) is None
    assert said[1:] == [
        "A plan without times: /models: writing 256 MiB to measure this disk failed (Permission denied)"
    ]


def test_a_drive_that_fails_is_an_error(said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object, **options: object) -> DeviceProfile:
        raise TierReadError("/models/m.gguf: reading failed (Input/output error)", needed_bytes=1)

    monkeypatch.setattr(f"{PROBE}.probe", fail)
    with pytest.raises(TierReadError, match="Input/output error"):
        profile(said, tmp_path)


def test_budgets_are_compared_without_times_where_the_prompt_has_no_room() -> None:
    """The context of the smallest is shorter than what was asked for."""

    def timed(plan: Plan, profile: object, prompt_tokens: int) -> Plan:
        if prompt_tokens >= plan.context_tokens:
            raise ContextFull("too long")
        return replace(plan, forecast=replace(FORECAST, prompt_tokens=prompt_tokens))

    planned: Any = SimpleNamespace(timed=timed)
    plans = [replace(PLAN, forecast=None, context_tokens=tokens) for tokens in (512, 1024, 4096)]
    found = [plan.forecast and plan.forecast.prompt_tokens for plan in _timed(planned, plans, PROFILE, 1000)]
    assert found == [None, 1000, 1000]
    with pytest.raises(ContextFull):
        list(_timed(planned, plans, PROFILE, 5000))


@pytest.mark.parametrize("problem", ["", "/cache: cannot be written (Read-only file system)"])
def test_what_is_not_kept_is_not_said_to_be(
    problem: str, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*given: object, store: ProfileStore, **options: object) -> DeviceProfile:
        store.problem = problem
        return PROFILE

    monkeypatch.setattr(f"{PROBE}.probe", measure)
    assert profile(said, tmp_path) is PROFILE
    assert said[0] == "Measuring this device for this model; it takes some seconds."
    assert said[1:] == [f"Note: {problem}"] * bool(problem)
