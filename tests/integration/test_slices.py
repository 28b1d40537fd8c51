"""Slices: engines that each compute some layers of a model give the logits of one engine, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import slices
from edge_run.base.config import ModelConfig
from edge_run.base.errors import BudgetError
from edge_run.base.units import MIB
from edge_run.devices.memory import process_memory
from edge_run.runtime.slice_engine import SliceEngine
from in_child import in_child
from tiny_models import make_model

# Scales its input; reuses earlier layers' keys and values; has states that are prepared early; is a mixture; runs its
# blocks several times; has several tensors alive at a cut; learns its positions.
ARCHITECTURES = ("granite", "gemma3n", "mamba", "granitehybrid", "qwen3moe", "nanbeige", "deepseek4", "gpt2")


def compare(path: Path, *flags: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, slices.__file__, str(path), *flags],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "OMP_WAIT_POLICY": "passive", "GGML_NO_BACKTRACE": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_three_engines_give_the_logits_of_one(name: str, folder: Path) -> None:
    found = compare(make_model(name, folder), "--owners", "1,2,1", "--again")
    assert found["finite"]
    assert (found["different_rows"], found["different_again"]) == (0, 0)
    assert found["units"] > 4
    assert found["sent_bytes"] > 0
    assert min(found["kv_bytes"]) < max(found["kv_bytes"]), "the others' keys and values take no memory"


@pytest.mark.parametrize("name", ["granite", "mamba"])
def test_and_so_they_do_when_they_stream(name: str, folder: Path) -> None:
    found = compare(make_model(name, folder), "--owners", "1,1", "--streams")
    assert found["different_rows"] == 0
    assert found["streamed_bytes"][0] > 0


@pytest.mark.parametrize("name", ["granite", "gemma3n", "mamba", "gpt2"])
def test_and_when_what_wide_passes_compute_in_is_lent_in_between(name: str, folder: Path) -> None:
    found = compare(make_model(name, folder), "--owners", "1,1", "--lends", "--prefill", "150", "--decode", "12")
    assert found["different_rows"] == 0
    assert min(found["lent_bytes"]) > 0
    assert min(found["times_lent"]) > 2


@pytest.mark.parametrize("name", ["granite", "mamba"])
def test_and_when_what_streams_of_a_turn_is_held_for_all_of_it(name: str, folder: Path) -> None:
    flags = ("--prefill", "150", "--decode", "12", "--turns")
    found = compare(make_model(name, folder), "--owners", "1,1", *flags)
    assert found["different_rows"] == 0
    assert found["takes_turns"] == [True, True]
    assert min(found["streamed_bytes"]) > 0
    assert min(found["times_lent"]) > 2


@in_child
def test_a_budget_without_room_for_the_whole_context_is_refused_before_that_is_made(folder: Path) -> None:
    """While a slice opens, the keys and values of all layers are there; they must not be more than was allowed."""
    path = make_model("llama", folder)
    options = {"context_tokens": 1 << 18, "micro_batch_tokens": 8, "threads": 1, "cache_folder": folder / "cache"}
    held = process_memory().resident_bytes
    engine = SliceEngine(path, ModelConfig(memory="2GiB", **options))
    kv_bytes, buffer_bytes = engine.holdings.kv_bytes, engine.holdings.buffer_bytes
    engine.close()
    assert kv_bytes > 64 * MIB
    assert process_memory().peak_bytes > held + kv_bytes, "all of it was there for a moment"
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is held now
    with pytest.raises(BudgetError, match="context of 262,144 tokens"):
        SliceEngine(path, ModelConfig(memory=kv_bytes + buffer_bytes + 16 * MIB, **options))
    assert process_memory().peak_bytes < held + kv_bytes
