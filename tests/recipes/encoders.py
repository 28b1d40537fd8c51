"""Models for embeddings: encoders, one that ranks, and decoders whose files name a pooling."""

from __future__ import annotations

from typing import Any

from recipes.recipe import N_EXPERT, SELDOM, WINDOW_OF_4, WINDOW_OF_6, Keys, Recipe

_MEAN, _CLS, _LAST, _RANK = ({"pooling_type": number} for number in (1, 2, 3, 4))
_WHOLE: Keys = {"attention.causal": False}


def _encoder(architecture: str, pooling: Keys, metadata: Keys | None = None, **changes: Any) -> Recipe:
    return Recipe(architecture, {**_WHOLE, **pooling, **(metadata or {})}, **{"n_head_kv": 4, **changes})


EMBEDDING = (
    _encoder("bert", _CLS, without=SELDOM),
    _encoder("bert", _RANK, name="bert-rank", without=r"\.(input_)?scales?$"),
    _encoder("eurobert", _MEAN),
    _encoder("gemma-embedding", _MEAN, WINDOW_OF_6, n_layer=6, n_head_kv=2),
    _encoder("jina-bert-v2", _MEAN, {"attention.max_alibi_bias": 8.0}, without=SELDOM + r"|attn_norm_2|attn_[qk]_norm"),
    _encoder("jina-bert-v3", _MEAN, without=SELDOM),
    _encoder("modern-bert", _CLS, WINDOW_OF_4),
    _encoder("neo-bert", _CLS),
    _encoder("nomic-bert", _MEAN),
    _encoder("nomic-bert-moe", _MEAN, {"moe_every_n_layers": 2}, n_expert=N_EXPERT),
    _encoder("llama-embed", _MEAN, n_head_kv=2),
    Recipe("qwen3", _LAST, name="qwen3-embedding"),
)
