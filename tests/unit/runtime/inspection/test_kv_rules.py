"""What KV types a model can have."""

from __future__ import annotations

import pytest

from edge_run.base.config import ModelConfig
from edge_run.base.errors import ConfigError
from edge_run.runtime.inspection.kv_rules import check_kv_types
from edge_run.tiers.gguf import GgufModel
from edge_run.tiers.gguf_header import MetadataValue

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
    assert (caught.value.found, caught.value.needed) == (80, 32)


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
