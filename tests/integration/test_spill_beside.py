"""What keys and values in a file go with, what is refused beside them, and what a plan says of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_run.base.config import ModelConfig
from edge_run.base.errors import ConfigError, NotSupported
from edge_run.base.units import KIB, MIB
from edge_run.runtime.keeping.opening import open_keeper
from edge_run.runtime.planning.plan import planner
from exactness import open_at
from in_child import in_child
from program import run_program
from spilling import open_spilling
from talks import OPTIONS
from tiny_models import make_model


def test_what_it_excludes_is_refused_in_one_line(tmp_path: Path) -> None:
    for options in ({"gpu_memory": "1GiB"}, {"backend": "llama.cpp"}):
        with pytest.raises(ConfigError, match="kv spill: "):
            ModelConfig(kv_spill=tmp_path, **options)


@in_child
def test_a_model_without_flash_attention(folder: Path) -> None:
    """It is refused where values of its context have no room, and only there."""
    path = make_model("grok", folder)
    with pytest.raises(NotSupported, match="flash attention"):
        open_spilling(path, folder)
    engine = open_at(path, 0.3, {**OPTIONS, "kv_spill": folder, "context_tokens": 512}, chunk_bytes=32 * KIB)
    assert engine.kv_spill is None
    engine.close()


@in_child
def test_the_prompt_cache_gives_way(folder: Path) -> None:
    path, said = make_model("llama", folder), list[str]()
    engine = open_spilling(path, folder, prompt_cache=folder / "prompts")
    assert open_keeper(engine, said.append) is None
    assert "kv_spill='off' keeps prompts" in said[0]
    engine.close()


def test_a_plan_says_what_is_away(folder: Path) -> None:
    path = make_model("hrm_text", folder)
    options = {**OPTIONS, "check_file": True, "context_tokens": 32_768, "cache_folder": folder}
    least = planner(path, ModelConfig(memory=MIB, **options)).sweep()[0].minimum_bytes
    plans = {
        spill: planner(path, ModelConfig(memory=least + 56 * MIB, kv_spill=spill, **options)).plan()
        for spill in ("on", "off")
    }
    assert plans["on"].context_tokens == 32_768 > plans["off"].context_tokens
    assert plans["off"].spilled_kv_bytes == 0 < plans["on"].spilled_kv_bytes
    assert [point.kv_bytes_per_pass > 0 for point in plans["on"].by_context] == [False, False, False, True, True]
    flags = ("-c", 32_768, "--memory", least + 56 * MIB, "--kv-spill", "on", "--no-probe", "--cache-dir", folder)
    said = run_program("plan", path, *flags)
    assert said.returncode == 0
    assert "keys and values" in said.stdout
