"""Growing models: llama.cpp computes the same with the grown file, its size is as asked, other models are refused."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import gguf
import llama_cpp.llama_cpp as low
import numpy as np
import numpy.typing as npt
import pytest

from edge_run.base.errors import ConfigError, ModelFileError, NotSupported
from edge_run.runtime.tools import inflate_blocks
from edge_run.runtime.tools.inflate import inflate, plan_growth
from edge_run.runtime.tools.inflate_source import LEAST_WIDTH_STEP, ROLES, SUPPORTED_TYPES, Role, read_source
from edge_run.tiers.gguf import read_gguf
from edge_run.tiers.gguf_format import TENSOR_TYPES
from kit_models import KIT
from llama_tensors import silence_llama_logs
from tiny_models import ARCHITECTURES, make_model

PROMPT = b"It was a dark evening, and the old man at the door"
N_GREEDY_TOKENS = 20
LOGIT_NOISE = 1e-4  # sums may be taken in another order; logits reach about 10

Logits = npt.NDArray[np.float32]


@contextmanager
def llama(path: Path) -> Iterator[tuple[ctypes.c_void_p, ctypes.c_void_p]]:
    """A model and a context of one thread, without repacking or flash attention."""
    silence_llama_logs()
    low.llama_backend_init()
    model_params = low.llama_model_default_params()
    model_params.n_gpu_layers = 0
    model_params.use_extra_bufts = False
    model = low.llama_model_load_from_file(os.fsencode(path), model_params)
    assert model, path
    params = low.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 128
    params.n_threads = params.n_threads_batch = 1
    params.flash_attn_type = 0
    context = low.llama_init_from_model(model, params)
    try:
        yield model, context
    finally:
        low.llama_free(context)
        low.llama_model_free(model)


def decode(model: ctypes.c_void_p, context: ctypes.c_void_p, tokens: list[int]) -> Logits:
    """Return the logits after the last of `tokens`."""
    array = (low.llama_token * len(tokens))(*tokens)
    assert low.llama_decode(context, low.llama_batch_get_one(array, len(tokens))) == 0
    n_vocab = low.llama_vocab_n_tokens(low.llama_model_get_vocab(model))
    return np.array(np.ctypeslib.as_array(low.llama_get_logits_ith(context, -1), (n_vocab,)))


def continue_greedily(path: Path, prompt: list[int] | None = None) -> tuple[list[int], list[Logits]]:
    """Return the tokens that follow the prompt (`PROMPT` when None), and the logits that each was chosen from."""
    tokens: list[int] = []
    logits: list[Logits] = []
    with llama(path) as (model, context):
        if prompt is None:
            array = (low.llama_token * 64)()
            vocabulary = low.llama_model_get_vocab(model)
            count = low.llama_tokenize(vocabulary, PROMPT, len(PROMPT), array, 64, True, False)
            prompt = list(array[:count])
        logits.append(decode(model, context, prompt))
        for _ in range(N_GREEDY_TOKENS):
            tokens.append(int(logits[-1].argmax()))
            logits.append(decode(model, context, tokens[-1:]))
    return tokens, logits


def smallest_with(source: Path, layers: int) -> int:
    """Return the size of `source` with `layers` layers that are as wide as its own."""
    with pytest.raises(ConfigError) as refused:
        plan_growth(read_source(source), 1, layers)
    return refused.value.needed_bytes


def assert_same_bits(small: Path, big: Path, prompt: list[int] | None = None) -> None:
    tokens, logits = continue_greedily(small, prompt)
    grown_tokens, grown_logits = continue_greedily(big, prompt)
    assert grown_tokens == tokens
    assert all(np.array_equal(a, b) for a, b in zip(logits, grown_logits, strict=True))


def assert_same_computation(small: Path, big: Path, prompt: list[int] | None = None) -> None:
    tokens, logits = continue_greedily(small, prompt)
    grown_tokens, grown_logits = continue_greedily(big, prompt)
    assert grown_tokens == tokens
    assert max(np.abs(a - b).max() for a, b in zip(logits, grown_logits, strict=True)) < LOGIT_NOISE


@pytest.mark.parametrize(("layers", "n_layers"), [(None, 8), (8, 8), (9, 9), (13, 13), (24, 24)])
def test_grown_kit_model_computes_the_same(tmp_path: Path, layers: int | None, n_layers: int) -> None:
    size_bytes = 30_000_000
    big = inflate(KIT, tmp_path / "big.gguf", size_bytes, layers)
    model = read_gguf(big)
    assert 0 <= size_bytes - big.stat().st_size < 32 * 3 * n_layers * 180 + 10_000, "more than one step below"
    assert model.value("block_count") == n_layers
    assert model.value("feed_forward_length") == next(t.shape[1] for t in model.tensors if "ffn_up" in t.name)
    assert_same_computation(KIT, big)


FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K": 12,
              "Q4_K": 15, "Q5_K": 17, "Q6_K": 18, "IQ4_NL": 25, "IQ3_S": 26, "IQ4_XS": 30, "BF16": 32}  # fmt: skip
TYPE_IDS = {kind.name: number for number, kind in TENSOR_TYPES.items()}
PROMPT_TOKENS = [5, 17, 101, 42, 300, 7]


def quantised(source: Path, target: Path, kind: str, is_pure: bool = True) -> Path:
    """Store all matrices of `source` in the type `kind`; when not `is_pure` the mixture that llama.cpp makes of it."""
    params = low.llama_model_quantize_default_params()
    params.ftype, params.pure, params.nthread = FILE_TYPES[kind], is_pure, 1
    silence_llama_logs()
    assert low.llama_model_quantize(os.fsencode(source), os.fsencode(target), ctypes.byref(params)) == 0
    return target


def types_of(path: Path) -> dict[str, set[str]]:
    """Return the types of the matrices, by their name within a layer, and of those outside under their own."""
    found: dict[str, set[str]] = {}
    for tensor in read_gguf(path).tensors:
        found.setdefault(re.sub(r"^blk\.\d+\.", "", tensor.name), set()).add(TENSOR_TYPES[tensor.type_id].name)
    return found


@pytest.mark.parametrize("kind", ["F32", "F16", "Q4_0", "Q8_0", "Q5_1", "Q4_K", "Q6_K"])
@pytest.mark.parametrize(("name", "layers"), [("qwen3moe", None), ("qwen3moe", 7), ("llama-moe", 5), ("qwen2", 6)])
def test_other_models_compute_the_same(tmp_path: Path, name: str, layers: int | None, kind: str) -> None:
    small = quantised(make_model(name, tmp_path), tmp_path / "small.gguf", kind)
    big = inflate(small, tmp_path / "big.gguf", 6 * small.stat().st_size, layers)
    assert big.stat().st_size > 4 * small.stat().st_size, "within a step, which K-quants have of 256 neurons"
    assert types_of(big) == types_of(small)
    assert kind in types_of(small)["attn_q.weight"]
    assert_same_computation(small, big, PROMPT_TOKENS)


@pytest.fixture
def _slim(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models whose rows are one block of a K-quant: llama.cpp takes seconds to find the best IQ4 for usual ones.

    They have names of their own, as all tests share what was made under a name.
    """
    for name, slim in (("llama", {"n_ff": 256}), ("qwen3moe", {"n_layer": 2})):
        monkeypatch.setitem(ARCHITECTURES, f"slim-{name}", replace(ARCHITECTURES[name], **slim))


