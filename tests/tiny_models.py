"""Makes tiny random GGUF models of more than a hundred architectures, each in a fraction of a second.

A test that claims "the streamed logits equal llama.cpp's" needs models to claim it of. `make_model` writes one: the
right tensors and metadata for its architecture, random weights, a few hundred meaningless tokens. Nobody hands us the
list of tensors that an architecture wants, so we ask llama.cpp: given metadata alone, `llama_model_init_from_user`
builds every tensor the architecture could have and calls back once for each. We note names and shapes, leave out the
optional ones that the recipe does not want, draw the weights with numpy and write the file with the `gguf` package.
The metadata in the file is the recipe's and nothing else.

Covers: dense, mixture, recurrent and hybrid language models; encoders; F16 matrices, or any type that llama.cpp
quantises to; files split into shards. Does not cover: diffusion, vision, sensible text. All models have llama.cpp's
tokenizer "test", which hashes every five bytes of text into one token and knows no end of text.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as low
import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from llama_cpp._ctypes_extensions import load_shared_library
from llama_cpp._ggml import libggml_base_path
from numpy.typing import NDArray

Value = bool | int | float | str | Sequence[int] | Sequence[float] | Sequence[str]
Keys = Mapping[str, Value]
Shape = tuple[int, ...]
"""Sizes in GGUF order: the row length first."""

N_VOCAB = 384
N_CTX = 1024
N_EXPERT = 8
N_EXPERT_USED = 2

# What real files of most architectures do not hold, though the loader would take it: the patterns of Recipe.without.
_UNUSUAL = r"\.(input_)?scales?$|^cls|^dense_|exp_probs_b_vl"
_ROPE_FACTORS = r"|^rope_"
_OUTPUT_BIAS = r"|^output\.bias"
_SELDOM = _UNUSUAL + _ROPE_FACTORS + _OUTPUT_BIAS
_BIASES = r"|(attn_(q|k|v|qkv|output)|ffn_(up|down|gate))\.bias$"


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
    n_ff: int | tuple[int, ...] = 1536
    n_ff_expert: int = 0
    n_expert: int = 0
    n_nextn: int = 0
    without: str = _SELDOM + _BIASES
    is_tied: bool = False
    is_gate_up_fused: bool = False
    is_deepened: bool = False


def _moe(architecture: str, metadata: Keys | None = None, **changes: Any) -> Recipe:
    """A mixture whose expert width is a key of its own."""
    settings = {"n_expert": N_EXPERT, "n_ff": 512, "n_ff_expert": 256, **changes}
    return Recipe(architecture, metadata or {}, **settings)


def _plain_moe(architecture: str, metadata: Keys | None = None, **changes: Any) -> Recipe:
    """A mixture whose experts are as wide as `feed_forward_length` says."""
    return _moe(architecture, metadata, **{"n_ff": 256, "n_ff_expert": 0, **changes})


def _biased(architecture: str, metadata: Keys | None = None, **changes: Any) -> Recipe:
    return Recipe(architecture, metadata or {}, without=_SELDOM, **changes)


_WINDOW: Keys = {"attention.sliding_window": 64}
_WINDOW_OF_4: Keys = {**_WINDOW, "attention.sliding_window_pattern": (1, 0, 1, 0)}
_WINDOW_OF_6: Keys = {**_WINDOW, "attention.sliding_window_pattern": (1, 1, 0, 1, 1, 0)}
_SIGMOID: Keys = {"expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 1.5}
_SHARED: Keys = {"expert_shared_count": 1, "expert_shared_feed_forward_length": 256}
_LEADING: Keys = {"leading_dense_block_count": 1}
_SECTIONS: Keys = {"rope.dimension_sections": (11, 11, 10, 0)}
_GRANITE: Keys = {"embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 8.0, "attention.scale": 0.015625}
_YARN: Keys = {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 128}
_LATENT: Keys = {  # multi-head latent attention: the cache holds one compressed row for all heads
    "attention.q_lora_rank": 96,
    "attention.kv_lora_rank": 128,
    "attention.key_length": 160,
    "attention.value_length": 128,
    "attention.key_length_mla": 96,
    "attention.value_length_mla": 64,
    "rope.dimension_count": 32,
}
_INDEXER: Keys = {  # sparse attention; picking everything keeps a hair's breadth from deciding what is attended
    "attention.indexer.head_count": 4,
    "attention.indexer.key_length": 64,
    "attention.indexer.top_k": 131072,
    "attention.indexer.block_size": 4,
    "attention.indexer.local_blocks": 1,
}
_HYPER: Keys = {
    "hyper_connection.count": 4,
    "hyper_connection.sinkhorn_iterations": 2,
    "hyper_connection.epsilon": 1e-6,
    "hyper_connection.low_rank": 8,
}
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

_RECIPES = (
    # dense
    Recipe(
        "apertus",
        {f"xielu.{key}": value for key, value in (("alpha_n", 0.8), ("alpha_p", 0.8), ("beta", 0.5), ("eps", 1e-6))},
    ),
    Recipe("arcee"),
    Recipe("baichuan"),
    Recipe("bitnet"),
    _biased("bloom"),
    Recipe("chatglm"),
    _biased("codeshell"),
    Recipe("cogvlm"),  # half its matrices serve images only: in the file, not in the graph
    Recipe("cohere2", {**_WINDOW_OF_6, "logit_scale": 0.25}, n_layer=6),
    Recipe("command-r", {"logit_scale": 0.0625}),
    Recipe("deci", n_layer=5, n_head=(4, 4, 0, 4, 4), n_head_kv=(2, 0, 0, 1, 4), n_ff=(1280, 640, 1280, 0, 1920)),
    Recipe("ernie4_5"),
    Recipe("exaone"),
    Recipe("exaone4"),
    _biased("falcon"),
    Recipe("gemma"),
    Recipe("gemma2", {**_WINDOW_OF_6, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}, n_layer=6),
    Recipe("gemma3", {**_WINDOW_OF_6, "rope.freq_base": 1e6}, n_layer=6, is_tied=True),
    Recipe("gemma3n", _WINDOW, n_layer=22, n_embd=128, n_head=2, n_head_kv=1, n_ff=512, is_tied=True),
    Recipe(
        "gemma4",
        {
            **_WINDOW_OF_6,
            "embedding_length_per_layer_input": 64,
            "attention.key_length": 128,
            "attention.value_length": 128,
            "attention.key_length_swa": 64,
            "attention.value_length_swa": 64,
            "attention.shared_kv_layers": 3,
            "rope.dimension_count": 128,
            "rope.dimension_count_swa": 64,
        },
        n_layer=6,
        without=_UNUSUAL + _OUTPUT_BIAS + _BIASES,
    ),
    Recipe("glm4"),
    _biased("gpt2"),
    _biased("gptneox", {"use_parallel_residual": True}),
    Recipe("granite", _GRANITE, is_tied=True),
    Recipe("granite_swa", {**_GRANITE, **_WINDOW_OF_6}, n_layer=6),
    Recipe(  # 4 blocks in the file, run as 12
        "hrm_text", {"hrm.layers_per_stack": 2, "hrm.h_cycles": 2, "hrm.l_cycles": 2}, n_layer=12
    ),
    Recipe("hunyuan-dense"),
    Recipe("internlm2"),
    _biased("jais"),
    _biased("jais2"),
    Recipe("llama", without=_UNUSUAL + _OUTPUT_BIAS + _BIASES),
    Recipe("maincoder"),
    Recipe("minicpm"),
    Recipe(
        "minicpm3",
        {**_LATENT, "attention.key_length": 96, "attention.value_length": 64, "attention.q_lora_rank": 96},
        n_head_kv=4,
    ),
    Recipe("mistral3"),
    Recipe("mpt", {"attention.max_alibi_bias": 8.0}, without=_SELDOM + r"|position_embd|attn_[qk]_norm|\.bias$"),
    Recipe("muse-glimmer", {**_WINDOW_OF_4, "logit_scale": 1.0}),
    Recipe("nanbeige", {"num_loops": 2}),  # 4 blocks in the file, run as 8
    _biased("nemotron"),
    Recipe("olmo"),
    Recipe("olmo2", _WINDOW_OF_6, n_layer=6),
    Recipe("openelm"),
    _biased("orion"),
    _biased("pangu-embedded"),
    Recipe("phi2", without=_UNUSUAL + _ROPE_FACTORS),
    Recipe("phi3", {"rope.scaling.original_context_length": 256}, without=_UNUSUAL + _OUTPUT_BIAS + _BIASES),
    Recipe("plamo"),
    Recipe("plamo3", _WINDOW_OF_6, n_layer=6),
    _biased("qwen", n_ff=3072),  # it halves the width itself
    Recipe("qwen2", without=_SELDOM, is_tied=True),
    Recipe("qwen2vl", _SECTIONS, without=_SELDOM),
    Recipe("qwen3"),
    Recipe("qwen3vl", _SECTIONS),
    Recipe("refact"),
    Recipe("seed_oss"),
    Recipe("smollm3"),
    Recipe("spark2_5", _WINDOW_OF_4),
    _biased("stablelm"),
    _biased("starcoder"),
    _biased("starcoder2"),
    Recipe("talkie", {"logit_scale": 1.0}),
    Recipe("xverse"),
    # mixtures
    _moe("afmoe", {**_SHARED, **_SIGMOID, **_LEADING, **_WINDOW_OF_4}),
    _plain_moe("arctic"),
    _moe("bailingmoe", {**_SHARED, **_SIGMOID}),
    _moe("bailingmoe2", {**_SHARED, **_SIGMOID, **_LEADING}),
    _moe("cohere2moe", {**_SHARED, **_SIGMOID, **_LEADING, **_WINDOW_OF_4, "logit_scale": 1.0}),
    _plain_moe("dbrx", {"attention.clamp_kqv": 8.0}),
    _moe("deepseek", {**_SHARED, **_LEADING, "expert_weights_scale": 1.0}),
    _moe(
        "deepseek2",
        {**_LATENT, **_SHARED, **_SIGMOID, **_LEADING, **_YARN, "rope.scaling.yarn_log_multiplier": 0.1},
        n_head_kv=1,
    ),
    _moe("deepseek32", {**_LATENT, **_SHARED, **_SIGMOID, **_LEADING, **_INDEXER}, n_head_kv=1, is_gate_up_fused=True),
    _moe(
        "deepseek4",
        {
            **_SHARED,
            **_SIGMOID,
            **_WINDOW,
            **_HYPER,
            **_INDEXER,
            "expert_gating_func": 4,
            "attention.key_length": 64,
            "attention.value_length": 64,
            "rope.dimension_count": 32,
            "attention.q_lora_rank": 64,
            "attention.output_group_count": 8,
            "attention.output_lora_rank": 32,
            "attention.compress_ratios": (0, 0, 4, 128),
            "attention.compress_rope_freq_base": 160000.0,
            "attention.indexer.head_count": 64,
            "attention.indexer.key_length": 128,
            "hash_layer_count": 0,
            "swiglu_clamp_exp": 10.0,
        },
        n_embd=512,
        n_head=8,
        n_head_kv=1,
        n_ff_expert=128,
    ),
    _moe("dots1", {**_SHARED, **_SIGMOID, **_LEADING}, n_head_kv=4),
    _moe(
        "dots3note",
        {
            **_LATENT,
            **_SHARED,
            **_SIGMOID,
            **_LEADING,
            **_INDEXER,
            **_WINDOW_OF_4,
            "attention.kv_lora_rank_swa": 128,
            "attention.key_length_swa": 160,
            "attention.value_length_swa": 128,
            "attention.key_length_mla_swa": 96,
            "attention.value_length_mla_swa": 64,
            "attention.indexer.types": (0, 1, 0, 1),
            "rope.freq_base_swa": 10000.0,
        },
        n_head_kv=1,
    ),
    _moe("ernie4_5-moe", {**_SHARED, **_LEADING, "interleave_moe_layer_step": 1}),
    _moe("exaone-moe", {**_SHARED, **_SIGMOID, **_LEADING, **_WINDOW_OF_4}),
    _moe("glm-dsa", {**_LATENT, **_SHARED, **_SIGMOID, **_LEADING, **_INDEXER}, n_head_kv=1),
    _moe("glm4moe", {**_SHARED, **_SIGMOID, **_LEADING}, n_nextn=1),
    _moe("gpt-oss", {**_WINDOW_OF_4, **_YARN}, without=_SELDOM),
    _plain_moe("granitemoe", {**_GRANITE, "expert_shared_feed_forward_length": 256}),
    _plain_moe("grok", {"logit_scale": 0.58, "embedding_scale": 16.0}),
    _moe("grovemoe", {"expert_chunk_feed_forward_length": 128, "expert_group_scale": 0.5, "experts_per_group": 2}),
    _moe("hunyuan-moe", _SHARED, n_ff=256),
    _moe("hy_v3", {**_SHARED, **_SIGMOID}),
    _moe(
        "hy_v4",
        {
            **_LATENT,
            **_SHARED,
            **_SIGMOID,
            **_LEADING,
            **_INDEXER,
            **_HYPER,
            "hyper_connection.magnitude": 2.0,
            "swiglu_clamp_exp": 10.0,
            "attention.indexer.types": (1, 0, 1, 0),
        },
        n_head_kv=1,
    ),
    _moe("laguna", {**_SHARED, **_SIGMOID, **_LEADING, **_WINDOW_OF_4}),
    _plain_moe("llama", name="llama-moe"),
    _moe("llama4", {"interleave_moe_layer_step": 2}),
    _moe("maple", {**_SHARED, **_SIGMOID, **_LEADING, **_WINDOW_OF_4, "swiglu_clamp_exp": 7.0}),
    _moe("mellum", _WINDOW_OF_4),
    _moe("mimo2", {**_SIGMOID, **_WINDOW_OF_4}),
    _moe("minimax-m2", _SIGMOID, n_ff=256),
    _moe(
        "minimax-m3",
        {**_SHARED, **_SIGMOID, **_LEADING, **_INDEXER, "attention.indexer.head_count": 2, "rope.dimension_count": 64},
    ),
    _moe("mistral4", {**_LATENT, **_SHARED, **_SIGMOID, **_LEADING}, n_head_kv=1),
    _plain_moe("olmoe", n_head_kv=4),
    _plain_moe("phimoe", without=_UNUSUAL + _ROPE_FACTORS),
    _moe("qwen2moe", _SHARED, without=_SELDOM),
    _moe("qwen3moe"),
    _moe("qwen3vlmoe", _SECTIONS),
    _moe("smallthinker", {**_WINDOW, "expert_gating_func": 2}),
    _moe("step35", {**_SHARED, **_SIGMOID, **_WINDOW_OF_4}),
    # recurrent
    Recipe("arwkv7", {**_RWKV_7, "token_shift_count": 1}, without=_SELDOM),
    Recipe(
        "mamba",
        {**_MAMBA_1, "ssm.inner_size": 1024, "ssm.time_step_rank": 32},
        n_embd=512,
        n_head=0,
        n_head_kv=0,
        n_ff=0,
        is_deepened=True,
    ),
    Recipe(
        "mamba2",
        {**_MAMBA_2, "ssm.inner_size": 1024, "ssm.time_step_rank": 16},
        n_embd=512,
        n_head=0,
        n_head_kv=0,
        n_ff=0,
        is_deepened=True,
    ),
    Recipe("rwkv6", _RWKV_6, n_head=0, n_head_kv=0, without=_SELDOM + _RWKV_6_LERPS),
    Recipe(
        "rwkv6qwen2",
        {**_RWKV_6, "token_shift_count": 1},
        without=_SELDOM + _RWKV_6_LERPS + "|time_mix_first|time_mix_ln",
    ),
    Recipe("rwkv7", _RWKV_7, n_head=0, n_head_kv=0, without=_SELDOM),
    # hybrid
    _moe(
        "bailingmoe3",
        {**_LATENT, **_SHARED, **_SIGMOID, **_LEADING, **_KIMI_DELTA, "rope.dimension_sections": (4, 6, 6, 0)},
        n_head_kv=(0, 0, 0, 1),
    ),
    Recipe("falcon-h1", _MAMBA_2),
    _moe(
        "glm5-next",
        {
            **_LATENT,
            **_SHARED,
            **_SIGMOID,
            **_LEADING,
            **_HYPER,
            **_INDEXER,
            **_KIMI_DELTA,
            "attention.key_length": 128,
            "attention.indexer.kpool": 4,
            "attention.indexer.kpool_select_tail": True,
            "rope.dimension_count": 0,
        },
        n_head_kv=(0, 0, 0, 1),
    ),
    _plain_moe(
        "granitehybrid",
        {**_MAMBA_2, **_GRANITE, "expert_shared_feed_forward_length": 256},
        n_head_kv=(0, 0, 2, 0),
        is_tied=True,
    ),
    _plain_moe("jamba", _MAMBA_1, n_head_kv=(0, 0, 2, 0)),
    _moe(
        "kimi-k3",
        {
            **_LATENT,
            **_SHARED,
            **_SIGMOID,
            **_LEADING,
            **_KIMI_DELTA,
            "expert_latent_length": 128,
            "attn_res.block_size": 12,
            "activation.situ_beta": 4.0,
            "activation.situ_linear_beta": 25.0,
        },
        n_head_kv=(0, 0, 0, 1),
    ),
    _moe(
        "kimi-linear",
        {**_LATENT, **_SHARED, **_SIGMOID, **_LEADING, **_KIMI_DELTA},
        n_head_kv=(0, 0, 0, 1),
    ),
    Recipe("lfm2", {"shortconv.l_cache": 3}, n_layer=6, n_head_kv=(0, 0, 2, 0, 0, 2), is_tied=True),
    _moe("lfm2moe", {**_SIGMOID, **_LEADING, "shortconv.l_cache": 3}, n_head_kv=(0, 2, 0, 2)),
    _moe("minimax-01", {"residual_scale": 3.5, "full_attention_interval": 4}, n_ff=256),
    Recipe("nemotron_h", _MAMBA_2, n_layer=6, n_head_kv=(0, 0, 2, 0, 0, 2), n_ff=(0, 3584, 0, 3584, 0, 0)),
    _moe(
        "nemotron_h_moe",
        {**_MAMBA_2, **_SHARED, **_SIGMOID},
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
    Recipe("qwen35", {**_DELTA, **_SECTIONS}),
    _moe("qwen35moe", {**_DELTA, **_SHARED, **_SECTIONS}, is_gate_up_fused=True),
    _moe("qwen3next", {**_DELTA, **_SHARED}, without=_SELDOM + _BIASES + r"|ssm_in\."),
    _moe(
        "qwen4exp",
        {
            **_DELTA,
            **_SHARED,
            **_SECTIONS,
            **_HYPER,
            **_INDEXER,
            "full_attention_interval": 2,
            "attention.compress_ratios": (4, 4, 4, 4),
        },
        is_gate_up_fused=True,
    ),
)

ARCHITECTURES: dict[str, Recipe] = {recipe.name or recipe.architecture: recipe for recipe in _RECIPES}
"""Every model there is, by name: the architecture's but for `llama-moe`, which is `llama` with experts."""

