"""What a recipe says, and what many recipes share: keys of the metadata, and tensors that are left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Value = bool | int | float | str | Sequence[int] | Sequence[float] | Sequence[str]
Keys = Mapping[str, Value]

N_EXPERT = 8
N_EXPERT_USED = 2

# What real files of most architectures do not hold, though the loader would take it: the patterns of Recipe.without.
UNUSUAL = r"\.(input_)?scales?$|^cls|^dense_|exp_probs_b_vl"
ROPE_FACTORS = r"|^rope_"
OUTPUT_BIAS = r"|^output\.bias"
SELDOM = UNUSUAL + ROPE_FACTORS + OUTPUT_BIAS
BIASES = r"|(attn_(q|k|v|qkv|output)|ffn_(up|down|gate))\.bias$"


@dataclass(frozen=True)
class Recipe:
    """How to make a tiny model of one architecture.

    `metadata` adds to, and overrides, what every model gets; its keys are written without the architecture's prefix.
    `name` is the architecture unless given. A tuple has one number per layer; `n_head_kv` of 0 makes a layer of a
    hybrid recurrent. `without` is a pattern of the tensors left out. `is_tied` leaves out the output matrix: the token
    embedding serves twice. `is_gate_up_fused` keeps each expert's two input matrices in one tensor. `n_nextn` appends
    blocks that the file holds and ordinary inference skips (multi-token prediction). The `scale` of `make_model`
    multiplies the feed-forward width, or the layers if `is_deepened`.
    """

    architecture: str
    metadata: Keys = field(default_factory=dict)
    name: str = ""
    n_layer: int = 4
    n_embd: int = 256
    n_head: int | tuple[int, ...] = 4
    n_head_kv: int | tuple[int, ...] = 2
    n_ff: int | tuple[int, ...] = 768
    n_ff_expert: int = 0
    n_expert: int = 0
    n_nextn: int = 0
    without: str = SELDOM + BIASES
    is_tied: bool = False
    is_gate_up_fused: bool = False
    is_deepened: bool = False


def moe(architecture: str, metadata: Keys | None = None, **changes: Any) -> Recipe:
    """A mixture whose expert width is a key of its own."""
    settings = {"n_expert": N_EXPERT, "n_ff": 512, "n_ff_expert": 128, **changes}
    return Recipe(architecture, metadata or {}, **settings)


def plain_moe(architecture: str, metadata: Keys | None = None, **changes: Any) -> Recipe:
    """A mixture whose experts are as wide as `feed_forward_length` says."""
    return moe(architecture, metadata, **{"n_ff": 128, "n_ff_expert": 0, **changes})


def biased(architecture: str, metadata: Keys | None = None, **changes: Any) -> Recipe:
    return Recipe(architecture, metadata or {}, without=SELDOM, **changes)


WINDOW: Keys = {"attention.sliding_window": 64}
WINDOW_OF_4: Keys = {**WINDOW, "attention.sliding_window_pattern": (1, 0, 1, 0)}
WINDOW_OF_6: Keys = {**WINDOW, "attention.sliding_window_pattern": (1, 1, 0, 1, 1, 0)}
SIGMOID: Keys = {"expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 1.5}
SHARED: Keys = {"expert_shared_count": 1, "expert_shared_feed_forward_length": 256}
LEADING: Keys = {"leading_dense_block_count": 1}
SECTIONS: Keys = {"rope.dimension_sections": (11, 11, 10, 0)}
GRANITE: Keys = {"embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 8.0, "attention.scale": 0.015625}
YARN: Keys = {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 128}
LATENT: Keys = {  # multi-head latent attention: the cache holds one compressed row for all heads
    "attention.q_lora_rank": 96,
    "attention.kv_lora_rank": 128,
    "attention.key_length": 160,
    "attention.value_length": 128,
    "attention.key_length_mla": 96,
    "attention.value_length_mla": 64,
    "rope.dimension_count": 32,
}
INDEXER: Keys = {  # sparse attention; picking everything keeps a hair's breadth from deciding what is attended
    "attention.indexer.head_count": 4,
    "attention.indexer.key_length": 64,
    "attention.indexer.top_k": 131072,
    "attention.indexer.block_size": 4,
    "attention.indexer.local_blocks": 1,
}
HYPER: Keys = {
    "hyper_connection.count": 4,
    "hyper_connection.sinkhorn_iterations": 2,
    "hyper_connection.epsilon": 1e-6,
    "hyper_connection.low_rank": 8,
}
