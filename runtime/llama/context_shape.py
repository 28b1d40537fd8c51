"""What a context of llama.cpp is made for."""

from __future__ import annotations

from dataclasses import dataclass, replace

from edge_run.base.config import WIDEST_MICRO_BATCH, FlashAttention, ModelConfig
from edge_run.base.units import round_up

# `Numerics.batching` where sequences share passes, and cells if there are any, or have cells of their own.
UNIFIED, STREAMS = "unified", "streams"
RIDING_TOKENS = 128  # of prompts at most that end with a pass in which other texts go on
CELLS_STEP = 256  # to which llama.cpp rounds up the cells of a sequence


@dataclass(frozen=True, slots=True)
class ContextShape:
    """What a context is made for; all but the outputs, riding_tokens and most_positions belongs to the numerics key.

    is_exact: logits do not depend on the width of passes.
    has_streams: each sequence has cells of its own, an equal part of all: so that logits do not depend on the others,
        or so that rows that are in a file lie in the order of a text.
    pooling: how one vector is made of a text, where the context is for embeddings: then all tokens are outputs. Else
        empty.
    rollback_tokens: by how many tokens recurrent state can be cut back, of a model whose state can be.
    riding_tokens: of prompts, in passes in which other texts go on, beside which room is lent to weights.
    most_positions: tokens of a text at most, of a model with a table of learned positions; else 0.
    """

    context_tokens: int
    threads: int
    micro_batch_tokens: int
    sequences: int
    outputs_per_pass: int
    kv_type_k: str
    kv_type_v: str
    flash_attention: FlashAttention
    is_exact: bool = False
    has_streams: bool = False
    pooling: str = ""
    rollback_tokens: int = 0
    riding_tokens: int = 0
    most_positions: int = 0

    @property
    def narrow_outputs(self) -> int:
        """Tokens in a pass at most that makes tokens or verifies guesses."""
        return min(self.outputs_per_pass, self.micro_batch_tokens)

    @property
    def narrow_tokens(self) -> int:
        """The same with those of prompts that ride along; prompts alone have passes as wide as can be."""
        return min(self.narrow_outputs + self.riding_tokens, self.micro_batch_tokens)

    @property
    def kept_rows(self) -> int:
        """Rows of logits that are kept of a pass: those asked for; those of padding stay where llama.cpp has them."""
        return 1 if self.pooling else self.outputs_per_pass

    @property
    def batching(self) -> str:
        """What `Numerics.batching` says of answers that share passes."""
        if self.sequences == 1 or (self.has_streams and self.is_exact):
            return ""
        return STREAMS if self.has_streams else UNIFIED

    @property
    def n_streams(self) -> int:
        """How many parts the cells have, each for a sequence of its own."""
        return self.sequences if self.has_streams else 1

    @property
    def verified_tokens(self) -> int:
        """Guesses that a pass verifies at most, each of which takes a cell beside those of the text."""
        return self.narrow_outputs if self.sequences > 1 and not (self.has_streams or self.pooling) else 0

    @property
    def sequence_tokens(self) -> int:
        """Tokens of one sequence at most."""
        return self.context_tokens // self.sequences if self.has_streams else self.context_tokens

    def shortened(self, tokens: int) -> ContextShape:
        """Return this shape with a context of about so many tokens, where it is longer."""
        tokens = min(self.context_tokens, tokens)
        return replace(self, context_tokens=tokens, micro_batch_tokens=min(self.micro_batch_tokens, tokens)).fitted()

    def fitted(self) -> ContextShape:
        """Return this shape as llama.cpp takes it: for embeddings it wants a part of each pass for each sequence."""
        if not self.pooling:
            return self
        width = round_up(self.micro_batch_tokens, self.sequences)
        return replace(
            self,
            micro_batch_tokens=width,
            context_tokens=max(self.context_tokens, width),
            outputs_per_pass=max(self.outputs_per_pass, width),
        )


def wants_streams(config: ModelConfig) -> bool:
    """Return whether each sequence of a context for `config` has cells of its own."""
    return (config.exact or config.spills_kv) and config.sequences > 1


def lends_cells(config: ModelConfig) -> bool:
    """Return whether memory of unwritten cells is lent: not that of streams, unless it may be spilled."""
    return config.spills_kv or not wants_streams(config)


def context_shape(config: ModelConfig, trained_context_tokens: int, threads: int) -> ContextShape:
    """Return the context that `config` asks for, of a model that was trained on so many tokens (0: it does not say).

    What a model gets that is asked for no length is decided before (`runtime/planning/usual_context.py`).
    """
    wanted = config.context_tokens
    tokens = wanted or (trained_context_tokens if trained_context_tokens > 0 else 4096)
    k, v = config.kv_types
    has_streams = wants_streams(config)
    sequences = config.sequences + config.branches
    widest = tokens
    if has_streams:
        widest = round_up(-(-tokens // config.sequences), CELLS_STEP)
        tokens = widest * sequences
    return ContextShape(
        context_tokens=tokens,
        threads=threads,
        micro_batch_tokens=min(config.micro_batch_tokens or WIDEST_MICRO_BATCH, widest),
        sequences=sequences,
        outputs_per_pass=max(
            config.outputs_per_pass, sequences, (sequences if has_streams else 1) * (1 + config.exact)
        ),
        kv_type_k=k,
        kv_type_v=v,
        flash_attention=config.flash_attention,
        is_exact=config.exact,
        has_streams=has_streams,
        pooling=config.pooling if config.embeddings else "",
        rollback_tokens=config.rollback_tokens,
        riding_tokens=RIDING_TOKENS if config.sequences > 1 and not has_streams else 0,
    ).fitted()