@pytest.mark.usefixtures("_slim")
@pytest.mark.parametrize("kind", SUPPORTED_TYPES)
@pytest.mark.parametrize("name", ["slim-qwen3moe", "slim-llama"])
def test_layers_alone_change_no_bit(tmp_path: Path, name: str, kind: str) -> None:
    """Neither of a prompt's logits nor of a token's: every matrix keeps its size, and the last layer is the last."""
    small = quantised(make_model(name, tmp_path), tmp_path / "small.gguf", kind)
    for layers in (5, 11):
        big = inflate(small, tmp_path / f"{layers}.gguf", smallest_with(small, layers), layers)
        model = read_gguf(big)
        assert model.value("block_count") == layers
        assert_same_bits(small, big, PROMPT_TOKENS)


@pytest.mark.parametrize("layers", [None, 30])
def test_a_mixture_of_types_keeps_each_where_it_is(tmp_path: Path, layers: int | None) -> None:
    """As in files called Q4_K_M: most matrices Q4_K, some Q6_K, and Q5_0 or Q8_0 where rows are not whole blocks."""
    small = quantised(make_model("qwen2", tmp_path), tmp_path / "small.gguf", "Q4_K", is_pure=False)
    assert len({kind for kinds in types_of(small).values() for kind in kinds}) >= 3
    size_bytes = smallest_with(small, layers) if layers else 3 * small.stat().st_size
    big = inflate(small, tmp_path / "big.gguf", size_bytes, layers)
    assert types_of(big) == types_of(small)
    assert read_gguf(big).value("feed_forward_length") % 256 == 0, "whole blocks of Q4_K and Q6_K"
    (assert_same_bits if layers else assert_same_computation)(small, big, PROMPT_TOKENS)
    outside = ("token_embd.weight", "output.weight", "output_norm.weight")
    raw = {path: path.read_bytes() for path in (small, big)}
    kept = [
        {t.name: raw[path][t.offset :][: t.size_bytes] for t in read_gguf(path).tensors if t.name in outside}
        for path in (small, big)
    ]
    assert kept[0] == kept[1]
    assert "token_embd.weight" in kept[0]


