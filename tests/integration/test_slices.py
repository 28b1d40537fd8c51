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