_MEAN, _CLS, _LAST, _RANK = ({"pooling_type": number} for number in (1, 2, 3, 4))
_WHOLE: Keys = {"attention.causal": False}


def _encoder(architecture: str, pooling: Keys, metadata: Keys | None = None, **changes: Any) -> Recipe:
    return Recipe(architecture, {**_WHOLE, **pooling, **(metadata or {})}, **{"n_head_kv": 4, **changes})


_EMBEDDERS = (
    _encoder("bert", _CLS, without=_SELDOM),
    _encoder("bert", _RANK, name="bert-rank", without=r"\.(input_)?scales?$"),
    _encoder("eurobert", _MEAN),
    _encoder("gemma-embedding", _MEAN, _WINDOW_OF_6, n_layer=6, n_head_kv=2),
    _encoder(
        "jina-bert-v2", _MEAN, {"attention.max_alibi_bias": 8.0}, without=_SELDOM + r"|attn_norm_2|attn_[qk]_norm"
    ),
    _encoder("jina-bert-v3", _MEAN, without=_SELDOM),
    _encoder("modern-bert", _CLS, _WINDOW_OF_4),
    _encoder("neo-bert", _CLS),
    _encoder("nomic-bert", _MEAN),
    _encoder("nomic-bert-moe", _MEAN, {"moe_every_n_layers": 2}, n_expert=N_EXPERT),
    _encoder("llama-embed", _MEAN, n_head_kv=2),
    Recipe("qwen3", _LAST, name="qwen3-embedding"),
)