def test_rows_wider_than_a_piece_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = inflate(KIT, tmp_path / "usual.gguf", 15_000_000, 10).read_bytes()
    monkeypatch.setattr(inflate_blocks, "PIECE_BYTES", 500)
    assert inflate(KIT, tmp_path / "pieces.gguf", 15_000_000, 10).read_bytes() == usual


def test_trained_and_added_bytes_lie_where_they_should(tmp_path: Path) -> None:
    big = inflate(KIT, tmp_path / "big.gguf", 15_000_000, 16)
    small_tensors = {tensor.name: tensor for tensor in read_gguf(KIT).tensors}
    raw, small_raw = big.read_bytes(), KIT.read_bytes()
    for tensor in read_gguf(big).tensors:
        data = np.frombuffer(raw, np.uint8, tensor.size_bytes, tensor.offset)
        layer, _, part = tensor.name.removeprefix("blk.").partition(".")
        is_added = layer.isdigit() and int(layer) % 2 == 0  # 16 layers of 8: every second one
        name = f"blk.{int(layer) // 2}.{part}" if layer.isdigit() else tensor.name
        trained = np.frombuffer(small_raw, np.uint8, small_tensors[name].size_bytes, small_tensors[name].offset)
        if "ffn_down" in part:
            n_rows = tensor.shape[1]
            rows, trained_rows = data.reshape(n_rows, -1), trained.reshape(n_rows, -1)
            kept_bytes = 0 if is_added else trained_rows.shape[1]
            assert (rows[:, :kept_bytes] == trained_rows[:, :kept_bytes]).all()
            assert not rows[:, kept_bytes:].any()
        elif is_added and "attn_output" in part:
            assert not data.any()
        elif is_added and "norm" not in part:
            assert len(np.unique(data)) > 200
        else:
            assert (data[: len(trained)] == trained).all()


def test_seed_decides_the_bytes(tmp_path: Path) -> None:
    first, again, other = (
        inflate(KIT, tmp_path / f"{number}.gguf", 12_000_000, 9, seed).read_bytes()
        for number, seed in enumerate((3, 3, 4))
    )
    assert first == again
    assert first != other
    assert len(first) == len(other)
    with pytest.raises(ConfigError, match="seed -1: must be 0 or more"):
        inflate(KIT, tmp_path / "none.gguf", 12_000_000, 9, -1)


