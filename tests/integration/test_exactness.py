"""The merge gate: streamed logits are llama.cpp's, bit for bit, on many architectures and under many numerics keys.

Each model is run in a child process (`tests/exactness.py`): a read of weights that are not resident ends the process.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edge_run.base.config import CHUNK_BYTES, ModelConfig
from edge_run.base.units import KIB
from in_child import run_script
from tiny_models import make_model, split_model

SCRIPT = Path(__file__).resolve().parents[1] / "exactness.py"
KIT = Path(__file__).resolve().parents[2] / "src" / "edge_run" / "models" / "kit-dense-q4_0.gguf"

DENSE = ["llama", "qwen3", "gemma3", "phi3", "granite", "gpt2", "command-r"]
MOE_MODELS = ["llama-moe", "qwen3moe", "deepseek2", "gpt-oss", "smallthinker"]
STATEFUL = ["mamba", "rwkv7", "jamba", "plamo2"]
# Slow ones, and such that differ in memory alone: layers run twice, tensors in the file that nothing uses (so llama.cpp
# gives back a part of the mapping), graphs that turn out otherwise than expected in the middle of a segment.
MORE = ["gemma3n", "hrm_text", "falcon-h1", "lfm2", "qwen3next", "glm4moe", "minimax-m3", "qwen4exp"]
SHORT = ("--prefill", "70", "--decode", "12")
FEW = ("--decode", "10")  # where each token reads the same weights
SOME = ("--decode", "24")
USUAL = ("--chunk-kib", str(CHUNK_BYTES // KIB), "--readers", str(ModelConfig().readers))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the models of this module are made."""
    return tmp_path_factory.mktemp("models")


def compare(path: Path, *arguments: str) -> dict[str, Any]:
    """Return what the comparison of `path` printed."""
    done = run_script(SCRIPT, str(path), *arguments)
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stderr}"
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def check(figures: dict[str, Any]) -> None:
    """Assert that all budgets gave the same logits, that some really streamed, and that every budget was kept."""
    runs = figures["runs"]
    assert figures["finite"]
    assert figures["spread"] > 0
    assert [run["different_rows"] for run in runs] == [0] * len(runs)
    assert runs[0]["mode"] == "streamed"
    assert runs[0]["streamed_bytes"] > 0
    assert runs[-1]["mode"] == "resident"
    assert all(run["peak_bytes"] <= run["budget_bytes"] for run in runs), runs


@pytest.mark.parametrize("name", DENSE + STATEFUL)
def test_prompt_of_300_and_10_decoded_tokens(name: str, folder: Path) -> None:
    check(compare(make_model(name, folder), *FEW))


@pytest.mark.parametrize("name", MOE_MODELS)
def test_moe_models(name: str, folder: Path) -> None:
    """The same prompt, and 24 tokens, each with experts of its own.

    There is room for little more than a tensor of experts, and for more of them.
    """
    figures = compare(make_model(name, folder), "--by-expert", *SOME)
    check(figures)
    assert all(run["expert_bytes"] > 0 for run in figures["runs"][1:-1]), "not streamed by expert"


@pytest.mark.parametrize("name", MORE)
def test_prompt_of_70_and_12_decoded_tokens(name: str, folder: Path) -> None:
    check(compare(make_model(name, folder), *SHORT))


def test_the_bundled_model(folder: Path) -> None:
    check(compare(KIT, "--micro-batch", "16", *FEW))  # with more rows of logits lent, tokens would read nothing


def test_with_chunks_of_the_size_that_runs_have(grown: Path) -> None:
    """Of 2 MiB, in a model that is large against them."""
    figures = compare(grown, *USUAL, *SHORT)
    check(figures)
    assert all(run["streamed_bytes"] > 20 * CHUNK_BYTES for run in figures["runs"][:-1])


def test_moe_models_with_chunks_of_the_size_that_runs_have(folder: Path) -> None:
    path = make_model("qwen3moe", folder, scale=8)
    figures = compare(path, *USUAL, "--by-expert", *SHORT)
    check(figures)
    assert all(run["expert_bytes"] > 0 for run in figures["runs"][1:-1]), "not streamed by expert"


@pytest.mark.parametrize("width", ["1", "7", "512"])
def test_micro_batches(width: str, folder: Path) -> None:
    prefill = "24" if width == "1" else "70"  # of one token: a pass each
    check(compare(make_model("llama", folder), "--micro-batch", width, "--prefill", prefill, "--decode", "6"))


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "q8_0/q4_0"])
def test_kv_types(kind: str, folder: Path) -> None:
    check(compare(make_model("qwen3", folder), "--kv-type", kind, *SHORT))


def test_without_flash_attention(folder: Path) -> None:
    check(compare(make_model("qwen3", folder), "--flash-attention", "off", *SHORT))


def test_two_threads(folder: Path) -> None:
    check(compare(make_model("qwen3moe", folder), "--threads", "2", *SHORT))


@pytest.mark.parametrize("quantisation", ["Q8_0", "Q4_K_M"])
def test_quantised(quantisation: str, folder: Path) -> None:
    check(compare(make_model("llama", folder, scale=2, quantisation=quantisation), *SHORT))


def test_a_split_model(folder: Path) -> None:
    first, *_ = split_model(make_model("qwen3moe", folder), 3, folder)
    check(compare(first, *SHORT))
