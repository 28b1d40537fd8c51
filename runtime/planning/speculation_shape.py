"""The shape that a model's context needs for speculation."""

from __future__ import annotations

import re
from dataclasses import replace

from edge_run.base.config import ModelConfig
from edge_run.runtime.inspection.draft_file import MOST_SEQUENCES
from edge_run.runtime.llama.context_shape import wants_streams
from edge_run.tiers.gguf import GgufModel

MOST_BRANCHES = 23  # of a tree, besides its main line
ROLLBACK_TOKENS = 7  # each takes the memory of the model's recurrent state once more
ROLLING_BACK = frozenset(  # architectures whose kernels keep what recurrent state was after each of the last tokens
    {"kimi-k3", "lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe", "qwen35", "qwen35moe", "qwen4exp"}
)
_RECURRENT = re.compile(r"\.(ssm|time_mix|shortconv)")


def speculation_config(config: ModelConfig, gguf: GgufModel) -> ModelConfig:
    """Return `config` with room for trees of guesses: their logits, and a sequence for each branch.

    Answers in shared passes that are exact, or whose keys and values may be in a file, have cells of their own, in
    which there are no branches; with recurrent state they do not share passes. A model whose cache cannot branch gets
    no sequences for branches: its attention has a window, which every sequence would need once more, or it has
    recurrent state, which cannot be cut, or can be cut by a few tokens only. Nor does one whose keys and values may be
    in a file, in the order of the text.
    """
    is_recurrent = any(_RECURRENT.search(tensor.name) for tensor in gguf.tensors)
    has_streams = wants_streams(config)
    if has_streams and is_recurrent:
        return replace(config, sequences=1)
    if not (config.draft_model or config.uses_lookup):
        return config
    if is_recurrent:
        return _rolling_back(config) if gguf.architecture in ROLLING_BACK else config
    outputs = max(config.outputs_per_pass, min(config.draft_tokens, config.micro_batch_tokens - 1) + 1)
    can_branch = not (has_streams or gguf.value("attention.sliding_window") or config.spills_kv)
    branches = min(MOST_BRANCHES, outputs - 1, MOST_SEQUENCES - config.sequences) if can_branch else 0
    outputs = max(outputs, config.sequences + branches)  # llama.cpp wants as many as there are sequences
    return replace(config, outputs_per_pass=outputs, branches=branches)


def _rolling_back(config: ModelConfig) -> ModelConfig:
    """Return `config` with room for chains of guesses, where recurrent state is all that is cut.

    With --exact it is not: logits of recurrent layers depend on the width of passes.
    """
    if config.exact or config.sequences > 1 or config.keeps_prompts or config.gpu_memory != 0:
        return config
    n_guesses = min(ROLLBACK_TOKENS, config.draft_tokens, config.micro_batch_tokens - 1)
    return replace(
        config, outputs_per_pass=max(config.outputs_per_pass, n_guesses + 1), rollback_tokens=max(0, n_guesses)
    )
