"""The shape that a model's context needs for speculation."""

from __future__ import annotations

import re
from dataclasses import replace

from edge_run.base.config import ModelConfig
from edge_run.runtime.inspection.draft_file import MOST_SEQUENCES
from edge_run.runtime.llama.context_shape import wants_streams
from edge_run.tiers.gguf import GgufModel

MOST_BRANCHES = 23  # of a tree, besides its main line
_RECURRENT = re.compile(r"\.(ssm|time_mix|shortconv)")


def speculation_config(config: ModelConfig, gguf: GgufModel) -> ModelConfig:
    """Return `config` with room for trees of guesses: their logits, and a sequence for each branch.

    Answers in shared passes that are exact, or whose keys and values may be in a file, have cells of their own, in
    which there are no branches; with recurrent state they do not share passes. A model whose cache cannot branch gets
    no sequences for branches: its attention has a window, which every sequence would need once more, or it has
    recurrent state, which cannot be cut. Nor does one whose keys and values may be in a file, in the order of the text.
    """
    is_recurrent = any(_RECURRENT.search(tensor.name) for tensor in gguf.tensors)
    has_streams = wants_streams(config)
    if has_streams and is_recurrent:
        return replace(config, sequences=1)
    if is_recurrent or not (config.draft_model or config.uses_lookup):
        return config
    outputs = max(config.outputs_per_pass, min(config.draft_tokens, config.micro_batch_tokens - 1) + 1)
    can_branch = not (has_streams or gguf.value("attention.sliding_window") or config.spills_kv)
    branches = min(MOST_BRANCHES, outputs - 1, MOST_SEQUENCES - config.sequences) if can_branch else 0
    outputs = max(outputs, config.sequences + branches)  # llama.cpp wants as many as there are sequences
    return replace(config, outputs_per_pass=outputs, branches=branches)
