"""tiny_models: llama.cpp loads every model, whole, split and quantised, and computes something with it."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as low
import numpy as np
import pytest
from gguf import GGUFReader
from numpy.typing import NDArray

from edge_run.runtime.planning.speculation_shape import RECURRENT
from llama_tensors import silence_llama_logs
from recipes.recipe import N_EXPERT
from tiny_models import ARCHITECTURES, N_VOCAB, make_model, split_model

PROMPT_TOKENS = 16
DECODED_TOKENS = 3
MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> None:
    silence_llama_logs()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that goes with the test: pytest's own would keep gigabytes for days."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def logits_of(path: Path) -> NDArray[np.float32]:
    """What llama.cpp says after a prefill and after each token decoded, `(1 + DECODED_TOKENS, N_VOCAB)`.

    The tokens are random: a random model's own choice is often one token over and over.
    """
    model_params = low.llama_model_default_params()
    model_params.n_gpu_layers = 0
    model_params.use_extra_bufts = False
    model = low.llama_model_load_from_file(os.fsencode(path), model_params)
    assert model, f"llama.cpp did not load {path.name}"
    context_params = low.llama_context_default_params()
    context_params.n_ctx = 128
    context_params.n_threads = context_params.n_threads_batch = 1
    context = low.llama_init_from_model(model, context_params)
    try:
        tokens = np.random.default_rng(0).integers(N_VOCAB, size=PROMPT_TOKENS + DECODED_TOKENS).tolist()
        rows = [_decode(context, tokens[:PROMPT_TOKENS])]
        rows += [_decode(context, [token]) for token in tokens[PROMPT_TOKENS:]]
    finally:
        low.llama_free(context)
        low.llama_model_free(model)
    return np.stack(rows)


def _decode(context: Any, tokens: list[int]) -> NDArray[np.float32]:
    array = (ctypes.c_int32 * len(tokens))(*tokens)  # named, so that it outlives the batch, which only points to it
    assert low.llama_decode(context, low.llama_batch_get_one(array, len(array))) == 0
    return np.ctypeslib.as_array(low.llama_get_logits_ith(context, -1), (N_VOCAB,)).copy()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_llama_computes_with_every_architecture(name: str) -> None:
    path = make_model(name, Path(os.environ["TINY_MODELS"]))  # not a copy, as it is only read
    assert 4 * MIB < path.stat().st_size < 24 * MIB
    logits = logits_of(path)
    assert np.isfinite(logits).all()
    assert (logits.std(axis=1) > 1e-3).all(), "the same logit for every token"
    assert (logits[1:] != logits[:-1]).any(axis=1).all(), "the same logits at every position"


def test_what_has_recurrent_state_is_known_without_loading_it() -> None:
    """Names of tensors do not say it of all."""
    params = low.llama_model_default_params()
    params.vocab_only = True
    found = set[str]()
    for name, recipe in ARCHITECTURES.items():
        path = make_model(name, Path(os.environ["TINY_MODELS"]))
        model = low.llama_model_load_from_file(os.fsencode(path), params)
        assert model, name
        if low.llama_model_is_recurrent(model) or low.llama_model_is_hybrid(model):
            found.add(recipe.architecture)
        low.llama_model_free(model)
    assert found == RECURRENT


@pytest.mark.parametrize("quantisation", ["Q8_0", "Q4_0", "Q4_K_M"])
def test_quantised(quantisation: str, folder: Path) -> None:
    path = make_model("qwen3moe", folder, quantisation=quantisation)
    assert path.name == f"qwen3moe-1-0-{quantisation}.gguf"
    types = {tensor.tensor_type.name for tensor in GGUFReader(path).tensors}
    assert quantisation.removesuffix("_M") in types
    assert np.isfinite(logits_of(path)).all()


@pytest.mark.parametrize(("name", "quantisation"), [("llama", None), ("granitehybrid", "Q4_0")])
@pytest.mark.parametrize("parts", [1, 2, 5])
def test_split_models_give_the_logits_of_the_whole(
    name: str, quantisation: str | None, parts: int, folder: Path
) -> None:
    path = make_model(name, folder, quantisation=quantisation)
    shards = split_model(path, parts, folder)
    assert [shard.name for shard in shards] == [
        f"{path.stem}-{part:05d}-of-{parts:05d}.gguf" for part in range(1, parts + 1)
    ]
    assert max(shard.stat().st_size for shard in shards) < 2 * path.stat().st_size // parts
    assert np.array_equal(logits_of(shards[0]), logits_of(path))


def test_as_many_shards_as_tensors(folder: Path) -> None:
    path = make_model("gpt2", folder)
    n_tensors = len(GGUFReader(path).tensors)
    shards = split_model(path, n_tensors, folder)
    assert [len(GGUFReader(shard).tensors) for shard in shards] == [1] * n_tensors
    with pytest.raises(ValueError, match=f"{n_tensors} tensors"):
        split_model(path, n_tensors + 1, folder)


def test_the_same_seed_gives_the_same_bytes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINY_MODELS")
    first = make_model("jamba", folder / "first").read_bytes()
    assert make_model("jamba", folder / "second").read_bytes() == first
    assert make_model("jamba", folder / "first", seed=1).read_bytes() != first


@pytest.mark.parametrize("name", ["llama", "nemotron_h", "llama-moe", "glm4moe", "mamba"])
def test_scale_grows_the_file(name: str, folder: Path) -> None:
    small, large = make_model(name, folder), make_model(name, folder, scale=3)
    assert large.name == f"{name}-3-0.gguf"
    assert large.stat().st_size > 2 * small.stat().st_size
    assert np.isfinite(logits_of(large)).all()


def test_a_model_is_made_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINY_MODELS", str(tmp_path / "store"))
    path = make_model("llama", folder)
    made_at = path.stat().st_mtime_ns
    assert make_model("llama", folder).stat().st_mtime_ns == made_at
    assert [entry.name for entry in folder.iterdir()] == ["llama-1-0.gguf"]
    stored = tmp_path / "store" / path.name
    stored_at = stored.stat().st_mtime_ns
    other = make_model("llama", folder / "other")
    assert other.read_bytes() == path.read_bytes() == stored.read_bytes()
    assert not other.samefile(stored)
    assert stored.stat().st_mtime_ns == stored_at


def test_moe_models_have_experts_to_choose_from(folder: Path) -> None:
    moe_models = [name for name, recipe in ARCHITECTURES.items() if recipe.n_expert]
    assert len(moe_models) > 40
    for tensor in GGUFReader(make_model("llama-moe", folder)).tensors:
        if "_exps" in tensor.name:
            assert tensor.shape[2] == N_EXPERT


def test_failure_names_the_reason_and_leaves_no_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = ARCHITECTURES["dbrx"]
    monkeypatch.setitem(recipe.metadata, "attention.clamp_kqv", "high")  # type: ignore[arg-type]
    monkeypatch.delenv("TINY_MODELS")
    with pytest.raises(RuntimeError, match=r"dbrx.*clamp_kqv"):
        make_model("dbrx", folder)
    assert not list(folder.iterdir())
