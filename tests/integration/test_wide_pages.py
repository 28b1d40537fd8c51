"""Kernels whose pages have 16 or 64 KiB, as many on ARM do: `wide_pages.c` plays them, and refuses what they refuse."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from edge_run.base.units import KIB
from in_child import TIMEOUT_S
from injector import build, compiler
from tiny_models import make_model

TESTS = Path(__file__).resolve().parents[1]
NARROW = """
from edge_run import ConfigError, ModelConfig
from edge_run.tiers import _libc
ModelConfig(chunk_bytes=_libc.PAGE)
try:
    ModelConfig(chunk_bytes=_libc.PAGE // 2)
except ConfigError as error:
    print(_libc.PAGE, error)
"""

pytestmark = pytest.mark.skipif(compiler() is None or os.sysconf("SC_PAGESIZE") != 4 * KIB, reason="plays on 4 KiB")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What lets a process have wide pages."""
    return build(tmp_path_factory.mktemp("library"), TESTS / "wide_pages.c")


def run(library: Path, page_kib: int, *arguments: object) -> str:
    """Run Python in a process that has pages of `page_kib`; return what it printed."""
    environment = {**os.environ, "LD_PRELOAD": str(library), "WIDE_PAGES": str(page_kib * KIB)}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=TESTS, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("page_kib", "model"), [(16, "llama"), (64, "llama"), (64, "qwen3moe")])
def test_streamed_logits_are_the_same(library: Path, page_kib: int, model: str, tmp_path: Path) -> None:
    path = make_model(model, tmp_path, scale=2)
    more = ("--by-expert",) if model == "qwen3moe" else ()
    figures = json.loads(run(library, page_kib, TESTS / "exactness.py", path, "--prefill", 70, "--decode", 6, *more))
    runs = figures["runs"]
    assert [run["different_rows"] for run in runs] == [0] * len(runs)
    assert runs[0]["streamed_bytes"] > 0
    assert [run["mode"] for run in runs] == ["streamed"] * (len(runs) - 1) + ["resident"]


def test_a_chunk_is_a_page_or_more(library: Path) -> None:
    assert run(library, 64, "-c", NARROW).startswith(
        "65536 chunk of 32768 bytes: must be a power of two from 65536 to "
    )
