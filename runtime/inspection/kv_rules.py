"""What KV types a model can have: said before llama.cpp is asked."""

from __future__ import annotations

from edge_run.base.config import ModelConfig
from edge_run.base.errors import ConfigError, option
from edge_run.tiers.gguf import GgufModel

_BLOCK: dict[str, int] = dict.fromkeys(("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"), 32)


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
            f"KV type {v} for V: a quantised V needs flash attention; leave out {option('flash_attention', 'off')}, or "
            "use f16 for V"
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