EMBEDDERS: dict[str, Recipe] = {recipe.name or recipe.architecture: recipe for recipe in _EMBEDDERS}
"""Models for embeddings: encoders, one that ranks, and decoders whose files name a pooling."""


def make_model(name: str, folder: Path, *, scale: int = 1, seed: int = 0, quantisation: str | None = None) -> Path:
    """Write `folder/name-scale-seed.gguf`, unless it exists, and return its path.

    The same arguments give the same bytes, so a model that was made before in the folder that the environment variable
    TINY_MODELS names is copied from there. The file appears whole or not at all. `quantisation` is a file type of
    llama.cpp ("Q8_0", "Q4_0", "Q4_K_M", "MXFP4_MOE"...): the F16 file is made first and the quantised one beside it,
    with the type after the seed.

    Raises RuntimeError when llama.cpp refuses the recipe or the quantisation, with what it logged.
    """
    path = folder / f"{name}-{scale}-{seed}.gguf"
    if quantisation is not None:
        path = path.with_name(f"{path.stem}-{quantisation}.gguf")
    store = os.environ.get("TINY_MODELS")
    if path.exists():
        return path
    if store and Path(store) != folder:
        made = make_model(name, Path(store), scale=scale, seed=seed, quantisation=quantisation)
        with _writing(path) as draft:
            shutil.copyfile(made, draft)
    elif quantisation is not None:
        _quantise(make_model(name, folder, scale=scale, seed=seed), path, quantisation)
    else:
        recipe = (ARCHITECTURES | EMBEDDERS)[name]
        metadata = _metadata(recipe, scale)
        shapes = _shapes(recipe, metadata)
        if recipe.n_nextn:
            metadata |= _append_nextn(recipe, shapes)
        with _writing(path) as draft:
            _write(draft, recipe.architecture, metadata, shapes, seed)
    return path


