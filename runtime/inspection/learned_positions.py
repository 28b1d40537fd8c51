"""Tables of learned positions: how long a text of a model may be at most, as llama.cpp ends the process beyond them."""

from __future__ import annotations

from edge_run.base.errors import ConfigError, option
from edge_run.tiers.gguf import GgufModel

_TABLE = "position_embd.weight"


def learned_positions(gguf: GgufModel) -> int:
    """Return for how many tokens of a text there are positions; 0 where a model has no table of them."""
    table = next((tensor for tensor in gguf.tensors if tensor.name == _TABLE), None)
    return table.shape[1] if table is not None and len(table.shape) > 1 else 0


def check_positions(gguf: GgufModel, tokens: int, sequences: int = 1) -> None:
    """Raise ConfigError for a context that was asked for and is longer than so many texts can be."""
    positions = learned_positions(gguf)
    if positions and tokens > positions * sequences:
        each = f", and {sequences} texts have {positions * sequences:,}" if sequences > 1 else ""
        raise ConfigError(
            f"context length {tokens:,}: {gguf.shards[0].path.name} has learned positions for {positions:,} "
            f"tokens{each}; give {option('context_tokens', positions * sequences)} or less",
            found=tokens,
            needed=positions * sequences,
        )
