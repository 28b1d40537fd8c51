"""The shape that a model's context needs for speculation."""

from __future__ import annotations

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
RECURRENT = frozenset(  # architectures that llama.cpp says have recurrent state, in all layers or in some
    {
        *("arwkv7", "bailingmoe3", "deepseek4", "falcon-h1", "glm5-next", "granitehybrid", "jamba", "kimi-k3"),
        *("kimi-linear", "lfm2", "lfm2moe", "mamba", "mamba2", "minimax-01", "nemotron_h", "nemotron_h_moe", "plamo2"),
        *("qwen35", "qwen35moe", "qwen3next", "qwen4exp", "rwkv6", "rwkv6qwen2", "rwkv7"),
    }
)


def speculation_config(config: ModelConfig, gguf: GgufModel) -> ModelConfig:
    """Return `config` with room for trees of guesses: their logits, and a sequence for each branch.

    Answers in shared passes that are exact, or whose keys and values may be in a file, have cells of their own, in
    which there are no branches; with recurrent state they do not share passes. A model whose cache cannot branch gets
    no sequences for branches: its attention has a window, which every sequence would need once more, or it has
    recurrent state, which cannot be cut, or can be cut by a few tokens only. Nor does one whose keys and values may be
    in a file, in the order of the text.
    """
    if gguf.architecture in RECURRENT:
        return _with_state(config, gguf)
    if not (config.draft_model or config.uses_lookup):
        return config
    outputs = max(config.outputs_per_pass, min(config.draft_tokens, config.micro_batch_tokens - 1) + 1)
    can_branch = not (wants_streams(config) or gguf.value("attention.sliding_window") or config.spills_kv)
    branches = min(MOST_BRANCHES, outputs - 1, MOST_SEQUENCES - config.sequences) if can_branch else 0
    outputs = max(outputs, config.sequences + branches)  # llama.cpp wants as many as there are sequences
    return replace(config, outputs_per_pass=outputs, branches=branches)


def _with_state(config: ModelConfig, gguf: GgufModel) -> ModelConfig:
    """Return `config` with room for chains of guesses, where recurrent state can be cut back.

    With --exact it is not: logits of recurrent layers depend on the width of passes. Nor where prompts are kept: what
    comes back from there is the last state only.
    """
    is_last_only = config.exact or config.sequences > 1 or config.keeps_prompts or config.gpu_memory != 0
    if is_last_only or gguf.architecture not in ROLLING_BACK:
        return replace(config, sequences=1 if wants_streams(config) else config.sequences, rollback_tokens=0)
    # A pass must have room for more tokens than can be cut and the one before them: else llama.cpp ends the process.
    most = max(0, min(config.micro_batch_tokens, config.context_tokens or config.micro_batch_tokens) - 2)
    if not (config.draft_model or config.uses_lookup):
        return replace(config, rollback_tokens=min(config.rollback_tokens, most))
    n_guesses = min(ROLLBACK_TOKENS, config.draft_tokens, most)
    return replace(config, outputs_per_pass=max(config.outputs_per_pass, n_guesses + 1), rollback_tokens=n_guesses)