def split_model(path: Path, parts: int, folder: Path) -> list[Path]:
    """Write the model at `path` again as `parts` shards in `folder`, cut by bytes and so within layers.

    Returns the shards in order; llama.cpp loads all of them from the first, which holds the metadata. The names end in
    `-00001-of-0000N.gguf`, as llama.cpp requires.

    Raises ValueError when there are fewer tensors than parts.
    """
    reader = GGUFReader(path)
    tensors = list(reader.tensors)
    if not 1 <= parts <= len(tensors):
        raise ValueError(f"cannot split the {len(tensors)} tensors of {path} into {parts} shards")
    ends = np.cumsum([int(tensor.n_bytes) for tensor in tensors])
    cuts = [0]
    for part in range(1, parts):
        cut = int(np.searchsorted(ends, ends[-1] * part // parts)) + 1
        cuts.append(min(max(cut, cuts[-1] + 1), len(tensors) - parts + part))
    cuts.append(len(tensors))

    shards = []
    for part in range(parts):
        shard = folder / f"{path.stem}-{part + 1:05d}-of-{parts:05d}.gguf"
        with _writing(shard) as draft:
            writer = GGUFWriter(draft, str(reader.fields["general.architecture"].contents()))
            if part == 0:
                _copy_metadata(reader, writer)
            writer.add_uint16("split.no", part)
            writer.add_uint16("split.count", parts)
            writer.add_int32("split.tensors.count", len(tensors))
            for tensor in tensors[cuts[part] : cuts[part + 1]]:
                writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            _finish(writer)
        shards.append(shard)
    return shards


def silence_llama_logs() -> None:
    """Keep llama.cpp's log off stderr from here on: for tests that call it themselves."""
    low.llama_log_set(_forget, None)


# Metadata


def _metadata(recipe: Recipe, scale: int) -> dict[str, Value]:
    """Every key of the file but `general.architecture`, which the writer adds."""
    width, depth = (1, scale) if recipe.is_deepened else (scale, 1)
    keys: dict[str, Value] = {
        "vocab_size": N_VOCAB,
        "context_length": N_CTX,
        "embedding_length": recipe.n_embd,
        "block_count": recipe.n_layer * depth,
        "feed_forward_length": _times(recipe.n_ff, width),
        "attention.head_count": recipe.n_head,
        "attention.head_count_kv": recipe.n_head_kv,
        # an architecture reads one of the two
        "attention.layer_norm_epsilon": 1e-5,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    if recipe.n_expert:
        keys |= {"expert_count": recipe.n_expert, "expert_used_count": N_EXPERT_USED}
    if recipe.n_ff_expert:
        keys["expert_feed_forward_length"] = recipe.n_ff_expert * width
    keys |= recipe.metadata
    return {
        "general.name": "tiny random model",  # llama.cpp treats some names of models in their own way
        "general.file_type": int(low.LLAMA_FTYPE_MOSTLY_F16),
        **{key if key.startswith("xielu.") else f"{recipe.architecture}.{key}": value for key, value in keys.items()},
        "tokenizer.ggml.model": "test",
        "tokenizer.ggml.tokens": [f"tok_{token}" for token in range(N_VOCAB)],
        "tokenizer.ggml.scores": [0.0] * N_VOCAB,
        **({"tokenizer.ggml.token_type_count": 2} if "pooling_type" in recipe.metadata else {}),
    }


def _times(numbers: int | tuple[int, ...], factor: int) -> int | tuple[int, ...]:
    return numbers * factor if isinstance(numbers, int) else tuple(number * factor for number in numbers)


def _value_type(value: bool | int | float | str) -> GGUFValueType:
    if isinstance(value, bool):  # before int, of which it is a kind
        return GGUFValueType.BOOL
    if isinstance(value, int):
        return GGUFValueType.UINT32
    return GGUFValueType.FLOAT32 if isinstance(value, float) else GGUFValueType.STRING


# Which tensors


class _TensorHead(ctypes.Structure):
    """The start of llama.cpp's `ggml_tensor`: all that we read of it."""

    _fields_ = (("type", ctypes.c_int), ("buffer", ctypes.c_void_p), ("ne", ctypes.c_int64 * 4))


def _shapes(recipe: Recipe, metadata: Keys) -> dict[str, Shape]:
    """Name and shape of every tensor that the file is to hold, in llama.cpp's order."""
    shapes: dict[str, Shape] = {}
    for name, shape in _shapes_in_llama({"general.architecture": recipe.architecture, **metadata}).items():
        if re.search(recipe.without, name) or (recipe.is_tied and name == "output.weight"):
            continue
        if "ffn_gate_up_exps" in name and not recipe.is_gate_up_fused:
            for half in ("ffn_gate_exps", "ffn_up_exps"):
                shapes[name.replace("ffn_gate_up_exps", half)] = (shape[0], shape[1] // 2, *shape[2:])
        else:
            shapes[name] = shape
    return shapes


def _append_nextn(recipe: Recipe, shapes: dict[str, Shape]) -> dict[str, Value]:
    """Add the blocks of multi-token prediction to `shapes`; the metadata that goes with them.

    Apart from the rest, as llama.cpp skips these blocks and so cannot be asked for their tensors.
    """
    last = f"blk.{recipe.n_layer - 1}."
    for block in range(recipe.n_layer, recipe.n_layer + recipe.n_nextn):
        like = {name.removeprefix(last): shape for name, shape in shapes.items() if name.startswith(last)}
        shapes |= {f"blk.{block}.{name}": shape for name, shape in like.items()}
        shapes[f"blk.{block}.nextn.eh_proj.weight"] = (2 * recipe.n_embd, recipe.n_embd)
        shapes |= {f"blk.{block}.nextn.{norm}.weight": (recipe.n_embd,) for norm in ("enorm", "hnorm")}
    return {
        f"{recipe.architecture}.block_count": recipe.n_layer + recipe.n_nextn,
        f"{recipe.architecture}.nextn_predict_layers": recipe.n_nextn,
    }


def _shapes_in_llama(metadata: Keys) -> dict[str, Shape]:
    """Every tensor that llama.cpp creates for `metadata`, optional ones too."""
    shapes: dict[str, Shape] = {}

    @low.llama_model_set_tensor_data_t
    def note(tensor: int, _user_data: int | None) -> None:
        sizes = list(_TensorHead.from_address(tensor).ne)
        while len(sizes) > 1 and sizes[-1] == 1:
            sizes.pop()
        shapes[_ggml.ggml_get_name(tensor).decode()] = tuple(sizes)

    low.llama_backend_init()
    params = low.llama_model_default_params()
    params.n_gpu_layers = 0
    context = _gguf_context(metadata)
    try:
        with _catching_log() as log:
            model = low.llama_model_init_from_user(context, note, None, params)
    finally:
        _ggml.gguf_free(context)
    if not model:
        raise RuntimeError(f"llama.cpp refused the metadata of {metadata['general.architecture']}: {log}")
    low.llama_model_free(model)
    return shapes


def _gguf_context(metadata: Keys) -> int:
    """A `gguf_context` in llama.cpp's memory that holds `metadata`; the caller frees it."""
    context: int = _ggml.gguf_init_empty()
    for name, value in metadata.items():
        key = name.encode()
        if isinstance(value, bool):
            _ggml.gguf_set_val_bool(context, key, value)
        elif isinstance(value, int):
            _ggml.gguf_set_val_u32(context, key, value)
        elif isinstance(value, float):
            _ggml.gguf_set_val_f32(context, key, value)
        elif isinstance(value, str):
            _ggml.gguf_set_val_str(context, key, value.encode())
        elif isinstance(value[0], str):
            words = (ctypes.c_char_p * len(value))(*(str(word).encode() for word in value))
            _ggml.gguf_set_arr_str(context, key, words, len(value))
        else:
            numbers = np.asarray(value, dtype=np.float32 if isinstance(value[0], float) else np.uint32)
            _ggml.gguf_set_arr_data(context, key, int(_value_type(value[0])), numbers.ctypes.data, len(value))
    return context


def _load_ggml() -> ctypes.CDLL:
    library: ctypes.CDLL = load_shared_library("ggml-base", libggml_base_path)
    context, text = ctypes.c_void_p, ctypes.c_char_p
    for name, result, arguments in (
        ("ggml_get_name", text, [ctypes.c_void_p]),
        ("gguf_init_empty", context, []),
        ("gguf_free", None, [context]),
        ("gguf_set_val_bool", None, [context, text, ctypes.c_bool]),
        ("gguf_set_val_u32", None, [context, text, ctypes.c_uint32]),
        ("gguf_set_val_f32", None, [context, text, ctypes.c_float]),
        ("gguf_set_val_str", None, [context, text, text]),
        ("gguf_set_arr_str", None, [context, text, ctypes.c_void_p, ctypes.c_size_t]),
        ("gguf_set_arr_data", None, [context, text, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


_ggml = _load_ggml()

# Weights

_ALWAYS_F32 = re.compile(
    r"norm|conv1d|shortconv\.conv|ssm_a|time_mix_(first|lerp|[wavg][12]|decay_w)|ffn_gate_inp|altup_|hc_|_ape"
)


def _draw(name: str, shape: Shape, seed: int, *, is_tied: bool) -> NDArray[Any]:
    """Random values for the tensor `name`, of a size that keeps activations near 1; numpy order, F16 or F32."""
    generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
    values: NDArray[Any] = generator.standard_normal(shape[::-1], dtype=np.float32)
    if name.endswith("ssm_a"):
        values = -np.abs(values) - 0.1  # a state decays
    elif name.endswith("ssm_dt.bias"):
        values = 0.5 * values - 3  # before the softplus: short time steps, long memory
    elif name.endswith("bias"):
        values *= 0.05
    elif re.search(r"norm|time_mix_ln|ssm_d$", name):
        values = 1 + 0.1 * values
    elif "rope_f" in name:
        values = 1 + np.abs(values)  # divides a frequency
    elif name.startswith("token_embd"):
        values *= 0.02 if is_tied else 0.3  # tied and large, every token predicts itself
    else:
        values /= np.sqrt(shape[0])
    is_matrix = len(shape) > 1 and min(shape[:2]) >= 64
    return values.astype(np.float16 if is_matrix and not _ALWAYS_F32.search(name) else np.float32)


# Files


def _write(path: Path, architecture: str, metadata: Keys, shapes: Mapping[str, Shape], seed: int) -> None:
    writer = GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if isinstance(value, (bool, int, float, str)):
            writer.add_key_value(key, value, _value_type(value))
        else:
            writer.add_key_value(key, list(value), GGUFValueType.ARRAY, _value_type(value[0]))
    for name, shape in shapes.items():
        writer.add_tensor(name, _draw(name, shape, seed, is_tied="output.weight" not in shapes))
    _finish(writer)


def _copy_metadata(reader: GGUFReader, writer: GGUFWriter) -> None:
    for key, entry in reader.fields.items():
        if key == "general.architecture" or key.startswith("GGUF."):  # the writer's, and the reader's own
            continue
        element = entry.types[-1] if entry.types[0] is GGUFValueType.ARRAY else None
        writer.add_key_value(key, entry.contents(), entry.types[0], element)


def _finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _quantise(source: Path, target: Path, quantisation: str) -> None:
    params = low.llama_model_quantize_default_params()
    params.ftype = getattr(low, f"LLAMA_FTYPE_MOSTLY_{quantisation}")
    with _writing(target) as draft, _catching_log() as log:
        if low.llama_model_quantize(os.fsencode(source), os.fsencode(draft), ctypes.byref(params)) != 0:
            raise RuntimeError(f"llama.cpp did not quantise {source} to {quantisation}: {log}")


@contextmanager
def _writing(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to; it becomes `path` when the block ends well and goes when it does not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield draft
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


# llama.cpp's log

_GGML_LOG_LEVEL_WARN, _GGML_LOG_LEVEL_ERROR = 3, 4


@low.llama_log_callback
def _forget(_level: int, _text: bytes, _user_data: int | None) -> None:
    """Drop a line; at module level, as llama.cpp keeps the address and nothing else would keep the object."""


@contextmanager
def _catching_log() -> Iterator[list[str]]:
    """Collect llama.cpp's warnings and errors, off stderr, and give the log back to whom it belonged."""
    lines: list[str] = []

    @low.llama_log_callback
    def collect(level: int, text: bytes, _user_data: int | None) -> None:
        if level in (_GGML_LOG_LEVEL_WARN, _GGML_LOG_LEVEL_ERROR):
            lines.append(text.decode(errors="replace").strip())

    owner, owner_data = low.llama_log_callback(), ctypes.c_void_p()
    low.llama_log_get(ctypes.byref(owner), ctypes.byref(owner_data))
    low.llama_log_set(collect, None)
    try:
        yield lines
    finally:
        low.llama_log_set(owner, owner_data)
