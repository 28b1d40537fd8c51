"""What KV types a model can have, and when its KV cache is sure not to fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edge_run.base.config import ModelConfig
from edge_run.base.errors import BudgetError, ConfigError
from edge_run.base.units import GIB, MIB
from edge_run.runtime.kv_rules import check_kv_fits, check_kv_types, least_kv_bytes
from edge_run.runtime.llama_model import ContextShape
from edge_run.tiers.gguf import GgufModel, MetadataValue

SHAPE = ContextShape(
    context_tokens=4096,
    threads=1,
    micro_batch_tokens=64,
    sequences=1,
    kv_type_k="f16",
    kv_type_v="f16",
    flash_attention="auto",
)
LLAMA_8B = {"block_count": 32, "embedding_length": 4096, "attention__head_count": 32, "attention__head_count_kv": 8}


def model(architecture: str = "llama", **values: MetadataValue) -> GgufModel:
    """Metadata alone; in the names of values a double underscore stands for the dot."""
    keys = {f"{architecture}.{name.replace('__', '.')}": value for name, value in values.items()}
    return GgufModel((), (), {"general.architecture": architecture, **keys})


def dense(**changes: MetadataValue) -> GgufModel:
    return model(**{**LLAMA_8B, **changes})


@pytest.mark.parametrize("kv_type", ["f32", "f16", "q8_0", "q4_0", "f16/q8_0"])
def test_types_that_work_are_let_through(kv_type: str) -> None:
    check_kv_types(dense(), ModelConfig(kv_type=kv_type))


def test_a_quantised_v_needs_flash_attention() -> None:
    """llama.cpp refuses it only after the model is loaded, and without a word of what to do."""
    check_kv_types(dense(), ModelConfig(kv_type="q8_0/f16", flash_attention="off"))
    with pytest.raises(ConfigError, match="flash attention"):
        check_kv_types(dense(), ModelConfig(kv_type="f16/q8_0", flash_attention="off"))


@pytest.mark.parametrize(("key", "letter"), [("attention__key_length", "K"), ("attention__value_length", "V")])
def test_heads_that_blocks_do_not_divide(key: str, letter: str) -> None:
    with pytest.raises(ConfigError, match=f"q8_0 for {letter}.*heads of 80") as caught:
        check_kv_types(dense(**{key: 80}), ModelConfig(kv_type="q8_0"))
    assert caught.value.figures == {"found": 80, "needed": 32}


def test_heads_are_the_embedding_over_their_number_where_the_file_does_not_say() -> None:
    with pytest.raises(ConfigError, match="heads of 40"):
        check_kv_types(dense(embedding_length=40 * 32), ModelConfig(kv_type="q4_0"))


def test_latent_attention_keeps_k_and_v_in_one() -> None:
    latent = dense(attention__kv_lora_rank=512)
    check_kv_types(latent, ModelConfig(kv_type="q8_0"))
    with pytest.raises(ConfigError, match="the same type"):
        check_kv_types(latent, ModelConfig(kv_type="q8_0/f16"))


def test_a_model_of_unknown_heads_is_left_to_llama_cpp() -> None:
    check_kv_types(model("mamba", block_count=4, embedding_length=100), ModelConfig(kv_type="q8_0"))


def test_the_bytes_of_a_plain_model_are_known_exactly() -> None:
    """4096 tokens x 32 layers x 8 heads x (128 + 128) numbers of 2 bytes."""
    assert least_kv_bytes(dense(), SHAPE) == 512 * MIB
    quantised = replace(SHAPE, kv_type_k="q8_0", kv_type_v="q4_0")
    assert least_kv_bytes(dense(), quantised) == 4096 * 32 * 8 * 128 // 32 * (34 + 18)


@pytest.mark.parametrize(
    "other",
    [
        model("mamba", block_count=32, embedding_length=4096, ssm__state_size=16),
        model("rwkv7", block_count=32, embedding_length=4096),
        dense(ssm__state_size=16),
    ],
    ids=["recurrent", "no heads", "hybrid"],
)
def test_recurrent_state_is_no_kv_cache(other: GgufModel) -> None:
    assert least_kv_bytes(other, SHAPE) == 0


def test_a_budget_that_the_cache_alone_exceeds_is_refused_before_it_is_allocated() -> None:
    check_kv_fits(dense(), SHAPE, 512 * MIB)
    with pytest.raises(BudgetError, match="shorten the context") as caught:
        check_kv_fits(dense(), replace(SHAPE, context_tokens=131072), 4 * GIB)
    assert caught.value.figures == {"found_bytes": 4 * GIB, "needed_bytes": 16 * GIB}
