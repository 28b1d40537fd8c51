"""The shape that a model's context needs for embeddings.

An encoder looks at a text as a whole, so a pass must hold all of it: the passes are as wide as the longest text. Only
where the last token alone is looked at, and each token looks at those before it, may a text be cut into passes.
llama.cpp keeps room for logits of all the tokens of such a pass, whether there are any or not: of a large vocabulary
that is a megabyte for each token, so that texts are no longer than the budget has room for, unless it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from edge_run.base.config import KV_SPILL_OFF, POOLING, PROMPT_CACHE_OFF, ModelConfig, Pooling
from edge_run.base.errors import NotSupported, option
from edge_run.runtime.inspection.draft_file import trained_context_tokens
from edge_run.runtime.inspection.learned_positions import check_positions
from edge_run.runtime.inspection.model_kind import check_generates, is_encoder
from edge_run.tiers.gguf import GgufModel
from edge_run.tiers.gguf_header import ArrayValue

LEAST_TOKENS = 512  # of the longest text, where nobody asked for a length
USUAL_TOKENS = 2048  # where the file does not say what the model was trained for
OUTPUT_SHARE = 1 / 8  # of the budget, at most, for the outputs of longer texts
_SCORING = frozenset({"cls.weight", "cls.output.weight"})  # without these llama.cpp gives the vector for a score


def embedding_config(config: ModelConfig, gguf: GgufModel, budget_bytes: Callable[[], int]) -> ModelConfig:
    """Return `config` with what is left open of embeddings decided for `gguf`; it is for text where these are not.

    Raises NotSupported for text of an encoder, and for scores of a model that gives none, and ConfigError for what does
    not go with embeddings.
    """
    named, is_wanted = _named_pooling(gguf), config.embeddings
    if is_wanted is None:
        is_wanted = makes_embeddings(gguf) or config.pooling != "auto"
    if not is_wanted:
        check_generates(gguf)
        return replace(config, embeddings=False)
    if config.gpu_memory != 0:
        raise NotSupported(f"embeddings: run on the processor alone; give {option('gpu_memory', 0)}")
    chosen: Pooling = config.pooling if config.pooling != "auto" else named or ("mean" if is_encoder(gguf) else "last")
    if chosen == "rank" and not any(tensor.name in _SCORING for tensor in gguf.tensors):
        raise NotSupported(
            f"pooling rank: this model has nothing that gives scores; give a reranker, or another {option('pooling')}"
        )
    config = replace(
        config,
        embeddings=True,
        pooling=chosen,
        sequences=1 if config.exact else config.sequences,
        prompt_cache=PROMPT_CACHE_OFF,
        kv_spill=KV_SPILL_OFF,
        draft=None,
        speculate="off",
    )
    if can_be_cut(gguf, chosen):
        return config
    own = trained_context_tokens(gguf) or USUAL_TOKENS
    asked = own if config.context_tokens == 0 else config.context_tokens
    given = [tokens for tokens in (asked, config.micro_batch_tokens) if tokens]
    longest = min(given) if given else _usual_tokens(gguf, own, budget_bytes())
    check_positions(gguf, longest)
    return replace(config, context_tokens=longest, micro_batch_tokens=longest)


def makes_embeddings(gguf: GgufModel) -> bool:
    """Return whether the file of a model is made for embeddings."""
    return is_encoder(gguf) or _named_pooling(gguf) not in (None, "none")


def _named_pooling(gguf: GgufModel) -> Pooling | None:
    """Return the pooling that the file names; None where it names none that is known."""
    pooling = gguf.value("pooling_type")
    return POOLING[1:][pooling] if isinstance(pooling, int) and 0 <= pooling < len(POOLING) - 1 else None


def can_be_cut(gguf: GgufModel, pooling: str) -> bool:
    """Return whether a text may be computed in several passes."""
    return pooling == "last" and not is_encoder(gguf) and gguf.value("attention.causal") is not False


def _usual_tokens(gguf: GgufModel, tokens: int, budget_bytes: int) -> int:
    """Return the longest text that a model was trained for, halved until its outputs take little of the budget."""
    words, width = gguf.metadata.get("tokenizer.ggml.tokens"), gguf.value("embedding_length")
    vocabulary = words.count if isinstance(words, ArrayValue) else 0
    output_bytes = 4 * (vocabulary + (width if isinstance(width, int) else 0))
    while tokens > LEAST_TOKENS and tokens * output_bytes > OUTPUT_SHARE * budget_bytes:
        tokens = max(LEAST_TOKENS, tokens // 2)
    return tokens