@pytest.mark.parametrize("kind", SUPPORTED_TYPES)
def test_noise_looks_like_weights_and_zero_bytes_are_zeros(kind: str) -> None:
    type_id = TYPE_IDS[kind]
    size_bytes = TENSOR_TYPES[type_id].size_bytes(64_000)
    raw = b"".join(inflate_blocks.Filler(0).noise(type_id, size_bytes))
    values = gguf.dequantize(np.frombuffer(raw, np.uint8), gguf.GGMLQuantizationType(type_id))
    assert values.size == 64_000
    assert np.abs(values).max() < 0.11
    assert values.std() == pytest.approx(inflate_blocks.NOISE_SPREAD, rel=0.1)
    assert not gguf.dequantize(np.zeros(size_bytes, np.uint8), gguf.GGMLQuantizationType(type_id)).any()


def test_layers_without_matrices_whose_columns_grow_have_the_least_step() -> None:
    source = read_source(KIT)
    rows_only = tuple({part: layer[part] for part in layer if ROLES[part] is Role.ROWS} for layer in source.layers)
    assert rows_only[0]
    assert replace(source, layers=rows_only).width_step == LEAST_WIDTH_STEP


def test_a_size_may_be_text(tmp_path: Path) -> None:
    text, number = (tmp_path / name for name in ("text.gguf", "number.gguf"))
    assert inflate(KIT, text, "15MB", 10).read_bytes() == inflate(KIT, number, 15_000_000, 10).read_bytes()
    with pytest.raises(ConfigError, match="size 'large': not a size"):
        inflate(KIT, tmp_path / "none.gguf", "large")


def test_own_size_copies_the_model(tmp_path: Path) -> None:
    assert inflate(KIT, tmp_path / "same.gguf", KIT.stat().st_size).read_bytes() == KIT.read_bytes()


@pytest.mark.parametrize(
    ("size_bytes", "layers", "message"),
    [
        (7_000_000, None, r"with 8 layers the model takes at least 7,343,104"),
        (8_000_000, 30, r"with 30 layers the model takes at least 2\d,\d{3},\d{3}"),
        (30_000_000, 7, r"7 layers: the model has 8"),
        (30_000_000, 513, r"513 layers: .* up to 512"),
        (1 << 60, None, r"neurons wide, at most 2,147,483,616 are possible; ask for more layers"),
    ],
)
def test_impossible_sizes_are_refused(tmp_path: Path, size_bytes: int, layers: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        inflate(KIT, tmp_path / "big.gguf", size_bytes, layers)
    assert not any(tmp_path.iterdir())


@pytest.mark.usefixtures("_slim")
@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("gemma", "Q4_0", "gemma in 1 file"),
        ("slim-llama", "IQ3_S", "is IQ3_S, one of F32, .* is needed"),
    ],
)
def test_other_kinds_are_refused(tmp_path: Path, name: str, kind: str, message: str) -> None:
    small = quantised(make_model(name, tmp_path), tmp_path / "small.gguf", kind)
    with pytest.raises(NotSupported, match=message):
        inflate(small, tmp_path / "big.gguf", 100_000_000)


def test_tensor_without_a_rule_is_refused(tmp_path: Path) -> None:
    (tmp_path / "odd.gguf").write_bytes(KIT.read_bytes().replace(b"blk.3.ffn_norm.weight", b"blk.3.ffn_form.weight"))
    with pytest.raises(NotSupported, match=r"no rule for growing blk\.3\.ffn_form\.weight"):
        inflate(tmp_path / "odd.gguf", tmp_path / "big.gguf", 100_000_000)


def test_missing_layer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "odd.gguf").write_bytes(KIT.read_bytes().replace(b"blk.7.", b"blk.9."))
    with pytest.raises(NotSupported, match="tensors of 8 layers, block_count is 8"):
        inflate(tmp_path / "odd.gguf", tmp_path / "big.gguf", 100_000_000)


def test_foreign_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "foreign").write_bytes(b"PK\x03\x04" * 100)
    with pytest.raises(ModelFileError, match="not a GGUF"):
        inflate(tmp_path / "foreign", tmp_path / "big.gguf", 100_000_000)
