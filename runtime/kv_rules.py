"""What KV types a model can have, and the least memory its KV cache takes: said before llama.cpp is asked."""

from __future__ import annotations

from edge_run.base.config import ModelConfig
from edge_run.base.errors import BudgetError, ConfigError
from edge_run.base.units import format_size
from edge_run.runtime.llama_model import ContextShape
from edge_run.tiers.gguf import GgufModel

_BITS: dict[str, float] = {
    "f32": 32,
    "f16": 16,
    "bf16": 16,
    "q8_0": 8.5,
    "q5_1": 6,
    "q5_0": 5.5,
    "q4_1": 5,
    "q4_0": 4.5,
    "iq4_nl": 4.5,
}
_BLOCK: dict[str, int] = dict.fromkeys(("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"), 32)
_LEAST_FULL_LAYERS_SHARE = 8
_PARTLY_FULL = ("attention.sliding_window", "full_attention_interval")
_CHUNKED = ("llama4",)  # chunks its attention without a key that says so


def _number(gguf: GgufModel, suffix: str, default: int = 0) -> int:
    value = gguf.value(suffix)
    return value if isinstance(value, int) else default


def _head_sizes(gguf: GgufModel) -> tuple[int, int]:
    heads = _number(gguf, "attention.head_count")
    common = _number(gguf, "embedding_length") // heads if heads else 0
    return _number(gguf, "attention.key_length", common), _number(gguf, "attention.value_length", common)


def check_kv_types(gguf: GgufModel, config: ModelConfig) -> None:
    """Raise ConfigError when the KV types asked for cannot work with this model."""
    k, v = config.kv_types
    if v in _BLOCK and config.flash_attention == "off":
        raise ConfigError(
            f"KV type {v} for V: a quantised V needs flash attention; leave out --flash-attn off, or use f16 for V"
        )
    if gguf.value("attention.kv_lora_rank") and k != v:
        raise ConfigError(f"KV types {k}/{v}: {gguf.architecture} keeps K and V in one (MLA); give both the same type")
    for letter, kind, size in zip("KV", (k, v), _head_sizes(gguf), strict=True):
        if size and size % _BLOCK.get(kind, 1):
            raise ConfigError(
                f"KV type {kind} for {letter}: blocks of {_BLOCK[kind]} do not divide heads of {size}; use f16",
                found=size,
                needed=_BLOCK[kind],
            )


def check_kv_fits(gguf: GgufModel, shape: ContextShape, budget_bytes: int) -> None:
    """Raise BudgetError when the KV cache alone is sure to exceed the budget, before it is allocated."""
    needed = least_kv_bytes(gguf, shape)
    if needed > budget_bytes:
        raise BudgetError(
            f"context of {shape.context_tokens} tokens: its KV cache takes {format_size(needed)} or more, the budget "
            f"is {format_size(budget_bytes)}; shorten the context (-c), use a smaller --kv-type, or raise --memory",
            found_bytes=budget_bytes,
            needed_bytes=needed,
        )


def least_kv_bytes(gguf: GgufModel, shape: ContextShape) -> int:
    """Return a lower bound of the KV cache's bytes; 0 where the file does not say (recurrent state, heads by layer)."""
    heads = _number(gguf, "attention.head_count_kv", _number(gguf, "attention.head_count"))
    if not isinstance(gguf.value("attention.head_count_kv"), (int, type(None))) or gguf.value("ssm.state_size"):
        return 0
    key, value = _head_sizes(gguf)
    bits = key * _BITS[shape.kv_type_k] + (
        0 if gguf.value("attention.kv_lora_rank") else value * _BITS[shape.kv_type_v]
    )
    layers = _number(gguf, "block_count") - _number(gguf, "nextn_predict_layers")
    if gguf.architecture in _CHUNKED or any(gguf.value(key) for key in _PARTLY_FULL):
        layers //= _LEAST_FULL_LAYERS_SHARE
    return int(shape.context_tokens * layers * heads * bits / 8)
