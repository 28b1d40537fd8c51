"""Recurrent and hybrid language models."""

from __future__ import annotations

from recipes.recipe import (
    BIASES,
    GRANITE,
    HYPER,
    INDEXER,
    LATENT,
    LEADING,
    SECTIONS,
    SELDOM,
    SHARED,
    SIGMOID,
    Keys,
    Recipe,
    moe,
    plain_moe,
)

_MAMBA_1: Keys = {"ssm.conv_kernel": 4, "ssm.inner_size": 512, "ssm.state_size": 16, "ssm.time_step_rank": 16}
_MAMBA_2: Keys = {**_MAMBA_1, "ssm.state_size": 64, "ssm.time_step_rank": 8, "ssm.group_count": 2}
_DELTA: Keys = {  # gated delta net: three recurrent layers, then one of attention
    **_MAMBA_2,
    "ssm.inner_size": 256,
    "ssm.time_step_rank": 4,
    "full_attention_interval": 4,
}
_KIMI_DELTA: Keys = {"ssm.conv_kernel": 4, "kda.head_dim": 64, "kda.safe_gate": True, "kda.gate_lower_bound": -5.0}
_RWKV_6: Keys = {"wkv.head_size": 64, "time_mix_extra_dim": 32, "time_decay_extra_dim": 64}
_RWKV_7: Keys = {
    "wkv.head_size": 64,
    "attention.decay_lora_rank": 32,
    "attention.iclr_lora_rank": 32,
    "attention.value_residual_mix_lora_rank": 32,
    "attention.gate_lora_rank": 64,
}
_RWKV_6_LERPS = r"|time_mix_lerp_[wkvrg]\."  # the fused one replaces them

RECURRENT = (
    Recipe("arwkv7", {**_RWKV_7, "token_shift_count": 1}, without=SELDOM),
    Recipe("mamba", _MAMBA_1, n_head=0, n_head_kv=0, n_ff=0, is_deepened=True),
    Recipe("mamba2", _MAMBA_2, n_layer=5, n_head=0, n_head_kv=0, n_ff=0, is_deepened=True),
    Recipe("rwkv6", _RWKV_6, n_head=0, n_head_kv=0, without=SELDOM + _RWKV_6_LERPS),
    Recipe(
        "rwkv6qwen2",
        {**_RWKV_6, "token_shift_count": 1},
        without=SELDOM + _RWKV_6_LERPS + "|time_mix_first|time_mix_ln",
    ),
    Recipe("rwkv7", _RWKV_7, n_head=0, n_head_kv=0, without=SELDOM),
)

HYBRID = (
    moe(
        "bailingmoe3",
        {**LATENT, **SHARED, **SIGMOID, **LEADING, **_KIMI_DELTA, "rope.dimension_sections": (4, 6, 6, 0)},
        n_head_kv=(0, 0, 0, 1),
    ),
    Recipe("falcon-h1", _MAMBA_2),
    moe(
        "glm5-next",
        {
            **LATENT,
            **SHARED,
            **SIGMOID,
            **LEADING,
            **HYPER,
            **INDEXER,
            **_KIMI_DELTA,
            "attention.key_length": 128,
            "attention.indexer.kpool": 4,
            "attention.indexer.kpool_select_tail": True,
            "rope.dimension_count": 0,
        },
        n_head_kv=(0, 0, 0, 1),
    ),
    plain_moe(
        "granitehybrid",
        {**_MAMBA_2, **GRANITE, "expert_shared_feed_forward_length": 256},
        n_head_kv=(0, 0, 2, 0),
        is_tied=True,
    ),
    plain_moe("jamba", _MAMBA_1, n_head_kv=(0, 0, 2, 0)),
    moe(
        "kimi-k3",
        {
            **LATENT,
            **SHARED,
            **SIGMOID,
            **LEADING,
            **_KIMI_DELTA,
            "expert_latent_length": 128,
            "attn_res.block_size": 12,
            "activation.situ_beta": 4.0,
            "activation.situ_linear_beta": 25.0,
        },
        n_head_kv=(0, 0, 0, 1),
    ),
    moe(
        "kimi-linear",
        {**LATENT, **SHARED, **SIGMOID, **LEADING, **_KIMI_DELTA},
        n_head_kv=(0, 0, 0, 1),
    ),
    Recipe("lfm2", {"shortconv.l_cache": 3}, n_layer=6, n_head_kv=(0, 0, 2, 0, 0, 2), is_tied=True),
    moe("lfm2moe", {**SIGMOID, **LEADING, "shortconv.l_cache": 3}, n_head_kv=(0, 2, 0, 2)),
    moe("minimax-01", {"residual_scale": 3.5, "full_attention_interval": 4}, n_ff=256),
    Recipe("nemotron_h", _MAMBA_2, n_layer=6, n_head_kv=(0, 0, 2, 0, 0, 2), n_ff=(0, 3584, 0, 3584, 0, 0)),
    moe(
        "nemotron_h_moe",
        {**_MAMBA_2, **SHARED, **SIGMOID},
        n_layer=6,
        n_head_kv=(0, 0, 2, 0, 0, 2),
        n_ff=(0, 512, 0, 512, 512, 0),
    ),
    Recipe(
        "plamo2",
        {**_MAMBA_2, "ssm.group_count": 0, "attention.key_length": 64, "attention.value_length": 64},
        n_head=(4, 4, 4, 4),
        n_head_kv=(0, 2, 0, 2),
    ),
    Recipe("qwen35", {**_DELTA, **SECTIONS}),
    moe("qwen35moe", {**_DELTA, **SHARED, **SECTIONS}, is_gate_up_fused=True),
    moe("qwen3next", {**_DELTA, **SHARED}, without=SELDOM + BIASES + r"|ssm_in\."),
    moe(
        "qwen4exp",
        {
            **_DELTA,
            **SHARED,
            **SECTIONS,
            **HYPER,
            **INDEXER,
            "full_attention_interval": 2,
            "attention.compress_ratios": (4, 4, 4, 4),
        },
        is_gate_up_fused=True,
    ),
)
